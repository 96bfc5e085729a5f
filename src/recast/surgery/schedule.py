"""`Schedule`: dates at which the layers of a plan become attention. Plain data, without torch.

Epochs count from 1. A layer's date is the first epoch that it is attention in; the swap itself
(`recast.recast_during_training_`) is made before that epoch begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from recast.config import Count, checked, coerce, read
from recast.errors import RecastError, shown, suggest

if TYPE_CHECKING:
    from recast.surgery.plan import Plan


Order = Literal["last_first", "first_first"]


@checked
class Schedule:
    """Dates at which the steps of a plan become attention. Immutable.

    Made by `at_once`, `progressive` and `listed`, each from a plan.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
        >>> plan = recast.plan(model, torch.randn(1, 3, 8, 8), where="all")
        >>> schedule = recast.Schedule.progressive(plan, epochs=30)
        >>> schedule.due(11), schedule.due(21)
        (('1',), ('0',))
    """

    name: str
    layers: tuple[str, ...]
    """The plan's steps, in the network's order."""
    dates: Mapping[str, int] = field(default_factory=dict)
    """Layer → first epoch as attention, from 1. A layer without a date stays a convolution."""

    @classmethod
    def at_once(cls, plan: Plan, epoch: int) -> Schedule:
        """Schedule every layer to be recast before `epoch`; 1: before any training.

        T-CNN* (d'Ascoli et al. 2021, Sec. 5) trains t₁ epochs as a CNN: epoch = t₁ + 1.
        """
        coerce(int, epoch, "epoch")
        return cls.listed(plan, {epoch: ["*"]}, name="at_once")

    @classmethod
    def progressive(cls, plan: Plan, epochs: int, order: Order = "last_first") -> Schedule:
        """Schedule one layer after another at equal intervals: PRS (Lee et al. 2022, Eq. 7), for any network.

        Layer l = 1 … L of the plan is a convolution while t ≤ T·(1 − l/(L+1)), t = 1 … T = `epochs`: the last layer
        becomes attention first, after T/(L+1) epochs. Compared as whole numbers, t·(L+1) ≤ T·(L+1−l), so that no date
        depends on rounding. `order="first_first"` begins with the first layer instead.
        """
        coerce(Order, order, "order")
        coerce(Count, epochs, "epochs")
        layers = _layers(plan)
        last = len(layers) + 1
        dates = [epochs * (last - number) // last + 1 for number in range(1, last)]
        dated = layers if order == "last_first" else layers[::-1]
        return cls("progressive", layers, dict(zip(dated, dates, strict=True)))

    @classmethod
    def listed(cls, plan: Plan, dates: Mapping[int, Sequence[str]], *, name: str = "listed") -> Schedule:
        """Use the given dates: epoch → names or globs of layers. Other layers stay convolutions.

        Raises RecastError for an epoch below 1, a name that matches no step, and a layer with two dates.
        """
        layers, epochs = _layers(plan), dict[str, int]()
        coerce(Mapping[int, list[str]], dates, "dates (epoch → list of layers)")
        for epoch, patterns in dates.items():
            if epoch < 1:
                raise RecastError(f"epochs count from 1, got {epoch} for {', '.join(patterns)}")
            for pattern in patterns:
                named = [layer for layer in layers if fnmatchcase(layer, pattern)]
                if not named:
                    raise RecastError(
                        f"the schedule names {pattern!r}, which is not among the layers to recast (where): "
                        f"{', '.join(layers)}.{suggest(pattern, layers)}"
                    )
                for layer in named:
                    if epochs.setdefault(layer, epoch) != epoch:
                        raise RecastError(f"{layer} has two dates, epoch {epochs[layer]} and {epoch}: keep one")
        return cls(name, layers, epochs)

    def due(self, epoch: int) -> tuple[str, ...]:
        """Return the layers that become attention before `epoch` (from 1), in the network's order."""
        return tuple(layer for layer in self.layers if self.dates.get(layer) == epoch)

    def waiting(self) -> tuple[str, ...]:
        """Return the layers without a date."""
        return tuple(layer for layer in self.layers if layer not in self.dates)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able fields."""
        return {"name": self.name, "layers": list(self.layers), "dates": dict(self.dates)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """Read the data of `to_dict`."""
        return read(cls, data, "the schedule")

    def __str__(self) -> str:
        """List every layer with its date, in the order of the dates."""
        width = max(map(len, self.layers), default=0)
        lines = [
            f"  {layer:<{width}}  attention from epoch {date}" + (" (the start)" if date == 1 else "")
            for layer, date in sorted(self.dates.items(), key=lambda item: item[1])
        ]
        lines += [f"  {layer:<{width}}  stays a convolution" for layer in self.waiting()]
        return "\n".join([f"schedule: {self.name}", *lines])


def _layers(plan: Plan) -> tuple[str, ...]:
    if not isinstance(getattr(plan, "steps", None), tuple):
        raise RecastError(f"plan must be a Plan, as recast.plan gives, got {shown(plan)}")
    layers = tuple(step.name for step in plan.steps)
    if "" in layers:
        raise RecastError("the model itself is the convolution: put it into a module to recast it during training")
    return layers
