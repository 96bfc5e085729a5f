"""`recast try`: will attention help on these images?"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from recast.config import Count, FilePath, Positive, read
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Typed, print_json
from recast.lab.cli.plan import Network
from recast.lab.config import ImagesConfig
from recast.models.trust import is_function

if TYPE_CHECKING:
    from recast.lab.data import Data
    from recast.lab.data.datasets import LabelledImages

EXAMPLES = """  recast try --model resnet50 --pretrained --data-dir photos
  recast try --model mynet:build --checkpoint w.pt --data-dir photos --minutes 30 --seeds 5
  recast try --model cifar_resnet20 --checkpoint weights.safetensors --data cifar100 --data-dir DIR --where stage:-2
"""


class Trial(Network):
    """A network, its layers that become attention, and the images"""

    data: ImagesConfig = ImagesConfig("folder")


BASE: dict[str, Any] = {"data": {"name": "folder"}}
"""Defaults of a trial. Images are held out as by `recast train`, which may have made the checkpoint."""
LIBRARY_WEIGHTS: dict[str, Any] = {"data": {"name": "folder", "val_fraction": 0.2}}
"""Defaults with --pretrained: weights that were not trained on these images leave a larger share for the intervals."""


def try_(
    *,
    minutes: Positive | Literal["auto"] = 10.0,
    seeds: Count = 3,
    device: str = "auto",
    out: FilePath = "runs/try",
    trial: Typed[Trial],
    output: Compute,
) -> int:
    """Say whether attention helps on your images, in minutes. The layers before the first one to recast run once. The
    rest of the network is trained as it is, with added convolutions, and recast. The answer is a sentence with
    intervals. Run the same command again to continue an interrupted trial.

    Args:
        minutes: Longest duration; the number of updates is chosen to fit. auto: as long as an answer takes, at most 60.
        seeds: Most trainings per arm; fewer, but two, if the answer is clear by then.
        device: auto, cpu, cuda or mps.
        out: Folder of the trial.
    """
    settings = Trial.of(trial, **BASE)
    if settings.model.pretrained and settings.model.checkpoint is None:
        settings = Trial.of(trial, **LIBRARY_WEIGHTS)
    if not settings.model.name:
        raise RecastError("--model is missing: name the trained network")
    if not (settings.has_weights or is_function(settings.model.name)):
        raise RecastError("a trial starts from a trained network: add --pretrained or --checkpoint FILE")

    from recast.lab.data.sources import without_unreadable
    from recast.lab.trial import try_ as run

    with trial.named():
        images = settings.load(settings.data)
        parent = settings.open()
    say = partial(print, file=sys.stderr) if not output.quiet else lambda line: None
    if images.is_held_out and not settings.data.group_column:
        say(f"validation: {settings.data.val_fraction:g} of every class, held out of the training images")
    if settings.model.checkpoint is not None:
        _check_unseen(images, Path(settings.model.checkpoint), say)
    images, _ = images.fitted_to(parent)
    if settings.data.bad_image == "skip":
        images = without_unreadable(images, "train", "val")
    planned = settings.plan_of(parent, images.example)
    shows = not output.quiet and sys.stderr.isatty()
    try:
        answer = run(
            parent, images, planned, Path(out), minutes=minutes, seeds=seeds, device=device, progress=shows, say=say
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run the same command again to continue") from None
    if output.as_json:
        print_json(answer.to_json())
    else:
        print(answer)
    return 0


def _check_unseen(images: Data, checkpoint: Path, say: Callable[[str], object]) -> None:
    """Raise RecastError if the run that made a checkpoint trained on validation images of the trial."""
    from recast.lab.data import load_data
    from recast.lab.folder.run import RunFolder

    folder = next((folder for folder in list(checkpoint.parents)[:2] if RunFolder(folder).is_run), None)
    if folder is None:
        return
    try:
        recipe = RunFolder(folder).recipe()
        data = load_data(recipe.data, grouping=recipe.grouping, in_chans=recipe.model.in_chans)
    except RecastError as error:
        say(f"cannot tell which images {folder} was trained on ({error})")
        return
    trained, tested = _files(data.train), _files(images.val)
    if not (trained and tested):
        say(f"cannot tell which images {folder} was trained on: these images are no files of their own")
    if shared := trained & tested:
        cure = f"set --val-fraction {recipe.data.val_fraction:g}, as that run" if data.is_held_out else "take others"
        raise RecastError(
            f"{len(shared)} of {len(images.val)} validation images were training images of {folder}, which made the "
            f"checkpoint: {cure}"
        )


def _files(images: LabelledImages) -> set[str]:
    """Return the files of the images; empty if they have none."""
    items = getattr(images, "items", ())
    return {os.path.realpath(images.image_name(index)) for index, item in enumerate(items) if isinstance(item, str)}


COMMAND = Command(try_, "--model MODEL --data-dir DIR [options]", EXAMPLES, lambda words: ("", read(Trial, BASE)))
