"""`recast plan MODEL`: the plan as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from recast.config import Classes, Config, Count, FilePath
from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.config import DataConfig
from recast.lab.config.evaluation import parse_size
from recast.layers.config import LinearGate, NoPool, PoolConfig, RecastConfig
from recast.models.config import ModelConfig
from recast.models.trust import trusting
from recast.reading import decode, read_bytes
from recast.surgery.limits import Budget

if TYPE_CHECKING:
    from torch import nn

    from recast.lab.data import Data
    from recast.lab.edited_plan import Edited
    from recast.surgery.plan import Plan
    from recast.tracing.examples import Example

EXAMPLES = """  recast plan resnet50
  recast plan torchvision:resnet18 --img-size 320x256 --where 'layer3.*' 'layer4.*'
  recast plan resnetrs50 --gate sigmoid --stride remove        (the T-CNN paper's choice)
  recast plan resnet50 --where all --budget macs=1.3x,memory=2GiB --out plan.json
  recast plan resnet50 --plan plan.json                        (after editing: take steps out, add {"name": "..."})
  recast plan resnet50 --where none --pool single              (attention pooling alone)

Layers (--where): last_stage, all, stage:N (stage:-1 is the last), a name, a glob (layer4.*), re:REGEX; none: no layer.
Limits (--budget): tokens=N for a layer (none: any); macs=, params=, memory= for the whole model and one image, as an
amount (5G, 30M, 2GiB) or a multiple of the parent's (1.3x). Layers are taken from the end of the network.
"""
IN_PLAN = ("where", "budget", "recast", "pool")
"""Sections that a plan file holds too."""


class Network(Config):
    """A network, and its layers that become attention"""

    checkpoint: FilePath | None = None
    """Weights, .safetensors or .pth."""
    checkpoint_key: str | None = None
    """Which weights of a checkpoint with several, e.g. state_dict. None: as timm, EMA first."""
    pretrained: bool = False
    """Let timm or torchvision fetch its weights."""
    num_classes: Classes | None = None
    """Classes of the head."""
    img_size: str | None = None
    """Pixels, 224 or 224x160 (height x width)."""
    where: list[str] = Field(["last_stage"])
    """Layers to recast: last_stage, all, stage:N, names, globs, re:REGEX; none: the pooling alone."""
    budget: str = "tokens=1024"
    """Limits: tokens=N per layer; macs=, params=, memory= (1.3x, 5G, 64MiB)."""
    plan: FilePath | None = None
    """A plan.json, edited or not: layers and settings."""
    recast: RecastConfig = LinearGate()
    pool: PoolConfig = NoPool()

    @classmethod
    def of(cls, typed: Typed[Network]) -> Network:
        """Return what was typed. Raises RecastError for a bad budget, and for options beside --plan."""
        network = typed.over({})
        Budget.parse(network.budget)
        if network.plan is not None:
            check_alone(typed)
        return network

    def open(self, name: str, data: Data | None = None) -> tuple[nn.Module, Data | None]:
        """Return the network of a name, and the data set normalized as the network knows it."""
        from recast.models.build import build, input_defaults

        config = ModelConfig(
            name, self.checkpoint, self.pretrained, self.num_classes, checkpoint_key=self.checkpoint_key
        )  # fmt: skip
        with trusting(name):
            model = build(config, num_classes=len(data.classes) if data else None)
        if data is not None:
            defaults = input_defaults(model) or data
            data = replace(data, mean=defaults.mean, std=defaults.std)
        return model, data

    def load(
        self, name: str, data_dir: str | None, num_train: Count | None = None, num_val: Count | None = None
    ) -> Data:
        """Return the data set of a name, with images of the network's size."""
        from recast.lab.data import load_data

        side, width = parse_size(self.img_size, "--img-size") if self.img_size else (None, None)
        if side != width:
            raise RecastError(f"images of a data set are square: --img-size {side}, got {self.img_size!r}")
        return load_data(DataConfig(name, data_dir, img_size=side, num_train=num_train, num_val=num_val))

    def plan_of(self, model: nn.Module, example: Example) -> Plan:
        """Return the plan of a model."""
        from recast.lab.edited_plan import replan
        from recast.surgery.planning import plan

        if self.plan is not None:
            return replan(model, example, read_plan_file(self.plan))
        return plan(model, example, self.recast, where=self.where, budget=self.budget, pool=self.pool)


def check_alone(typed: Typed[Any]) -> None:
    """Raise RecastError for options beside --plan that the plan file contains too."""
    if options := [typed.name(path) for path in typed.words if path[0] in IN_PLAN]:
        raise RecastError(f"--plan names the layers and holds their settings: drop {options[0]}, or change the file")


def read_plan_file(path: str) -> Edited:
    """Read a plan file, edited or not. Raises RecastError for another file."""
    from recast.lab.edited_plan import read_edited

    return read_edited(decode(read_bytes(path), path), path)


def example_shape(model: nn.Module, img_size: str | None) -> tuple[int, int, int]:
    """Return channels, rows and columns of an image for `model`; the default size is the network's own, else 224."""
    from recast.models.build import input_defaults
    from recast.surgery.rules import is_convolution

    defaults = input_defaults(model)
    convolutions = [module for module in model.modules() if is_convolution(module)]
    channels = int(getattr(convolutions[0], "in_channels", 3)) if convolutions else 3
    return channels, *(defaults.size if defaults and img_size is None else parse_size(img_size or "224", "--img-size"))


def plan(
    model: str,
    /,
    *,
    out: FilePath | None = None,
    network: Typed[Network],
    output: Compute,
) -> int:
    """Show which layers of a model become attention, at what cost, and why the rest stays. Nothing is changed.

    Args:
        model: timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or
            pkg.module:function.
        out: Also write the plan to this .json file.
    """
    wanted = Network.of(network)
    path = Path(out) if out else None
    if path is not None:
        _check_plan_file(path)

    import torch

    parent, _ = wanted.open(model)
    planned = wanted.plan_of(parent, torch.zeros(1, *example_shape(parent, wanted.img_size)))
    if path is not None:
        write_text(path, planned.to_json() + "\n")
    if output.as_json:
        print_json(planned.to_json())
    else:
        print(planned)
    return 0


COMMAND = Command(plan, "MODEL [options]", EXAMPLES)


def _check_plan_file(out: Path) -> None:
    """Raise RecastError if `out` is a file other than an older plan."""
    check_place(out, "--out", "plan.json")
    if out.exists():
        from recast.surgery.plan import Plan

        try:
            Plan.from_json(decode(read_bytes(out), out))
        except RecastError:
            raise RecastError(f"{out} exists and is not a plan: choose another file with --out") from None
