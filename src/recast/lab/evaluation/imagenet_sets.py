"""Suites on released test sets of ImageNet's classes: `imagenet-a`, `-r`, `-v2`, `-sketch`, `-real` and `imagenet-c`.

A set is a folder of class folders named by wnid (n01440764), ImageNet-V2's by the numbers 0 to 999. Which output of the
model a class is follows from the names of the classes that the data gives, never from the order of the folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import torch
from PIL import Image
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recast.errors import RecastError, listed
from recast.lab.data.datasets import ImageFiles
from recast.lab.data.images import is_image_name, open_image, opened
from recast.lab.data.shards import ImageStream
from recast.lab.evaluation.context import Context, NotMeasured, Source, sampled
from recast.lab.suites import CATEGORIES, SEVERITIES, SUITES

SETS = {
    "imagenet-a": ("imagenet_a", "imagenet-a"),
    "imagenet-r": ("imagenet_r", "imagenet-r"),
    "imagenet-v2": (
        "imagenet", "imagenet-v2", "imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency",
    ),
    "imagenet-sketch": ("imagenet", "imagenet-sketch", "sketch"),
    "imagenet-c": ("imagenet", "imagenet-c", "imagenet_c", "imagenetc"),
}  # fmt: skip
"""`imagenet_wnids` of each set, and what its folder may be called in the folder of sets."""
WNID = re.compile(r"n\d{8}")
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")


@cache
def imagenet_wnids(subset: str = "imagenet") -> tuple[str, ...]:
    """WordNet ids in the order of ImageNet-1k's labels; subset imagenet_a, imagenet_r: of those sets' 200 classes."""
    # timm has no function for the smaller sets, only the files.
    return tuple((files("timm.data") / "_info" / f"{subset}_synsets.txt").read_text(encoding="utf-8").split())


def outputs_of(context: Context, wnids: Sequence[str], dataset: str) -> Tensor:
    """(len(wnids),) int64: the output of the models that stands for each class, by the names of the data's classes.

    Classes named by wnid may be any that hold the wanted ones, in any order. A thousand other names must be ImageNet's
    in its order (one of the words before and after commas is enough). Raises NotMeasured for anything else.
    """
    classes: Sequence[str] = context.data.classes
    data = context.data.name
    todo = f"take a run whose data are ImageNet's, or leave {dataset} out"
    if not all(WNID.fullmatch(name) for name in classes):
        order = imagenet_wnids()
        if len(classes) != len(order):
            raise NotMeasured(f"{dataset} is for models of ImageNet's 1000 classes, {data} has {len(classes)}: {todo}")
        _check_order(classes, dataset, data)
        classes = order
    place = {name: index for index, name in enumerate(classes)}
    if missing := [wnid for wnid in wnids if wnid not in place]:
        raise NotMeasured(
            f"{dataset} has classes that are none of the {len(classes)} of {data}: {listed(missing, 5)}; {todo}"
        )
    return torch.tensor([place[wnid] for wnid in wnids])


def _check_order(classes: Sequence[str], dataset: str, data: str) -> None:
    if list(classes) == [str(index) for index in range(len(classes))]:
        return  # numbers say nothing else
    info = ImageNetInfo("imagenet-1k")
    known = [info.index_to_description(index) for index in range(len(classes))]
    words = {word for name in known for word in _words(name)}
    other = [i for i, pair in enumerate(zip(classes, known, strict=True)) if not _words(pair[0]) & _words(pair[1])]
    # A few have other names in other lists, such as "crane bird"; none has the name of another class.
    misplaced = [index for index in other if _words(classes[index]) & words]
    if misplaced or len(other) > len(classes) // 20:
        first = (misplaced or other)[0]
        raise NotMeasured(
            f"{dataset} needs ImageNet's classes in their order, but {len(other)} of {data} have other names: class "
            f"{first} is {classes[first]!r}, expected {known[first]!r}. Name the class folders by wnid"
        )


def _words(name: str) -> set[str]:
    return {word.strip().lower().replace("_", " ") for word in name.split(",")}


def find_set(context: Context, suite: str) -> Path:
    """The folder of a test set, in any case, in options.sets or $RECAST_DATA; NotMeasured with where to get it."""
    where = SUITES[suite].needs
    told = context.options.sets or os.environ.get("RECAST_DATA")
    if not told:
        raise NotMeasured(
            f"where is {suite}? Give the folder that holds it (--sets DIR, or the environment variable "
            f"RECAST_DATA). To get it: {where}"
        )
    root = Path(told).expanduser()
    there = {folder.name.lower(): folder for folder in root.glob("*/")}
    if found := [there[name] for name in SETS[suite][1:] if name in there]:
        return found[0]
    raise NotMeasured(f"no folder {suite} in {root}. To get it: {where}, unpacked there")


def list_images(root: Path, folders: Sequence[str]) -> tuple[list[str], Tensor]:
    """Names FOLDER/IMAGE in `root`, and the place of their folder in `folders`; NotMeasured where one is empty."""
    by_class = [sorted(e.name for e in os.scandir(root / folder) if is_image_name(e.name)) for folder in folders]
    if empty := [folder for folder, names in zip(folders, by_class, strict=True) if not names]:
        raise NotMeasured(f"{root} has class folders without an image: {listed(empty, 5)}. Unpack it again")
    names = [f"{folder}/{name}" for folder, names in zip(folders, by_class, strict=True) for name in names]
    return names, torch.arange(len(folders)).repeat_interleave(torch.tensor([len(names) for names in by_class]))


def sources_of_set(context: Context, suite: str) -> list[Source]:
    """All images of the set, resized and cropped as the data's own are; `columns` where it has some classes only."""
    wnids = sorted(imagenet_wnids(SETS[suite][0]))
    columns = outputs_of(context, wnids, suite)
    root = find_set(context, suite)
    found, folders = {entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."}, wnids
    if all(name.isdecimal() for name in found):  # ImageNet-V2: the numbers are ImageNet's labels
        folders = [str(imagenet_wnids().index(wnid)) for wnid in wnids]
    missing, unknown = sorted(set(folders) - found), sorted(found - set(folders))
    if missing or unknown:
        lacks = [f"without the class folders {listed(missing, 5)}"] if missing else []
        lacks += [f"with folders that are none of its classes: {listed(unknown, 5)}"] if unknown else []
        raise NotMeasured(f"{root} must have {len(folders)} class folders, but it is {' and '.join(lacks)}")
    names, labels = list_images(root, folders)
    val = context.data.val
    images = ImageFiles(labels, val.img_size, [str(root / name) for name in names], crop_pct=val.crop_pct)
    return [Source(sampled(images, context.options.num_images), columns=columns)]


@cache
def real_labels() -> dict[str, list[int]]:
    """ImageNet's labels of each of the 50,000 validation images by file name, as ReaL has them; timm ships them."""
    labels: dict[str, list[int]] = RealLabelsImagenet(range(50_000)).real_labels
    return labels


def sources_real(context: Context) -> list[Source]:
    """The validation images of the data that have a label in ReaL; NotMeasured if they are not ImageNet's.

    Any of an image's labels is right (Beyer et al. 2020, arXiv:2006.07159).
    """
    val, data = context.data.val, context.data.name
    names = [] if isinstance(val, ImageStream) else [val.image_name(index) for index in range(len(val))]
    labels = [real_labels().get(f"{found[0]}.JPEG") for name in names if (found := VAL_IMAGE.search(name))]
    if len(labels) != len(val) or None in labels:
        other = next((name for name in names if not VAL_IMAGE.search(name)), "others")
        raise NotMeasured(
            "imagenet-real relabels ImageNet's 50,000 validation images, which it knows by their file names "
            f"(ILSVRC2012_val_00000001.JPEG and so on), but {data} has {other}: use --data imagenet with such names"
        )
    outputs = outputs_of(context, imagenet_wnids(), "imagenet-real")
    answers = {index: outputs[known] for index, known in enumerate(labels) if known}
    if not answers:
        raise NotMeasured(f"none of the {len(val)} images of {data} has a label in ReaL: use more of them")
    padded = pad_sequence(list(answers.values()), batch_first=True, padding_value=-1)
    return [Source(val.subset(torch.tensor(list(answers))), answers=padded)]


def read_unresized(root: Path, side: int, name: str) -> Image.Image:
    """The RGB image ROOT/NAME; RecastError if it cannot be read or has not side x side pixels."""
    image = open_image(root / name)
    if image.size != (side, side):
        raise RecastError(
            f"ImageNet-C is evaluated without resizing, all images must have {side}x{side} pixels, but "
            f"{root / name} has {image.height}x{image.width}"
        )
    return image


def sources_imagenet_c(context: Context) -> list[Source]:
    """The 75 folders of the released ImageNet-C (Hendrycks & Dietterich 2019, arXiv:1903.12261) as they are.

    Each holds the 50,000 validation images as JPEG files of 224 x 224 pixels, neither resized nor cropped here. What
    is missing is listed in one NotMeasured.
    """
    wnids = sorted(imagenet_wnids())
    outputs, root = outputs_of(context, wnids, "imagenet-c"), find_set(context, "imagenet-c")
    folders: dict[str, Path] = {}
    missing, lacking = [], []
    for category, kind in ((category, kind) for category, kinds in CATEGORIES.items() for kind in kinds):
        absent = []
        for severity in map(str, SEVERITIES):
            places = root / kind / severity, root / category / kind / severity
            folder = next((place for place in places if place.is_dir()), None)
            if folder is None:
                absent.append(severity)
                continue
            folders[f"{kind}/{severity}"] = folder
            if classes := sorted(set(wnids) - set(os.listdir(folder))):
                lacking.append(f"{kind}/{severity} (classes {listed(classes, 5)})")
        if absent:
            missing.append(kind if len(absent) == len(SEVERITIES) else f"{kind} (severity {', '.join(absent)})")
    if missing or lacking:
        raise NotMeasured(
            f"{root} is not the whole ImageNet-C, missing: {'; '.join(missing + lacking)}. To get it: "
            f"{SUITES['imagenet-c'].needs}"
        )
    first = next(iter(folders.values()))
    names, places_of = list_images(first, wnids)
    with opened(first / names[0], str(first / names[0])) as image:
        side = max(image.size)
    # one list of names for all 75 folders
    base = sampled(ImageFiles(outputs[places_of], side, names), context.options.num_images)
    return [
        Source(replace(base, read=partial(read_unresized, folder, side), where=f"imagenet-c {folder}"), part)
        for part, folder in folders.items()
    ]
