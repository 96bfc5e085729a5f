"""When convolutions become attention: before training, or during it with the same optimizer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import MinLen
from pydantic import AfterValidator

from recast.config import CountOrZero, OneOf, Rare, problem
from recast.lab.config.types import Words
from recast.surgery.schedule import Order, Schedule

if TYPE_CHECKING:
    from recast.surgery.plan import Plan


def _dates(words: list[str]) -> list[str]:
    for word in words:
        if not re.fullmatch(r"\s*\d{1,9}\s*:.+", word):
            raise problem("must be EPOCH:LAYER words, such as 58:blocks.5.*")
    return words


class ScheduleConfig(OneOf):
    """Schedule"""

    default: ClassVar[str] = "before"
    is_during: ClassVar[bool] = True
    """True if layers become attention while the network trains."""

    kind: Literal["before", "never", "at_once", "progressive", "listed"]
    """When convolutions become attention. before: before training (T-CNN). never: they stay convolutions, and only
    recast.stride applies. at_once: all after conv_epochs epochs (T-CNN*). progressive: one after another at equal
    intervals (PRS). listed: at the epochs of dates."""

    @property
    def start(self) -> Before:
        """Steps between a recast before training and the training."""
        return Before()

    def dated(self, plan: Plan, epochs: int) -> Schedule | None:
        """Return the dates of the layers of a plan over `epochs`; None if layers are not recast during training."""
        return None


class Before(ScheduleConfig):
    """Before training (T-CNN)."""

    is_during = False
    kind: Literal["before"] = "before"
    recalibrate_bn: Annotated[CountOrZero, Rare()] = 0
    """Measure BatchNorm's statistics on this many training images after recasting. 0: keep the parent's."""

    @property
    def start(self) -> Before:
        """Steps between the recast and the training."""
        return self


class Never(ScheduleConfig):
    """Never: a control with maps as large as the hybrid's, without attention."""

    is_during = False
    kind: Literal["never"] = "never"


class AtOnce(ScheduleConfig):
    """All layers after some epochs (T-CNN*)."""

    kind: Literal["at_once"] = "at_once"
    conv_epochs: CountOrZero = 0
    """Epochs trained as convolutions. 0: attention from the start."""

    def dated(self, plan: Plan, epochs: int) -> Schedule:
        """Return the dates of the layers of a plan."""
        return Schedule.at_once(plan, self.conv_epochs + 1)


class Progressive(ScheduleConfig):
    """One layer after another at equal intervals (PRS)."""

    kind: Literal["progressive"] = "progressive"
    order: Order = "last_first"
    """Order in which layers become attention. PRS starts with the last."""

    def dated(self, plan: Plan, epochs: int) -> Schedule:
        """Return the dates of the layers of a plan over `epochs`."""
        return Schedule.progressive(plan, epochs, self.order)


class Listed(ScheduleConfig):
    """On given dates."""

    kind: Literal["listed"] = "listed"
    dates: Annotated[Words, MinLen(1), AfterValidator(_dates)]  # type: ignore[misc]  # options have names
    """EPOCH:LAYER pairs, such as 58:blocks.5.* 115:blocks.4.*. The layers become attention at the start of that epoch
    (the first is 1)."""

    @property
    def by_epoch(self) -> dict[int, list[str]]:
        """Names or globs of layers by the epoch from which they are attention."""
        dates: dict[int, list[str]] = {}
        for word in self.dates:
            epoch, _, layer = word.partition(":")
            dates.setdefault(int(epoch), []).append(layer.strip())
        return dates

    def dated(self, plan: Plan, epochs: int) -> Schedule:
        """Return the dates of the layers of a plan."""
        return Schedule.listed(plan, self.by_epoch)
