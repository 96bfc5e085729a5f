"""Suites on released test sets of ImageNet's classes: `imagenet-a`, `-r`, `-v2`, `-real` and `imagenet-c`.

A set is a folder of class folders named by wnid (n01440764), in ImageNet-V2 by number (0 to 999). Names of the data's
classes decide which output of the model a class is, never the order of the folders.
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
from recast.lab.data import Data
from recast.lab.data.datasets import ImageFiles
from recast.lab.data.images import is_image_name, open_image, opened
from recast.lab.evaluation.accuracy import score_part, score_top
from recast.lab.evaluation.context import Context, NotMeasured, Source, sampled
from recast.lab.evaluation.evaluators import evaluates
from recast.lab.evaluation.imagenet_corruptions import means_over_corruptions
from recast.lab.evaluation.suites import CATEGORIES, SEVERITIES, SUITES

_V2 = "imagenetv2-matched-frequency"
SETS = {
    "imagenet-a": ("imagenet_a", "imagenet-a"),
    "imagenet-r": ("imagenet_r", "imagenet-r"),
    "imagenet-v2": ("imagenet", "imagenet-v2", f"{_V2}-format-val", _V2),
    "imagenet-c": ("imagenet", "imagenet-c", "imagenet_c", "imagenetc"),
}
"""`imagenet_wnids` of each set, and possible names of its folder."""
WNID = re.compile(r"n\d{8}")
VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")


@cache
def imagenet_wnids(subset: str = "imagenet") -> tuple[str, ...]:
    """Return WordNet ids in the order of ImageNet-1k's labels; subset imagenet_a, imagenet_r: of their 200 classes."""
    # timm has files for the smaller sets, but no function
    return tuple((files("timm.data") / "_info" / f"{subset}_synsets.txt").read_text(encoding="utf-8").split())


def outputs_of(data: Data, wnids: Sequence[str], dataset: str) -> Tensor:
    """Return the output of the models for each class, (len(wnids),) int64, by the names of the data's classes.

    Classes named by wnid may have any order and include others. A thousand other names must be ImageNet's in its order
    (one of the words between commas is enough). Raises NotMeasured for other classes.
    """
    classes: Sequence[str] = data.classes
    remedy = f"use a run on ImageNet, or drop {dataset}"
    if not all(WNID.fullmatch(name) for name in classes):
        order = imagenet_wnids()
        if len(classes) != len(order):
            raise NotMeasured(f"{dataset} requires ImageNet's 1000 classes, {data.name} has {len(classes)}: {remedy}")
        _check_order(classes, dataset, data.name)
        classes = order
    place = {name: index for index, name in enumerate(classes)}
    if missing := [wnid for wnid in wnids if wnid not in place]:
        raise NotMeasured(f"{data.name} lacks {len(missing)} classes of {dataset} ({listed(missing, 5)}); {remedy}")
    return torch.tensor([place[wnid] for wnid in wnids])


def _check_order(classes: Sequence[str], dataset: str, data: str) -> None:
    if list(classes) == [str(index) for index in range(len(classes))]:
        return
    info = ImageNetInfo("imagenet-1k")
    expected = [info.index_to_description(index) for index in range(len(classes))]
    words = {word for name in expected for word in _words(name)}
    other = [i for i, pair in enumerate(zip(classes, expected, strict=True)) if not _words(pair[0]) & _words(pair[1])]
    # a few have other names in other lists, such as "crane bird", but none the name of another class
    misplaced = [index for index in other if _words(classes[index]) & words]
    if misplaced or len(other) > len(classes) // 20:
        first = (misplaced or other)[0]
        raise NotMeasured(
            f"{dataset} requires ImageNet's classes in their order, but {len(other)} classes of {data} differ: class "
            f"{first} is {classes[first]!r}, expected {expected[first]!r}; name the class folders by wnid"
        )


def _words(name: str) -> set[str]:
    return {word.strip().lower().replace("_", " ") for word in name.split(",")}


def find_set(context: Context, suite: str) -> Path:
    """Return the folder of a test set, named in any case, in options.sets or $RECAST_DATA. Raises NotMeasured."""
    source = SUITES[suite].needs
    sets = context.options.sets or os.environ.get("RECAST_DATA")
    if not sets:
        raise NotMeasured(
            f"no folder for {suite}: set --sets DIR, or the environment variable RECAST_DATA, to the folder that holds "
            f"it. To get it: {source}"
        )
    root = Path(sets).expanduser()
    folders = {folder.name.lower(): folder for folder in root.glob("*/")}
    for name in SETS[suite][1:]:
        if name in folders:
            return folders[name]
    raise NotMeasured(f"no folder {suite} in {root}. To get it: {source}, unpacked there")


def list_images(root: Path, folders: Sequence[str]) -> tuple[list[str], Tensor]:
    """Return names FOLDER/IMAGE in `root`, and positions in `folders`. Raises NotMeasured for an empty folder."""
    by_class = [sorted(e.name for e in os.scandir(root / folder) if is_image_name(e.name)) for folder in folders]
    if empty := [folder for folder, names in zip(folders, by_class, strict=True) if not names]:
        raise NotMeasured(f"{root} has {len(empty)} class folders without images: {listed(empty, 5)}; unpack it again")
    names = [f"{folder}/{name}" for folder, names in zip(folders, by_class, strict=True) for name in names]
    return names, torch.arange(len(folders)).repeat_interleave(torch.tensor([len(names) for names in by_class]))


def sources_of_set(context: Context, suite: str) -> list[Source]:
    """Return all images of a set, resized and cropped as the data; `columns` if it has only some classes."""
    wnids = sorted(imagenet_wnids(SETS[suite][0]))
    columns = outputs_of(context.data, wnids, suite)
    root = find_set(context, suite)
    present, folders = {entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."}, wnids
    if all(name.isdecimal() for name in present):  # ImageNet-V2: the numbers are ImageNet's labels
        folders = [str(imagenet_wnids().index(wnid)) for wnid in wnids]
    differences = (("missing", set(folders) - present), ("unknown", present - set(folders)))
    if wrong := [f"{len(names)} {title}: {listed(sorted(names), 5)}" for title, names in differences if names]:
        raise NotMeasured(f"{root} must have the {len(folders)} class folders of {suite}, but has {'; '.join(wrong)}")
    names, labels = list_images(root, folders)
    val = context.data.val
    images = ImageFiles(labels, val.img_size, [str(root / name) for name in names], crop_pct=val.crop_pct)
    return [Source(sampled(images, context.options.num_images), columns=columns)]


@cache
def real_labels() -> dict[str, list[int]]:
    """Return the ReaL labels of each of ImageNet's 50,000 validation images by file name."""
    labels: dict[str, list[int]] = RealLabelsImagenet(range(50_000)).real_labels
    return labels


def sources_real(context: Context) -> list[Source]:
    """Return the validation images that have a label in ReaL. Raises NotMeasured if they are not ImageNet's.

    Each of an image's labels is right (Beyer et al. 2020, arXiv:2006.07159).
    """
    val, data = context.data.val, context.data.name
    names = [val.image_name(index) for index in range(len(val))]
    labels = [real_labels().get(f"{match[0]}.JPEG") for name in names if (match := VAL_IMAGE.search(name))]
    if len(labels) != len(val) or None in labels:
        other = next((name for name in names if not VAL_IMAGE.search(name)), "others")
        raise NotMeasured(
            "imagenet-real requires ImageNet's validation images under their file names "
            f"(ILSVRC2012_val_00000001.JPEG ...), but {data} has {other}; use --data imagenet"
        )
    outputs = outputs_of(context.data, imagenet_wnids(), "imagenet-real")
    answers = {index: outputs[label] for index, label in enumerate(labels) if label}
    if not answers:
        raise NotMeasured(f"none of the {len(val)} images of {data} has a ReaL label; use more images")
    padded = pad_sequence(list(answers.values()), batch_first=True, padding_value=-1)
    return [Source(val.subset(torch.tensor(list(answers))), answers=padded)]


def read_unresized(root: Path, side: int, name: str) -> Image.Image:
    """Return the RGB image ROOT/NAME. Raises RecastError if it is unreadable or not side x side pixels."""
    image = open_image(root / name)
    if image.size != (side, side):
        raise RecastError(
            f"images of ImageNet-C are not resized and must have {side}x{side} pixels, but {root / name} has "
            f"{image.height}x{image.width}"
        )
    return image


def sources_imagenet_c(context: Context) -> list[Source]:
    """Return the 75 folders of the released ImageNet-C (Hendrycks & Dietterich 2019, arXiv:1903.12261).

    Each holds the 50,000 validation images as JPEG files of 224 x 224 pixels, which are not resized or cropped. Raises
    NotMeasured with a list of everything that is missing.
    """
    wnids = sorted(imagenet_wnids())
    outputs, root = outputs_of(context.data, wnids, "imagenet-c"), find_set(context, "imagenet-c")
    folders: dict[str, Path] = {}
    missing: list[str] = []
    for category, kinds in CATEGORIES.items():
        for part in (f"{kind}/{severity}" for kind in kinds for severity in SEVERITIES):
            folder = next((folder for folder in (root / part, root / category / part) if folder.is_dir()), None)
            if folder is None:
                missing.append(part)
            elif classes := sorted(set(wnids) - set(os.listdir(folder))):
                missing.append(f"{part} ({listed(classes, 5)})")
            else:
                folders[part] = folder
    if missing:
        raise NotMeasured(
            f"{root} is not the complete ImageNet-C, missing: {listed(missing, 20)}. To get it: "
            f"{SUITES['imagenet-c'].needs}"
        )
    first = next(iter(folders.values()))
    names, places_of = list_images(first, wnids)
    with opened(first / names[0], str(first / names[0])) as image:
        side = max(image.size)
    # all folders share the list of names
    base = sampled(ImageFiles(outputs[places_of], side, names), context.options.num_images)
    return [
        Source(replace(base, read=partial(read_unresized, folder, side), where=f"imagenet-c {folder}"), part)
        for part, folder in folders.items()
    ]


def check_classes_of(suite: str, data: Data) -> None:
    """Raise NotMeasured for data of other classes than those of a suite."""
    outputs_of(data, imagenet_wnids(*SETS.get(suite, ())[:1]), suite)


for _suite in list(SETS)[:3]:
    _sources = partial(sources_of_set, suite=_suite)
    evaluates(_suite, sources=_sources, check=partial(check_classes_of, _suite))(score_top)
evaluates("imagenet-real", sources=sources_real, check=partial(check_classes_of, "imagenet-real"))(score_top)
evaluates(
    "imagenet-c",
    sources=sources_imagenet_c,
    derive=partial(means_over_corruptions, with_mce=True),
    check=partial(check_classes_of, "imagenet-c"),
)(score_part)
