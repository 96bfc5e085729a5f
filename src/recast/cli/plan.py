"""`recast plan MODEL`: the plan as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from recast.cli.options import RECAST_ALIASES, new_parser, parse, parse_size
from recast.config import ModelConfig, RecastConfig

EXAMPLES = """  recast plan resnet50
  recast plan torchvision:resnet18 --img-size 320x256 --where layer3 layer4.*
  recast plan resnetrs50 --gate sigmoid --stride remove        (the T-CNN paper's choice)
  recast plan resnet50 --where all --budget tokens=4096,memory=1GiB --out plan.json
"""


def add_model_options(parser: ArgumentParser) -> None:
    """Options of the commands that look at one model."""
    parser.add_argument("model", type=str, help="timm:NAME (or NAME), torchvision:NAME, or pkg.module:function")
    parser.add_argument("--checkpoint", type=str | None, default=None, help="weights, .safetensors or .pth")
    parser.add_argument("--pretrained", type=bool, default=False, help="fetch the registry's own weights")
    parser.add_argument("--num_classes", type=int | None, default=None, help="classes of the head")
    parser.add_argument("--img_size", type=str | None, default=None, help="pixels, 224 or 224x160 (height x width)")
    parser.add_argument(
        "--where", type=list[str], default=["last_stage"], help="layers: last_stage, all, names or globs"
    )
    parser.add_argument("--budget", type=str, default="tokens=1024", help="limits, e.g. tokens=2048,memory=64MiB")
    parser.add_argument("--recast", type=RecastConfig, default=RecastConfig())
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output")


def model_config(options: Namespace) -> ModelConfig:
    """The parent that the options name."""
    return ModelConfig(options.model, options.checkpoint, options.pretrained, options.num_classes)


def run(argv: Sequence[str]) -> int:
    """Print a plan, or write it to a file."""
    parser = new_parser("plan", "What of a model becomes attention, at what cost, and why the rest stays.", EXAMPLES)
    add_model_options(parser)
    parser.add_argument("--out", type=str | None, default=None, help="also write the plan to this .json file")
    found = parse(parser, argv, RECAST_ALIASES)
    options = parser.instantiate(found)

    import torch

    from recast.models.build import build, input_defaults
    from recast.planning import plan

    model = build(model_config(options))
    defaults = input_defaults(model)
    height, width = parse_size(options.img_size, defaults.img_size if defaults else 224)
    example = torch.zeros(1, 3, height, width)
    planned = plan(model, example, options.recast, where=options.where, budget=options.budget)
    if options.out:
        Path(options.out).write_text(planned.to_json() + "\n", encoding="utf-8")
    print(planned.to_json() if options.json else planned)
    return 0
