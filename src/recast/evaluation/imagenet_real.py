"""Suite `imagenet-real`: ImageNet's validation images with the labels of ReaL (Beyer et al. 2020, arXiv:2006.07159).

A prediction is right if it is among an image's labels. 3,163 of the 50,000 images have none and are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from recast.data.shards import ImageStream
from recast.evaluation.bench import Batch, Bench, NotMeasured, Score, Source
from recast.evaluation.imagenet_sets import imagenet_wnids, outputs_of

VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")


@cache
def real_labels() -> tuple[tuple[int, ...], ...]:
    """ImageNet's labels of each of the 50,000 validation images, in the order of their numbers; timm ships them."""
    content = (files("timm.data") / "_info" / "imagenet_real_labels.json").read_text(encoding="utf-8")
    return tuple(tuple(labels) for labels in json.loads(content))


@dataclass(frozen=True)
class RealSource(Source):
    """Validation images with the outputs that are right for each."""

    answers: tuple[tuple[int, ...], ...] = ()


def sources_real(bench: Bench) -> list[Source]:
    """The validation images of the data that have a label in ReaL; NotMeasured if they are not ImageNet's."""
    val, data = bench.data.val, bench.data.name
    names = [] if isinstance(val, ImageStream) else [val.image_name(index) for index in range(len(val))]
    numbers = [int(found[1]) for name in names if (found := VAL_IMAGE.search(name))]
    if len(numbers) != len(val) or not all(1 <= number <= len(real_labels()) for number in numbers):
        other = next((name for name in names if not VAL_IMAGE.search(name)), "others")
        raise NotMeasured(
            "imagenet-real relabels ImageNet's 50,000 validation images, which it knows by their file names "
            f"(ILSVRC2012_val_00000001.JPEG and so on), but {data} has {other}: use --data imagenet with such names"
        )
    outputs = outputs_of(bench, imagenet_wnids(), "imagenet-real").tolist()
    labels = [real_labels()[number - 1] for number in numbers]
    kept = [index for index, answers in enumerate(labels) if answers]
    if not kept:
        raise NotMeasured(f"none of the {len(val)} images of {data} has a label in ReaL: use more of them")
    answers = tuple(tuple(outputs[label] for label in labels[index]) for index in kept)
    return [RealSource("", val.subset(torch.tensor(kept)), "imagenet-real", answers=answers)]


def score_real(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1, top5: one of the k largest logits is among the image's labels."""
    assert isinstance(batch.source, RealSource)
    right = torch.zeros(len(batch), len(bench.data.classes), device=batch.images.device)
    for row, index in enumerate(batch.indices):
        right[row, list(batch.source.answers[index])] = 1
    for name in bench.models:
        best = batch.logits(name).topk(5, dim=1).indices
        yield Score(name, "top1", right.gather(1, best[:, :1]).amax(1))
        yield Score(name, "top5", right.gather(1, best).amax(1))
