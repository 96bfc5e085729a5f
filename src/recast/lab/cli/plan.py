"""`recast plan MODEL`: the plan as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from recast.config import Count
from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.cli.help import Command
from recast.lab.cli.options import ModelOptions, parse, parse_size, print_json
from recast.lab.config import DataConfig, Recipe
from recast.models.config import ModelConfig
from recast.models.trust import trusting
from recast.reading import decode, read_bytes
from recast.surgery.limits import Budget

if TYPE_CHECKING:
    from torch import nn

    from recast.lab.data import Data
    from recast.lab.experimental.ranking import Ranking
    from recast.surgery.plan import Edited, Plan
    from recast.tracing.examples import Example

EXAMPLES = """  recast plan resnet50
  recast plan torchvision:resnet18 --img-size 320x256 --where 'layer3.*' 'layer4.*'
  recast plan resnetrs50 --gate sigmoid --stride remove        (the T-CNN paper's choice)
  recast plan resnet50 --where all --budget macs=1.3x,memory=2GiB --out plan.json
  recast plan resnet50 --plan plan.json                        (after editing: take steps out, add {"name": "..."})
  recast plan resnet50 --where none --pool single              (attention pooling alone)
  recast plan cifar_resnet20 --checkpoint weights.safetensors --rank data --data cifar100 --data-dir DIR
  recast plan resnet50 --pretrained --where auto --budget ms=1.5x --data folder --data-dir DIR --out plan.json

Layers (--where): last_stage, all, stage:N (stage:-1 is the last), a name, a glob (layer4.*), re:REGEX; none: no layer;
auto: those that promise most for what they add, within the limits.
Limits (--budget): tokens=N for a layer (none: any); macs=, params=, memory= for the whole model and one image, as an
amount (5G, 30M, 2GiB) or a multiple of the parent's (1.3x); ms=, measured here in batches of 16. Layers are taken from
the end of the network.
Ranking (--rank data): layers by the fall of the loss that their gates promise, from gradients on training images, for
each millisecond, multiply-add and MiB that they add. Queries and keys start from half of the images.
"""
ABOUT = "What of a model becomes attention, at what cost, and why the rest stays. Nothing is changed."


@dataclass
class PlanOptions(ModelOptions):
    """What `recast plan` is asked for."""

    where: list[str] = field(default_factory=lambda: ["last_stage"])
    """last_stage, all, auto, stage:N, names, globs or re:REGEX; none: the pooling alone"""
    out: str | None = None
    """also write the plan to this .json file"""
    rank: Literal["data"] | None = None
    """rank the planned layers by what attention promises there, on the images of --data; --where auto: all layers"""
    data: str | None = None
    """a data set's name, for the ranking"""
    data_dir: str | None = None
    """where it lies"""
    num_images: Count = 256
    """training images that layers are ranked on"""


def open_parent(options: ModelOptions, data: Data | None) -> tuple[nn.Module, Data | None]:
    """The parent that the options name, and the data set normalised as the parent knows it."""
    from recast.models.build import build, input_defaults

    config = ModelConfig(
        options.model, options.checkpoint, options.pretrained, options.num_classes,
        checkpoint_key=options.checkpoint_key,
    )  # fmt: skip
    with trusting(options.model):
        model = build(config, num_classes=len(data.classes) if data else None)
    if data is not None:
        known = input_defaults(model) or data
        data = replace(data, mean=known.mean, std=known.std)
    return model, data


def example_shape(model: nn.Module, img_size: str | None) -> tuple[int, int, int]:
    """Channels, rows and columns of an image for `model`: its first convolution's channels, its own size or 224."""
    from recast.models.build import input_defaults
    from recast.surgery.rules import is_convolution

    defaults = input_defaults(model)
    convolutions = [module for module in model.modules() if is_convolution(module)]
    channels = int(getattr(convolutions[0], "in_channels", 3)) if convolutions else 3
    return channels, *(defaults.size if defaults and img_size is None else parse_size(img_size, 224))


def load_named(name: str | None, data_dir: str | None, img_size: str | None) -> Data | None:
    """The data set that options name, with images of their size."""
    if name is None:
        if data_dir is not None:
            raise RecastError("--data-dir needs the data set's name: --data folder, cifar100, …")
        return None
    from recast.lab.data import load_data

    side, width = parse_size(img_size, 0)
    if side != width:
        raise RecastError(f"images of a data set are square: --img-size {side}, got {img_size!r}")
    return load_data(DataConfig(name, data_dir, img_size=side or None))


def make_plan(model: nn.Module, example: Example, options: ModelOptions) -> Plan:
    """The plan that the options ask for: by selection and budget, or by a plan file."""
    from recast.surgery.planning import plan, replan

    if options.plan is None:
        return plan(model, example, options.recast, where=options.where, budget=options.budget, pool=options.pool)
    return replan(model, example, read_edited(options.plan, options, ModelOptions()))


def read_edited(path: str, asked: ModelOptions | Recipe, before: ModelOptions | Recipe) -> Edited:
    """A plan file as someone left it. Raises `RecastError` for a file that is none, and where the options that `before`
    has otherwise say what the plan says."""
    from recast.surgery.plan import Plan

    if any(getattr(asked, name) != getattr(before, name) for name in ("where", "budget", "recast", "pool")):
        raise RecastError(
            "--plan names the layers and holds their settings: leave --where, --budget and the options of recast and "
            "pool away, or change them in the file"
        )
    return Plan.read_edited(decode(read_bytes(path), path), path)


def run(argv: Sequence[str]) -> int:
    """Print a plan, or write it to a file."""
    options = parse(Command("plan", "MODEL [options]", ABOUT, EXAMPLES), PlanOptions(), argv)
    Budget.parse(options.budget)
    out = Path(options.out) if options.out else None
    if out is not None:
        _check_plan_file(out)

    if ranked := options.rank is not None or "auto" in options.where:
        if options.data is None:
            raise RecastError("a ranking is made on images: give --data NAME, and --data-dir where they lie")
    elif options.data or options.data_dir:
        raise RecastError("--data is what layers are ranked on: add --rank data or --where auto, or leave it out")

    import torch

    model, data = open_parent(options, load_named(options.data, options.data_dir, options.img_size))
    if data is not None and ranked:
        planned, ranking = _rank(model, data, options)
    else:
        planned, ranking = make_plan(model, torch.zeros(1, *example_shape(model, options.img_size)), options), None
    if out is not None:
        write_text(out, planned.to_json() + "\n")
    if options.json:
        print_json((ranking or planned).to_json())
    else:
        print(planned if ranking is None else f"{ranking}\n{planned}")
    return 0


def _rank(model: nn.Module, data: Data, options: PlanOptions) -> tuple[Plan, Ranking]:
    """The plan, and a ranking of its layers; with --where auto the plan is what a ranking of all layers finds best."""
    import torch

    from recast.lab.data.sources import class_images
    from recast.lab.experimental.ranking import plan_best, rank
    from recast.models.build import check_logits
    from recast.tracing.hooks import in_eval

    images, labels = class_images(data, options.num_images, 0, "stop", next(model.parameters()).device)
    with torch.inference_mode(), in_eval(model):
        check_logits(model(images[:1]), 1, len(data.classes), data.name, options.model)
    if options.where == ["auto"] and options.plan is None:
        found = plan_best(model, images, labels, options.recast, Budget.parse(options.budget), options.pool)
    else:
        planned = make_plan(model, images[:1], options)
        found = planned, rank(model, planned, images, labels)
    with torch.inference_mode(), in_eval(model):
        right = torch.cat([model(part).argmax(1) for part in images.split(64)]).eq(labels).double().mean().item()
    chance, n = 1 / len(data.classes), len(images)
    if right < chance + 3 * (chance * (1 - chance) / n) ** 0.5:  # random weights, a new head, classes in another order
        seen = f"{right:.1%} of {n} images right, chance is {chance:.1%}"
        print(f"note: {options.model}: {seen}; train it on these classes before its layers are ranked", file=sys.stderr)
    return found


def _check_plan_file(out: Path) -> None:
    """A plan replaces an older plan, but no other file."""
    check_place(out, "--out", "plan.json")
    if out.exists():
        from recast.surgery.plan import Plan

        try:
            Plan.from_json(decode(read_bytes(out), out))
        except RecastError:
            raise RecastError(f"{out} exists and is no plan: choose another file with --out") from None
