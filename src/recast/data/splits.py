"""Seeded choices of images, balanced over the classes. Always the same for the same labels: runs stay comparable."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.errors import RecastError


def balanced_order(labels: Tensor, seed: int = 0) -> Tensor:
    """A permutation of the images whose every prefix is class-balanced, as far as the classes go.

    The images of each class are shuffled; then come the first of every class, the second of every class, ...
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    turn = torch.empty_like(shuffled)
    for label in labels.unique():
        of_class = shuffled[labels[shuffled] == label]
        turn[of_class] = torch.arange(len(of_class))
    # Stable: within a turn the classes keep their shuffled order, so a remainder does not always fall to the first.
    return shuffled[torch.argsort(turn[shuffled], stable=True)]


def choose_balanced(labels: Tensor, count: int, option: str, seed: int = 0) -> Tensor:
    """Indices (ascending) of `count` class-balanced images. Raises RecastError naming `option` if there are too few."""
    if len(labels) == 0:
        raise RecastError(f"{option}={count}, but the data set has no such images")
    if not 1 <= count <= len(labels):
        raise RecastError(f"{option} must be between 1 and {len(labels)} (the images there are), got {count}")
    return balanced_order(labels, seed)[:count].sort().values


def stratified_split(labels: Tensor, fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices (ascending) of a training and a validation part: `fraction` of every class goes to validation.

    A class with two images or more has at least one on each side; a single image goes to training.
    """
    generator = torch.Generator().manual_seed(seed)
    train, val = [], []
    for label in labels.unique():
        of_class = (labels == label).nonzero().flatten()
        of_class = of_class[torch.randperm(len(of_class), generator=generator)]
        held_out = min(max(1, round(fraction * len(of_class))), len(of_class) - 1)
        val.append(of_class[:held_out])
        train.append(of_class[held_out:])
    return torch.cat(train).sort().values, torch.cat(val).sort().values


def hold_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """`stratified_split` for data without a validation part; raises RecastError when no class can spare an image."""
    if not 0 < fraction < 1:
        raise RecastError(f"val_fraction must be between 0 and 1, got {fraction}")
    train, val = stratified_split(labels, fraction)
    if len(val) == 0:
        raise RecastError("a validation part cannot be held out: every class has a single image. Add a val/ part")
    return train, val


def choose_fraction(labels: Tensor, fraction: float, seed: int = 0) -> Tensor:
    """Indices (ascending) of max(1, round(fraction · n)) of the n images of every class.

    The images of a smaller fraction are among those of a larger one. Raises RecastError unless 0 < fraction <= 1.
    """
    if not 0 < fraction <= 1:
        raise RecastError(f"data_fraction must be above 0 and at most 1, got {fraction}")
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    chosen = [torch.empty(0, dtype=torch.long)]
    for label in labels.unique():
        of_class = shuffled[labels[shuffled] == label]
        chosen.append(of_class[: max(1, round(fraction * len(of_class)))])
    return torch.cat(chosen).sort().values
