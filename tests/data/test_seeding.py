from __future__ import annotations

import random

import numpy as np
import torch

from recast.data.seeding import mix_seed, restored, seeded


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), float(np.random.rand()), random.random()


def test_seeds_are_below_2_to_63_and_differ_by_every_part() -> None:
    seeds = {mix_seed(word, a, b) for word in ("order", "augment") for a in range(20) for b in range(20)}
    assert len(seeds) == 800
    assert max(seeds) < 2**63
    assert max(seeds) > 2**62


def test_a_seeded_block_repeats_and_leaves_the_generators_as_they_were() -> None:
    with seeded(5):
        first = draw()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = [draw(), draw()]
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    found = [draw()]
    with restored() as reseed:
        reseed(5)
        assert draw() == first
        reseed(6)
        assert draw() != first
        reseed(5)
        assert draw() == first
    assert [*found, draw()] == expected


def test_torch_and_numpy_do_not_draw_the_same_numbers() -> None:
    """Both are mt19937: seeded with the same 32 bits, numpy's words are torch's."""
    for seed in (3, mix_seed("a"), mix_seed("b")):
        with seeded(seed):
            words = set(torch.randint(2**31, (50,)).tolist())
            others = set((np.random.randint(2**32, size=50, dtype=np.uint64) % 2**31).tolist())
        assert not words & others
    torch.manual_seed(3), np.random.seed(3)
    assert set(torch.randint(2**31, (50,)).tolist()) & set(
        (np.random.randint(2**32, size=50, dtype=np.uint64) % 2**31).tolist()
    )
