"""Seeds, generators and choices of images that depend on their purpose, never on earlier draws.

Choices are balanced over the classes or have their shares, and are the same for the same labels: runs stay comparable.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from recast.errors import RecastError


def mix_seed(*parts: object) -> int:
    """Return a seed below 2^63 for any numbers and words; neighbouring numbers give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_cpu(seed: int) -> None:
    """Seed the global CPU generators of torch, numpy and random, from which transforms draw.

    torch and numpy (both mt19937) get different halves of the seed: from the same 32 bits both give the same numbers.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed((seed >> 31) % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int | None = None) -> Iterator[None]:
    """Start a block with `seed_cpu(seed)` (None: unseeded) and restore the global CPU generators after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        if seed is not None:
            seed_cpu(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def random_states(device: torch.device) -> tuple[object, ...]:
    """Return the states of the global generators, of the CPU and of `device`, for a comparison."""
    on_device = getattr(torch.get_device_module(device), "get_rng_state", torch.get_rng_state)()
    tensors, drawn = (torch.get_rng_state(), on_device), np.random.get_state(legacy=False)
    keys = drawn["state"]["key"].tobytes()  # which a repr shortens
    return *(state.cpu().numpy().tobytes() for state in tensors), keys, repr(drawn), random.getstate()


@contextmanager
def seeded_on(device: torch.device, seed: int) -> Iterator[None]:
    """Apply `seeded` and seed the generator of `device` too: layers created on a GPU draw there."""
    with seeded(seed), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def draw_by_index(
    draw: Callable[..., Tensor], shape: Iterable[int], indices: Iterable[int], *purpose: object
) -> Tensor:
    """Return `draw(shape)` for each index, (B, *shape), with a generator seeded by the purpose and the index alone."""
    generators = (torch.Generator().manual_seed(mix_seed(*purpose, index)) for index in indices)
    return torch.stack([draw(tuple(shape), generator=generator) for generator in generators])


def epoch_order(size: int, seed: int | None, epoch: int, repeats: int = 1) -> Tensor:
    """Return the indices of an epoch (size,) int64, shuffled by (seed, epoch), each `repeats` times in a row.

    seed None: 0, 1, 2, ... As in DeiT's sampler (repeated augmentation) the order is cut to `size`: an epoch shows
    ⌈size / repeats⌉ images.
    """
    order = torch.arange(size)
    if seed is not None:
        generator = torch.Generator().manual_seed(mix_seed("order", seed, epoch))
        order = torch.randperm(size, generator=generator)
    return order if repeats == 1 else order[: -(-size // repeats)].repeat_interleave(repeats)[:size]


def balanced_epoch(labels: Tensor, seed: int, epoch: int, repeats: int = 1) -> Tensor:
    """Return the indices of an epoch (size,) int64 in which every class occurs equally often, give or take one.

    The images of a class come in turns: each once, before any comes again. Drawn by (seed, epoch); `repeats` is that of
    `epoch_order`.
    """
    size = -(-len(labels) // repeats)
    _, classes = shuffled_classes(labels, mix_seed("balanced", seed, epoch))
    turns = -(-size // len(classes))
    rows = torch.stack([of_class.repeat(-(-turns // len(of_class)))[:turns] for of_class in classes])
    order = rows.T.flatten()[:size]  # a turn of all classes after the other, so that the cut is fair
    order = order[torch.randperm(size, generator=torch.Generator().manual_seed(mix_seed("order", seed, epoch)))]
    return order.repeat_interleave(repeats)[: len(labels)]


def shuffled_classes(labels: Tensor, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Return all indices in a random order, and the indices of each class in that order."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return shuffled, [shuffled[labels[shuffled] == label] for label in labels.unique()]


def balanced_order(labels: Tensor, seed: int = 0) -> Tensor:
    """Return a permutation of the images whose prefixes are class-balanced, as far as the classes go.

    The images of each class are shuffled; the first of every class come first, then the second of every class, ...
    """
    shuffled, classes = shuffled_classes(labels, seed)
    turn = torch.empty_like(shuffled)
    for of_class in classes:
        turn[of_class] = torch.arange(len(of_class))
    # Stable: within a turn classes keep their shuffled order, so that a remainder does not always go to the first.
    return shuffled[torch.argsort(turn[shuffled], stable=True)]


def choose_balanced(labels: Tensor, count: int, option: str, seed: int = 0) -> Tensor:
    """Return ascending indices of `count` class-balanced images. Raises RecastError if there are fewer."""
    _check_count(labels, count, option)
    return balanced_order(labels, seed)[:count].sort().values


def choose_stratified(labels: Tensor, count: int, option: str) -> Tensor:
    """Return ascending indices of `count` images with the class shares of all. Raises RecastError if there are fewer.

    The images of a smaller count are among those of a larger one. Classes of equal size give `choose_balanced`.
    """
    _check_count(labels, count, option)
    shuffled, classes = shuffled_classes(labels, 0)
    place = torch.empty(len(labels), dtype=torch.float64)
    for of_class in classes:
        place[of_class] = (torch.arange(len(of_class), dtype=torch.float64) + 0.5) / len(of_class)
    return shuffled[torch.argsort(place[shuffled], stable=True)][:count].sort().values


def _check_count(labels: Tensor, count: int, option: str) -> None:
    if len(labels) == 0:
        raise RecastError(f"{option}={count}, but this part of the data set has no images")
    if not 1 <= count <= len(labels):
        raise RecastError(f"{option} must be between 1 and {len(labels)} (the number of images), got {count}")


def choose_fraction(labels: Tensor, fraction: float) -> Tensor:
    """Return ascending indices of max(1, round(fraction · n)) of the n images of every class, 0 < fraction <= 1.

    The images of a smaller fraction are among those of a larger one.
    """
    _, classes = shuffled_classes(labels, 0)
    parts = [of_class[: max(1, round(fraction * len(of_class)))] for of_class in classes]
    return torch.cat([torch.empty(0, dtype=torch.long), *parts]).sort().values


def hold_out(labels: Tensor, fraction: float, groups: Sequence[str] | None = None) -> tuple[Tensor, Tensor]:
    """Return ascending indices of a training and a validation part, `fraction` of every class for validation.

    A class of two or more images has at least one on each side; a single image goes to training. With `groups`, one for
    each image, images of a group stay together, and a class may be larger or have none in validation. Raises
    RecastError if every class has a single image or group.
    """
    if groups is not None:
        return _hold_out_groups(labels, fraction, groups)
    generator = torch.Generator().manual_seed(0)
    train, val = [], []
    for label in labels.unique():
        of_class = (labels == label).nonzero().flatten()
        of_class = of_class[torch.randperm(len(of_class), generator=generator)]
        held_out = min(max(1, round(fraction * len(of_class))), len(of_class) - 1)
        val.append(of_class[:held_out])
        train.append(of_class[held_out:])
    if not any(map(len, val)):
        raise RecastError("cannot hold out a validation part: every class has a single image; add images")
    return torch.cat(train).sort().values, torch.cat(val).sort().values


def _hold_out_groups(labels: Tensor, fraction: float, groups: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Hold out whole groups: from the rarest class on, in random order, those that bring it closer to its share."""
    names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    group_of = torch.tensor([names[group] for group in groups])
    counts = torch.zeros(len(names), int(labels.max()) + 1).index_put_(
        (group_of, labels), torch.ones(len(labels)), accumulate=True
    )
    total = counts.sum(0)
    left, is_held = total.clone(), torch.zeros(len(names), dtype=torch.bool)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    for label in total.argsort().tolist():
        share = max(1.0, fraction * float(total[label]))
        for group in order[counts[order, label] > 0].tolist():
            lacking = share - float(total[label] - left[label])
            if lacking <= 0:
                break
            rest = left - counts[group]
            fits = counts[group, label] <= max(1, 2 * lacking) and bool((rest[counts[group] > 0] > 0).all())
            if fits and not is_held[group]:
                is_held[group], left = True, rest
    if not is_held.any():
        raise RecastError("cannot hold out whole groups: too few have images of each class; add a column split")
    held = is_held[group_of]
    return (~held).nonzero().flatten(), held.nonzero().flatten()
