"""Which output of a model stands for which class of ImageNet, by the names of the classes that the data gives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import torch
from timm.data import ImageNetInfo
from torch import Tensor

from recast.evaluation.context import Context, NotMeasured

WNID = re.compile(r"n\d{8}")


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
    todo = f"evaluate a model of ImageNet's classes with --data imagenet, or leave {dataset} out"
    if not all(WNID.fullmatch(name) for name in classes):
        order = imagenet_wnids()
        if len(classes) != len(order):
            raise NotMeasured(f"{dataset} is for models of ImageNet's 1000 classes, {data} has {len(classes)}: {todo}")
        _check_order(classes, dataset, data)
        classes = order
    place = {name: index for index, name in enumerate(classes)}
    if missing := [wnid for wnid in wnids if wnid not in place]:
        raise NotMeasured(
            f"{dataset} has classes that are none of the {len(classes)} of {data}: {listed(missing)}; {todo}"
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


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many there are."""
    return f"{', '.join(names[:5])}{f' ... ({len(names)} in all)' if len(names) > 5 else ''}"
