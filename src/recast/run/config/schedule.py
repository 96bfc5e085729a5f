"""When layers leave the convolution, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from recast.run.fields import Count, CountOrZero, check_fields


@dataclass
class ScheduleConfig:
    """When convolutions become attention: before training, or during it with the same optimiser."""

    name: Literal["before", "at_once", "progressive", "listed", "learned"] = "before"
    """before: before training (T-CNN). at_once: all layers after conv_epochs epochs (T-CNN*). progressive: one layer
    after the other at equal distances, all through training (PRS). listed: on given dates. learned: when the gates
    promise more than the convolutions gain."""
    conv_epochs: CountOrZero = 0
    """at_once: epochs trained as convolutions; 0: attention from the start, with the whole learning-rate schedule."""
    order: Literal["last_first", "first_first", "learned"] = "last_first"
    """progressive: which layer is the first to become attention; PRS begins with the last. learned: at every date the
    one whose gates promise most."""
    dates: list[str] = field(default_factory=list)
    """listed: EPOCH:LAYER words, e.g. 58:blocks.5.* 115:blocks.4.*; the layers are attention from that epoch on,
    counted from 1."""
    probe_images: Count = 256
    """learned: training images that the gradients of a linear gate are measured on, whatever the layers' own gate."""

    def __post_init__(self) -> None:
        check_fields(self, "schedule.")
