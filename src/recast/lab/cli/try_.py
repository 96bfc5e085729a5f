"""`recast try`: will attention help on these images?"""

from __future__ import annotations

import sys
from pathlib import Path

from recast.config import Count, FilePath, Positive
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.cli.plan import Network
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
    network: Typed[Network],
    output: Compute,
) -> int:
    """Say whether attention helps on your images, in minutes. Layers before those that would be recast run once. The
    rest of the network is trained as it is, for as long, with added convolutions, and recast. The answer is a sentence
    with intervals. The same command goes on with a trial that was interrupted.

    Args:
        model: timm:NAME (or NAME), torchvision:NAME, or pkg.module:function.
        data: Data set: folder, zip, cifar100, torch/NAME, hfds/NAME.
        data_dir: Folder with train/ and val/, or of the data set.
        num_train: Use only this many training images.
        num_val: Use only this many validation images.
        minutes: Duration, by measured rates.
        seeds: Trainings of each arm.
        device: auto, cpu, cuda or mps.
        out: Folder of the trial.
    """
    wanted = Network.of(network)
    if not model:
        raise RecastError("--model is missing: name the trained network")
    if not (wanted.pretrained or wanted.checkpoint or is_function(model)):
        raise RecastError("a trial starts from a trained network: add --pretrained or --checkpoint FILE")

    import torch

    from recast.lab.trial import try_ as run

    images = wanted.load(data, data_dir, num_train, num_val)
    parent, _ = wanted.open(model)
    planned = wanted.plan_of(parent, torch.zeros(1, 3, images.img_size, images.img_size))
    try:
        answer = run(
            parent, images, planned, Path(out), minutes=minutes, seeds=seeds, device=device,
            progress=not output.quiet and sys.stderr.isatty(),
            say=lambda line: None if output.quiet else print(line, file=sys.stderr),
        )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted: the same command goes on") from None
    if output.as_json:
        print_json(answer.to_json())
    else:
        print(answer)
    return 0


COMMAND = Command(try_, "--model MODEL --data-dir DIR [options]", EXAMPLES)
