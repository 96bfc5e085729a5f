"""`recast try`: will attention help on these images?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from recast.config import Count, FilePath, Positive, read
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.cli.plan import Network
from recast.lab.config import ImagesConfig
from recast.models.trust import is_function

EXAMPLES = """  recast try --model resnet50 --pretrained --data-dir photos
  recast try --model mynet:build --checkpoint w.pt --data-dir photos --minutes 30 --seeds 5
  recast try --model cifar_resnet20 --checkpoint weights.safetensors --data cifar100 --data-dir DIR --where stage:-2
"""


class Trial(Network):
    """A network, its layers that become attention, and the images"""

    data: ImagesConfig = ImagesConfig("folder")


BASE: dict[str, Any] = {"data": {"name": "folder", "val_fraction": 0.2}}
"""Defaults of a trial: a tenth of the images is too few to tell arms apart."""


def try_(
    *,
    minutes: Positive = 10.0,
    seeds: Count = 3,
    device: str = "auto",
    out: FilePath = "runs/try",
    trial: Typed[Trial],
    output: Compute,
) -> int:
    """Say whether attention helps on your images, in minutes. The layers before the first one to recast run once. The
    rest of the network is trained as it is, with added convolutions, and recast. The answer is a sentence with 95 %
    intervals. Run the same command again to continue an interrupted trial.

    Args:
        minutes: Approximate duration; the number of updates is chosen to fit.
        seeds: Trainings per arm.
        device: auto, cpu, cuda or mps.
        out: Folder of the trial.
    """
    settings = Trial.of(trial, **BASE)
    if not settings.model.name:
        raise RecastError("--model is missing: name the trained network")
    if not (settings.has_weights or is_function(settings.model.name)):
        raise RecastError("a trial starts from a trained network: add --pretrained or --checkpoint FILE")

    from recast.lab.data.sources import without_unreadable
    from recast.lab.trial import try_ as run

    with trial.named():
        images = settings.load(settings.data)
        parent = settings.open()
    images, _ = images.fitted_to(parent)
    if settings.data.bad_image == "skip":
        images = without_unreadable(images, "train", "val")
    planned = settings.plan_of(parent, images.example)
    try:
        answer = run(
            parent, images, planned, Path(out), minutes=minutes, seeds=seeds, device=device,
            progress=not output.quiet and sys.stderr.isatty(),
            say=lambda line: None if output.quiet else print(line, file=sys.stderr),
        )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run the same command again to continue") from None
    if output.as_json:
        print_json(answer.to_json())
    else:
        print(answer)
    return 0


COMMAND = Command(try_, "--model MODEL --data-dir DIR [options]", EXAMPLES, lambda words: ("", read(Trial, BASE)))
