"""Suite `autoattack`: the standard L∞ AutoAttack (Croce & Hein 2020, arXiv:2003.01690) of the package `pyautoattack`.

An image counts as correct if it survives APGD on the cross-entropy, targeted APGD on the DLR loss, targeted FAB (nine
target classes each) and Square (5,000 queries), one after the other. It takes thousands of passes for each image: use
few of them (--num-samples).
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recast.data.seeding import mix_seed, seeded_on
from recast.errors import RecastError
from recast.evaluation.bench import Batch, Bench, NotMeasured, Score, Source, is_correct

TARGETS = 9
MIN_CLASSES = 4
"""The targeted DLR loss compares with the fourth largest logit."""


def auto_attack(model: nn.Module, images: Tensor, labels: Tensor, eps: float, *, seed: int = 0) -> Tensor:
    """Attacked pixels (B, C, H, W) within ε (in 1/255) of `images` and in [0, 1]; unchanged where no attack succeeded.

    `model` takes pixels and should be in eval mode; its parameters get no gradient, the global random generators are
    restored. The random numbers follow from `seed` and from the other images of the batch. Raises NotMeasured without
    the package, RecastError for a model with fewer than 4 classes.
    """
    kind = _package()
    if eps == 0 or len(images) == 0:
        return images
    with torch.no_grad():
        classes = model(images[:1]).shape[1]
    if classes < MIN_CLASSES:
        raise RecastError(f"AutoAttack's targeted loss needs at least {MIN_CLASSES} classes, the model has {classes}")
    tracer = sys.gettrace()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with seeded_on(images.device, seed), contextlib.redirect_stdout(io.StringIO()):
        for parameter in trainable:  # FAB calls backward
            parameter.requires_grad_(False)
        try:
            attack = kind(
                model, norm="Linf", eps=eps / 255, version="standard", device=images.device, seed=seed % 2**32
            )
            attack.fab.n_target_classes = attack.apgd_targeted.n_target_classes = min(TARGETS, classes - 1)
            attacked: Tensor = attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)
            sys.settrace(tracer)  # one of its checks ends a debugger's or a coverage tool's
    return attacked.detach()


def _package() -> Any:
    try:
        from pyautoattack import AutoAttack
    except ImportError as error:
        raise NotMeasured(
            f'AutoAttack comes with pyautoattack ({error}): pip install "recast-vision[autoattack]"'
        ) from None
    return AutoAttack


def sources_autoattack(bench: Bench) -> list[Source]:
    """The validation images; NotMeasured without the package."""
    _package()
    if len(bench.data.classes) < MIN_CLASSES:
        raise RecastError(
            f"autoattack needs data with at least {MIN_CLASSES} classes, {bench.data.name} has "
            f"{len(bench.data.classes)}: use pgd"
        )
    return [Source("", bench.data.val, bench.data.name)]


def score_autoattack(bench: Bench, batch: Batch) -> Iterator[Score]:
    """top1@ε for every ε."""
    for name, model in bench.models.items():
        survived = is_correct(batch.logits(name), batch.labels)
        for eps in bench.options.eps:
            left = survived.bool()
            score = survived.clone()
            if eps > 0 and left.any():
                seed = mix_seed("autoattack", bench.options.seed, batch.first)
                attacked = auto_attack(model, batch.images[left], batch.labels[left], eps, seed=seed)
                score[left] = is_correct(bench.logits(name, attacked), batch.labels[left])
            yield Score(name, f"top1@{eps:g}", score)
