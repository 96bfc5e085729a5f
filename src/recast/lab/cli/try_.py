"""`recast try`: will attention help on these images?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from recast.errors import RecastError
from recast.fields import Count, Positive
from recast.lab.cli.help import Command
from recast.lab.cli.options import ModelOptions, Words, parse, parse_size, print_json
from recast.lab.cli.plan import make_plan
from recast.lab.config import DataConfig
from recast.models.config import ModelConfig
from recast.models.trust import is_function, trusting
from recast.surgery.limits import Budget

EXAMPLES = """  recast try --model resnet50 --pretrained --data-dir photos
  recast try --model mynet:build --checkpoint w.pt --data-dir photos --minutes 30 --seeds 5
  recast try --model cifar_resnet20 --checkpoint weights.safetensors --data cifar100 --data-dir DIR --where stage:-2
"""
ABOUT = """Will attention help on my images? The layers before those that would be recast run once; the rest of the
network is trained on as it is, for as long, with added convolutions, and recast, and compared on the validation
images. The answer is a sentence with intervals. The same command goes on with a trial that was interrupted."""


@dataclass
class TryOptions(ModelOptions):
    """What `recast try` is asked for."""

    WORDS: ClassVar[Words] = {}
    data: str = "folder"
    """folder, zip, cifar100, torch/NAME, hfds/NAME: a data set's name"""
    data_dir: str | None = None
    """folder with train/ and val/, or where the data set lies"""
    num_train: Count | None = None
    """use only this many training images"""
    num_val: Count | None = None
    """use only this many validation images"""
    minutes: Positive = 10.0
    """duration, by measured rates"""
    seeds: Count = 3
    """trainings of each arm"""
    device: str = "auto"
    """auto, cpu, cuda or mps"""
    out: str = "runs/try"
    """folder of the trial"""


def run(argv: Sequence[str]) -> int:
    """Try, and print the answer."""
    options = parse(Command("try", "--model MODEL --data-dir DIR [options]", ABOUT, EXAMPLES), TryOptions(), argv)
    Budget.parse(options.budget)
    if not options.model:
        raise RecastError("--model is missing: name the trained network")
    if not (options.pretrained or options.checkpoint or is_function(options.model)):
        raise RecastError("a trial starts from a trained network: add --pretrained or --checkpoint FILE")
    side, width = parse_size(options.img_size, 0)
    if side != width:
        raise RecastError(f"images of a data set are square: --img-size {side}, got {options.img_size!r}")

    import torch

    from recast.lab.data import load_data
    from recast.lab.trial import try_
    from recast.models.build import build

    data = load_data(
        DataConfig(
            options.data, options.data_dir, side or None, num_train=options.num_train, num_val=options.num_val
        )
    )  # fmt: skip
    config = ModelConfig(
        options.model, options.checkpoint, options.pretrained, options.num_classes,
        checkpoint_key=options.checkpoint_key,
    )  # fmt: skip
    with trusting(options.model):
        model = build(config)
    planned = make_plan(model, torch.zeros(1, 3, data.img_size, data.img_size), options)
    answer = try_(
        model, data, planned, Path(options.out), minutes=options.minutes, seeds=options.seeds, device=options.device,
        progress=not options.quiet and sys.stderr.isatty(),
        say=lambda line: None if options.quiet else print(line, file=sys.stderr),
    )  # fmt: skip
    if options.json:
        print_json(answer.to_json())
    else:
        print(answer)
    return 0
