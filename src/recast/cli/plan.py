"""`recast plan MODEL`: the plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recast.cli.help import Command
from recast.cli.options import ModelOptions, parse, parse_size, print_json
from recast.errors import RecastError
from recast.run.budget import Budget
from recast.run.config import ModelConfig, Recipe
from recast.run.files import write_text
from recast.run.names import check_name
from recast.run.reading import decode, read_bytes
from recast.run.trust import trusting

if TYPE_CHECKING:
    from torch import nn

    from recast.surgery.plan import Edited, Plan
    from recast.tracing.observe import Example

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
ABOUT = "What of a model becomes attention, at what cost, and why the rest stays. Nothing is changed."


@dataclass
class PlanOptions(ModelOptions):
    """What `recast plan` is asked for."""

    out: str | None = None
    """also write the plan to this .json file"""


def model_config(options: ModelOptions) -> ModelConfig:
    """The parent that the options name."""
    return ModelConfig(options.model, options.checkpoint, options.pretrained, options.num_classes)


def example_shape(model: nn.Module, img_size: str | None) -> tuple[int, int, int]:
    """Channels, rows and columns of an image for `model`: its first convolution's channels, its own size or 224."""
    from recast.models.build import input_defaults
    from recast.surgery.rules import is_convolution

    defaults = input_defaults(model)
    convolutions = [module for module in model.modules() if is_convolution(module)]
    channels = int(getattr(convolutions[0], "in_channels", 3)) if convolutions else 3
    return channels, *(defaults.size if defaults and img_size is None else parse_size(img_size, 224))


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
    check_name(options.model)
    Budget.parse(options.budget)
    out = Path(options.out) if options.out else None
    if out is not None:
        _check_target(out)

    import torch

    from recast.models.build import build

    with trusting(options.model):
        model = build(model_config(options))
    example = torch.zeros(1, *example_shape(model, options.img_size))
    planned = make_plan(model, example, options)
    if out is not None:
        write_text(out, planned.to_json() + "\n")
    if options.json:
        print_json(planned.to_json())
    else:
        print(planned)
    return 0


def _check_target(out: Path) -> None:
    """A plan replaces an older plan, but no other file."""
    if out.is_dir():
        raise RecastError(f"--out must be a file, got the folder {out}: add a name such as plan.json")
    if not out.parent.is_dir():
        raise RecastError(f"the folder of --out does not exist: {out.parent}")
    if out.exists():
        from recast.surgery.plan import Plan

        try:
            Plan.from_json(decode(read_bytes(out), out))
        except RecastError:
            raise RecastError(f"{out} exists and is no plan: choose another file with --out") from None
