"""`recast try`: will attention help on these images?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from recast.config import Count, FilePath, Positive
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.cli.plan import Layers, Network, Wanted
from recast.lab.config import DataConfig
from recast.lab.config.evaluation import parse_size
from recast.layers.config import PoolConfig, RecastConfig
from recast.models.trust import is_function

EXAMPLES = """  recast try --model resnet50 --pretrained --data-dir photos
  recast try --model mynet:build --checkpoint w.pt --data-dir photos --minutes 30 --seeds 5
  recast try --model cifar_resnet20 --checkpoint weights.safetensors --data cifar100 --data-dir DIR --where stage:-2
"""


def try_(
    *,
    model: str = "",
    data: str = "folder",
    data_dir: FilePath | None = None,
    num_train: Count | None = None,
    num_val: Count | None = None,
    minutes: Positive = 10.0,
    seeds: Count = 3,
    device: str = "auto",
    out: FilePath = "runs/try",
    network: Annotated[Network, Parameter(name="*")],
    layers: Annotated[Typed[Layers], Parameter(name="*")],
    recast: Typed[RecastConfig],
    pool: Typed[PoolConfig],
    output: Annotated[Compute, Parameter(name="*")],
) -> int:
    """Say whether attention helps on your images, in minutes. Layers before those that would be recast run once. The
    rest of the network is trained as it is, for as long, with added convolutions, and recast. The answer is a sentence
    with intervals.

    Args:
        model: timm:NAME (or NAME), torchvision:NAME, or pkg.module:function.
        data: Data set: folder, zip, cifar100, torch/NAME, hfds/NAME.
        data_dir: Folder with train/ and val/, or of the data set.
        num_train: Use only this many training images.
        num_val: Use only this many validation images.
        minutes: Duration, by measured rates.
        seeds: Trainings of each arm.
        device: auto, cpu, cuda or mps.
        out: New folder for answer.json.
    """
    wanted = Wanted(layers, recast, pool)
    if not model:
        raise RecastError("--model is missing: name the trained network")
    if not (network.pretrained or network.checkpoint or is_function(model)):
        raise RecastError("a trial starts from a trained network: add --pretrained or --checkpoint FILE")
    side, width = parse_size(network.img_size, "--img-size") if network.img_size else (None, None)
    if side != width:
        raise RecastError(f"images of a data set are square: --img-size {side}, got {network.img_size!r}")

    import torch

    from recast.lab.data import load_data
    from recast.lab.trial import try_ as run

    images = load_data(DataConfig(data, data_dir, img_size=side, num_train=num_train, num_val=num_val))
    parent, _ = network.open(model, None)
    planned = wanted.plan(parent, torch.zeros(1, 3, images.img_size, images.img_size))
    answer = run(
        parent, images, planned, Path(out), minutes=minutes, seeds=seeds, device=device,
        progress=not output.quiet and sys.stderr.isatty(),
        say=lambda line: None if output.quiet else print(line, file=sys.stderr),
    )  # fmt: skip
    if output.as_json:
        print_json(answer.to_json())
    else:
        print(answer)
    return 0


COMMAND = Command(try_, "--model MODEL --data-dir DIR [options]", EXAMPLES)
