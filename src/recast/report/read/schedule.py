"""schedule.json of a run folder: when layers became attention, and what was measured around each switch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recast.errors import RecastError
from recast.run.files import number, require

VERSION = 1


@dataclass(frozen=True)
class Measured:
    """The network on the validation images."""

    loss: float
    top1: float
    """In percent."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Measured:
        """From `val_loss` and `val_top1`; NaN for what is not there."""
        return cls(number(found.get("val_loss")), number(found.get("val_top1")))


@dataclass(frozen=True)
class Switch:
    """Layers that became attention at the start of one epoch."""

    epoch: int
    layers: list[str]
    before: Measured
    after: Measured
    """Right after it, before any training; NaN while it is not measured yet."""


@dataclass(frozen=True)
class Probe:
    """What a learned schedule compared after an epoch, as falls of the training loss in one epoch."""

    epoch: int
    delivered: float
    """NaN after the first epoch, which has none to compare with."""
    promised: dict[str, float]
    """Per layer that is still a convolution: what its gates promise."""
    chosen: list[str]


@dataclass(frozen=True)
class Schedule:
    """When layers become attention. Epochs count from 1; a date is the first epoch in which a layer is attention."""

    name: str
    epochs: int
    """Of the whole training."""
    layers: list[str]
    """In the network's order."""
    dates: dict[str, int]
    """What is decided so far."""
    switches: list[Switch]
    """Those that have happened."""
    probes: list[Probe]

    @property
    def switched(self) -> list[str]:
        """The layers that have become attention, in that order."""
        return [layer for switch in self.switches for layer in switch.layers]


def parse_schedule(found: dict[str, Any], where: str) -> Schedule:
    """`found` as a schedule; `where` names the file in errors.

    Raises:
        RecastError: another version, or something missing or of another type.
    """
    require(where, found, ("version", "name", "epochs", "layers", "dates", "switches"))
    if found["version"] != VERSION:
        raise RecastError(f"{where} is of version {found['version']}: this recast reads version {VERSION}")
    switches = [_switch(item, f"a switch of {where}") for item in _list(found, "switches", where)]
    dates = require(f"dates of {where}", found["dates"], ())
    return Schedule(
        name=str(found["name"]),
        epochs=_whole(found["epochs"], f"epochs of {where}"),
        layers=_list(found, "layers", where),
        dates={layer: _whole(date, f"the date of {layer} in {where}") for layer, date in dates.items()},
        switches=sorted(switches, key=lambda switch: switch.epoch),
        probes=[_probe(item, f"a probe of {where}") for item in _list(found, "probes", where)],
    )


def _switch(found: object, where: str) -> Switch:
    switch = require(where, found, ("epoch", "layers", "before", "after"))
    before, after = (
        Measured.of({} if switch[key] is None else require(f"{key} {where}", switch[key], ()))
        for key in ("before", "after")
    )
    return Switch(_whole(switch["epoch"], f"epoch of {where}"), _list(switch, "layers", where), before, after)


def _probe(found: object, where: str) -> Probe:
    probe = require(where, found, ("epoch", "delivered", "promised", "chosen"))
    promised = require(f"promised of {where}", probe["promised"], ())
    return Probe(
        epoch=_whole(probe["epoch"], f"epoch of {where}"),
        delivered=number(probe["delivered"]),
        promised={layer: number(value) for layer, value in promised.items()},
        chosen=_list(probe, "chosen", where),
    )


def _list(found: dict[str, Any], key: str, where: str) -> list[Any]:
    values = found.get(key) or []
    if not isinstance(values, list):
        raise RecastError(f"{key} of {where} must be a list, got {type(values).__name__}")
    return values


def _whole(found: object, where: str) -> int:
    value = number(found)
    if not (math.isfinite(value) and value == int(value)):
        raise RecastError(f"{where} must be a whole number, got {found!r}")
    return int(value)
