"""Random numbers that follow from what they are for, never from what was drawn before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


def mix_seed(*parts: object) -> int:
    """A seed below 2^63 for any mix of numbers and words; neighbouring numbers give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def image_seeds(seed: int | None, epoch: int, positions: Sequence[int]) -> list[int]:
    """A seed for the augmentation of each image, by its position in the epoch's order and nothing else."""
    return [mix_seed("augment", seed, epoch, position) for position in positions]


@contextmanager
def restored() -> Iterator[Callable[[int], None]]:
    """Gives a function that seeds the global CPU generators of torch, numpy and random; afterwards they are as before.

    timm's and torchvision's transforms draw from all three. torch and numpy both take 32 bits, and from the same bits
    both would give the same numbers (mt19937): they get different halves of the seed.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield _seed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed((seed >> 31) % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global CPU generators of torch, numpy and random for a block, and restore them after it."""
    with restored() as reseed:
        reseed(seed)
        yield


@contextmanager
def seeded_on(device: torch.device, seed: int) -> Iterator[None]:
    """As `seeded`, and the generator of `device` too: layers that are made on a GPU draw there."""
    with seeded(seed), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
