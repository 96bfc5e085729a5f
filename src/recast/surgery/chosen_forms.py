"""Forms that `tune_` chose, as plain data: saved with a network, and restored on the same kind of processor or GPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import nn

from recast.layers.cmhsa import gated_layers
from recast.layers.forms import Forms
from recast.surgery.wrappers import unwrapped

Form = Literal["split", "merged", "sdpa", "dense"]


@dataclass(frozen=True)
class ChosenForms:
    """Choices of `tune_` for a network."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    devices: dict[str, str] = field(default_factory=dict)
    """Type of a device (cpu, cuda) → the name of the one that was timed."""
    layers: dict[str, list[tuple[str, tuple[int, int], Form | None, Form]]] = field(default_factory=dict)
    """Name of a layer → its `Forms`: type of device, size of the input, form in inference and in training."""


def device_name(kind: str) -> str:
    """Return the name of this machine's device of a type: of its GPU, or of its processor."""
    if kind == "cuda":
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    file = Path("/proc/cpuinfo")  # platform.processor() is empty on Linux
    lines = file.read_text().splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def chosen_forms(model: nn.Module) -> ChosenForms | None:
    """Return what `tune_` chose on this machine; None for a network that was not tuned."""
    tuned = {name: layer.tuned for name, layer in gated_layers(unwrapped(model)).items()}
    kinds = sorted({forms.device for choices in tuned.values() for forms in choices})
    layers: Any = {name: [tuple(forms) for forms in choices] for name, choices in tuned.items()}
    return ChosenForms({kind: device_name(kind) for kind in kinds}, layers) if kinds else None


def choose_forms_(model: nn.Module, chosen: ChosenForms) -> None:
    """Set the chosen forms, in place, for devices of the same name; other devices keep the rule of "auto"."""
    here = {kind for kind, name in chosen.devices.items() if name == device_name(kind)}
    layers = gated_layers(unwrapped(model))
    for name in layers.keys() & chosen.layers.keys():
        layers[name].tuned = tuple(Forms(*forms) for forms in chosen.layers[name] if forms[0] in here)
