"""A schedule carried out: which layers of a training have left the convolution, and what that did to it.

`schedule.json` in the run folder says so for readers; the checkpoint holds the same, so that a run that goes on has the
network and the optimiser that it had.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from recast.data.seeding import mix_seed, seeded_on
from recast.errors import RecastError
from recast.run.config import Recipe
from recast.run.files import as_record
from recast.run.records import Measured, Probe, Switch, Switching
from recast.run.schedule import Schedule
from recast.surgery.apply import recast_
from recast.surgery.during_training import recast_during_training_
from recast.surgery.plan import Plan

VERSION = 1


@dataclass
class Switches:
    """The plan, its schedule as far as it is decided, and the switches made so far."""

    plan: Plan
    schedule: Schedule
    epochs: int
    done: list[Switch] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan | None) -> Switches | None:
        """Those of a recipe; None where nothing is recast during training.

        Raises RecastError for a schedule without a plan, a plan without a schedule, and dates outside of the training.
        """
        if recipe.schedule.name == "before":
            if plan is not None:
                raise RecastError("fit(plan=...) is for layers that are recast during training: set recipe.schedule")
            return None
        if plan is None:
            raise RecastError(f"schedule={recipe.schedule.name} recasts during training: pass fit(plan=plan(model, …))")
        schedule = Schedule.of(recipe.schedule, plan, recipe.epochs)
        assert schedule is not None
        return cls(plan, schedule, recipe.epochs)

    def due(self, epoch: int) -> tuple[str, ...]:
        """Layers to swap before `epoch` begins that are not swapped yet."""
        taken = {layer for switch in self.done for layer in switch.layers}
        return tuple(layer for layer in self.schedule.due(epoch) if layer not in taken)

    def take_(
        self, epoch: int, before: Measured, model: nn.Module, optimizer: Optimizer, ema: ModelEmaV3 | None,
        recipe: Recipe,
    ) -> Switch:  # fmt: skip
        """Swap what is due before `epoch`; what is random in the new layers follows from (seed, epoch)."""
        layers = self.due(epoch)
        averages = [] if ema is None else [ema.module]
        device = next(model.parameters()).device
        with seeded_on(device, mix_seed("switch", recipe.seed, epoch)):
            recast_during_training_(
                model, optimizer, self.plan, layers, averages=averages, gate_lr=recipe.optim.gate_lr
            )  # fmt: skip
        self.done.append(Switch(epoch, layers, before))
        return self.done[-1]

    def replay_(self, saved: dict[str, Any], model: nn.Module, ema: ModelEmaV3 | None) -> None:
        """Give a network that was never recast the form it had when `to_dict` was saved; weights are loaded later."""
        if tuple(saved["layers"]) != self.schedule.layers:
            raise RecastError("the state belongs to another plan: its layers are " + ", ".join(saved["layers"]))
        self.schedule = Schedule.from_dict(saved)
        record = as_record(Switching, saved, "the state")
        self.done, self.probes = record.switches, record.probes
        for switch in self.done:
            for network in [model] if ema is None else [model, ema.module]:
                recast_(network, self.plan, steps=switch.layers)

    def to_dict(self) -> dict[str, Any]:
        """schedule.json: the schedule, and every switch and measurement so far."""
        record = Switching(
            version=VERSION, **self.schedule.to_dict(), epochs=self.epochs, switches=self.done, probes=self.probes
        )
        found = asdict(record)
        for switch in found["switches"]:
            switch["layers"] = list(switch["layers"])
        return found
