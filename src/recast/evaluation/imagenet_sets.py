"""Suites on other images of ImageNet's classes: `imagenet-a`, `imagenet-r`, `imagenet-v2`, `imagenet-sketch`.

A set is a folder of class folders named by wnid (n01440764), ImageNet-V2's by the numbers 0 to 999. Which output of the
model a class is follows from the names of the classes that the data gives, never from the order of the folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from recast.data.datasets import ImageFiles
from recast.data.images import is_image_name
from recast.data.seeding import choose_balanced
from recast.evaluation.bench import Batch, Bench, NotMeasured, Score, Source, is_correct

WNID = re.compile(r"n\d{8}")


@cache
def imagenet_wnids(subset: str = "imagenet") -> tuple[str, ...]:
    """WordNet ids in the order of ImageNet-1k's labels; subset imagenet_a, imagenet_r: of those sets' 200 classes."""
    # timm has no function for the smaller sets, only the files.
    return tuple((files("timm.data") / "_info" / f"{subset}_synsets.txt").read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class TestSet:
    """What is known of a released test set."""

    __test__ = False  # no class of tests

    names: tuple[str, ...]
    """Its folder in the folder of sets; the first is the one to tell."""
    classes: str
    """`imagenet_wnids` of its classes."""
    where: str
    """The way to get it."""


SETS = {
    "imagenet-a": TestSet(
        ("imagenet-a",), "imagenet_a", "imagenet-a.tar, linked at github.com/hendrycks/natural-adv-examples"
    ),
    "imagenet-r": TestSet(("imagenet-r",), "imagenet_r", "imagenet-r.tar, linked at github.com/hendrycks/imagenet-r"),
    "imagenet-v2": TestSet(
        ("imagenet-v2", "imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency"),
        "imagenet",
        "imagenetv2-matched-frequency.tar.gz, linked at github.com/modestyachts/ImageNetV2",
    ),
    "imagenet-sketch": TestSet(
        ("imagenet-sketch", "sketch"),
        "imagenet",
        "ImageNet-Sketch.zip, linked at github.com/HaohanWang/ImageNet-Sketch",
    ),
}


def find_set(bench: Bench, names: Sequence[str], where: str) -> Path:
    """The folder of a test set: one of `names`, in any case, in options.sets or $RECAST_DATA.

    Raises NotMeasured, with `where` to get it, if it is not there.
    """
    told = bench.options.sets or os.environ.get("RECAST_DATA")
    if not told:
        raise NotMeasured(
            f"where is {names[0]}? Give the folder that holds it (--sets DIR, or the environment variable "
            f"RECAST_DATA). To get it: {where}"
        )
    root = Path(told).expanduser()
    there = {entry.name.lower(): entry for entry in root.iterdir() if entry.is_dir()} if root.is_dir() else {}
    for name in names:
        if name.lower() in there:
            return there[name.lower()]
    raise NotMeasured(f"no folder {names[0]} in {root}. To get it: {where}, unpacked there")


def class_folders(root: Path) -> list[str]:
    """Names of the folders in `root`, sorted; hidden ones are left out."""
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def image_names(folder: Path) -> list[str]:
    """Names of the images in a folder, sorted."""
    return sorted(entry.name for entry in os.scandir(folder) if is_image_name(entry.name))


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many there are."""
    return f"{', '.join(names[:5])}{f' ... ({len(names)} in all)' if len(names) > 5 else ''}"


def check_folders(found: Sequence[str], wanted: Sequence[str], root: Path) -> None:
    """NotMeasured that lists the class folders that are missing, and those that are no class of the set."""
    missing, unknown = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or unknown:
        lacks = [f"without the class folders {listed(missing)}"] if missing else []
        lacks += [f"with folders that are none of its classes: {listed(unknown)}"] if unknown else []
        raise NotMeasured(f"{root} must have {len(wanted)} class folders, but it is {' and '.join(lacks)}")


def outputs_of(bench: Bench, wnids: Sequence[str], dataset: str) -> Tensor:
    """(len(wnids),) int64: the output of the models that stands for each class, by the names of the data's classes.

    Classes named by wnid may be any that hold the wanted ones, in any order. A thousand other names must be ImageNet's
    in its order (one of the words before and after commas is enough). Raises NotMeasured for anything else.
    """
    classes, data = bench.data.classes, bench.data.name
    todo = f"evaluate a model of ImageNet's classes with --data imagenet, or leave {dataset} out"
    if all(WNID.fullmatch(name) for name in classes):
        place = {name: index for index, name in enumerate(classes)}
        if missing := [wnid for wnid in wnids if wnid not in place]:
            raise NotMeasured(
                f"{dataset} has classes that are none of the {len(classes)} of {data}: {listed(missing)}; {todo}"
            )
        return torch.tensor([place[wnid] for wnid in wnids])
    order = imagenet_wnids()
    if len(classes) != len(order):
        raise NotMeasured(f"{dataset} is for models of ImageNet's 1000 classes, {data} has {len(classes)}: {todo}")
    _check_order(classes, dataset, data)
    place = {name: index for index, name in enumerate(order)}
    return torch.tensor([place[wnid] for wnid in wnids])


def _check_order(classes: Sequence[str], dataset: str, data: str) -> None:
    if list(classes) == [str(index) for index in range(len(classes))]:
        return  # numbers say nothing else
    info = ImageNetInfo("imagenet-1k")
    known = [info.index_to_description(index) for index in range(len(classes))]
    owners: dict[str, int] = {word: index for index, name in enumerate(known) for word in _words(name)}
    pairs = list(enumerate(zip(map(_words, classes), map(_words, known), strict=True)))
    other = [index for index, (mine, theirs) in pairs if not mine & theirs]
    # A few have other names in other lists, such as "crane bird"; none has the name of another class.
    moved = [index for index in other if any(word in owners for word in _words(classes[index]))]
    if moved or len(other) > len(classes) // 20:
        first = (moved or other)[0]
        raise NotMeasured(
            f"{dataset} needs ImageNet's classes in their order, but {len(other)} of {data} have other names: class "
            f"{first} is {classes[first]!r}, expected {known[first]!r}. Name the class folders by wnid"
        )


def _words(name: str) -> set[str]:
    return {word.strip().lower().replace("_", " ") for word in name.split(",")}


def sources_of_set(bench: Bench, suite: str) -> list[Source]:
    """All images of the set, resized and cropped as the data's own are; `columns` where it has some classes only."""
    known = SETS[suite]
    wnids = sorted(imagenet_wnids(known.classes))
    columns = outputs_of(bench, wnids, suite)
    root = find_set(bench, known.names, known.where)
    found = class_folders(root)
    if all(name.isdecimal() for name in found):  # ImageNet-V2: the numbers are ImageNet's labels
        order = imagenet_wnids()
        by_wnid = {order[int(name)]: name for name in found if int(name) < len(order)}
        check_folders(found, [str(order.index(wnid)) for wnid in wnids], root)
    else:
        by_wnid = {name: name for name in found}
        check_folders(found, wnids, root)
    paths: list[str] = []
    counts = []
    for wnid in wnids:
        folder = root / by_wnid[wnid]
        names = image_names(folder)
        if not names:
            raise NotMeasured(f"class folder without an image: {folder}. Unpack {suite} again")
        paths += [str(folder / name) for name in names]
        counts.append(len(names))
    labels = torch.arange(len(wnids)).repeat_interleave(torch.tensor(counts))
    val = bench.data.val
    images = ImageFiles(labels, val.img_size, paths, crop_pct=getattr(val, "crop_pct", None))
    return [Source("", images.subset(sample(labels, bench.options.num_samples)), suite, columns)]


def sample(labels: Tensor, count: int | None) -> Tensor:
    """Indices of `count` class-balanced images, or of all there are."""
    if count is None or count >= len(labels):
        return torch.arange(len(labels))
    return choose_balanced(labels, count, "num_samples")


def set_sources(suite: str) -> Callable[[Bench], list[Source]]:
    """`sources_of_set` of one suite."""
    return partial(sources_of_set, suite=suite)


def score_top(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1, and from six classes on top5, among the classes that count."""
    for name in bench.models:
        logits = batch.logits(name)
        for k in (1, 5) if logits.shape[1] >= 6 else (1,):
            yield Score(name, f"top{k}", is_correct(logits, batch.labels, k))
