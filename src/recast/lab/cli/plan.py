"""`recast plan MODEL`: the plan as a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from pydantic import Field

from recast.config import Classes, Config, FilePath
from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.config import DataConfig
from recast.lab.config.evaluation import parse_size
from recast.layers.config import PoolConfig, RecastConfig
from recast.models.config import ModelConfig
from recast.models.trust import trusting
from recast.reading import decode, read_bytes
from recast.surgery.limits import Budget

if TYPE_CHECKING:
    from torch import nn

    from recast.lab.data import Data
    from recast.surgery.plan import Edited, Plan
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


class Network(Config):
    """A network by its name, and its weights."""

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

    def open(self, name: str, data: Data | None) -> tuple[nn.Module, Data | None]:
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

    def load(self, name: str | None, data_dir: str | None) -> Data | None:
        """Return the data set of a name, with images of the network's size."""
        if name is None:
            if data_dir is not None:
                raise RecastError("--data-dir requires --data: folder, cifar100, …")
            return None
        from recast.lab.data import load_data

        side, width = parse_size(self.img_size, "--img-size") if self.img_size else (0, 0)
        if side != width:
            raise RecastError(f"images of a data set are square: --img-size {side}, got {self.img_size!r}")
        return load_data(DataConfig(name, data_dir, img_size=side or None))


class Layers(Config):
    """Layers that become attention, by selection and limits or by a plan."""

    where: list[str] = Field(["last_stage"])
    """Layers to recast: last_stage, all, stage:N, names, globs, re:REGEX; none: the pooling alone."""
    budget: str = "tokens=1024"
    """Limits: tokens=N per layer; macs=, params=, memory= (1.3x, 5G, 64MiB)."""
    plan: FilePath | None = None
    """A plan.json, edited or not: layers and settings."""


class Wanted:
    """What becomes attention: layers and how, or a plan file that says both."""

    def __init__(self, layers: Typed[Layers], recast: Typed[RecastConfig], pool: Typed[PoolConfig]) -> None:
        self.layers, self.recast, self.pool = layers.over({}), recast.over({}), pool.over({})
        Budget.parse(self.layers.budget)
        if self.layers.plan is not None:
            check_alone(
                [part.name(path) for part in (layers, recast, pool) for path in part.words if path != ("plan",)]
            )

    def plan(self, model: nn.Module, example: Example) -> Plan:
        """Return the plan of a model."""
        from recast.surgery.planning import plan, replan

        if self.layers.plan is not None:
            return replan(model, example, read_edited(self.layers.plan))
        where, budget = self.layers.where, self.layers.budget
        return plan(model, example, self.recast, where=where, budget=budget, pool=self.pool)


def check_alone(options: list[str]) -> None:
    """Raise RecastError for options beside --plan that say what the plan says."""
    if options:
        raise RecastError(f"--plan names the layers and holds their settings: drop {options[0]}, or change the file")


def read_edited(path: str) -> Edited:
    """Read a plan file as someone left it. Raises RecastError for another file."""
    from recast.surgery.plan import Plan

    return Plan.read_edited(decode(read_bytes(path), path), path)


def example_shape(model: nn.Module, img_size: str | None) -> tuple[int, int, int]:
    """Channels, rows and columns of an image for `model`: its first convolution's channels, its own size or 224."""
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
    network: Annotated[Network, Parameter(name="*")],
    layers: Annotated[Typed[Layers], Parameter(name="*")],
    recast: Typed[RecastConfig],
    pool: Typed[PoolConfig],
    output: Annotated[Compute, Parameter(name="*")],
) -> int:
    """What of a model becomes attention, at what cost, and why the rest stays. Nothing is changed.

    Args:
        model: timm:NAME (or NAME), torchvision:NAME, upernet|maskrcnn|fasterrcnn|retinanet:NAME, or
            pkg.module:function.
        out: Also write the plan to this .json file.
    """
    wanted = Wanted(layers, recast, pool)
    path = Path(out) if out else None
    if path is not None:
        _check_plan_file(path)

    import torch

    parent, _ = network.open(model, None)
    planned = wanted.plan(parent, torch.zeros(1, *example_shape(parent, network.img_size)))
    if path is not None:
        write_text(path, planned.to_json() + "\n")
    if output.as_json:
        print_json(planned.to_json())
    else:
        print(planned)
    return 0


COMMAND = Command(plan, "MODEL [options]", EXAMPLES)


def _check_plan_file(out: Path) -> None:
    """A plan replaces an older plan, but no other file."""
    check_place(out, "--out", "plan.json")
    if out.exists():
        from recast.surgery.plan import Plan

        try:
            Plan.from_json(decode(read_bytes(out), out))
        except RecastError:
            raise RecastError(f"{out} exists and is no plan: choose another file with --out") from None
