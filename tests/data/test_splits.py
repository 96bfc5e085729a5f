from __future__ import annotations

import pytest
import torch

from recast.data.seeding import balanced_order, choose_balanced, choose_fraction, hold_out
from recast.errors import RecastError

LABELS = torch.tensor([0] * 50 + [1] * 7 + [2] * 20)[torch.randperm(77, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(("count", "expected"), [(3, [1, 1, 1]), (21, [7, 7, 7]), (30, [12, 7, 11]), (77, [50, 7, 20])])
def test_subsets_are_balanced_as_far_as_classes_go(count: int, expected: list[int]) -> None:
    counts = LABELS[choose_balanced(LABELS, count, "num_train")].bincount(minlength=3)
    assert counts[1] == expected[1]
    assert (counts - torch.tensor(expected)).abs().max() <= 1  # who gets the remainder is drawn
    assert counts.sum() == count


def test_subsets_are_nested_seeded_and_without_repetition() -> None:
    order = balanced_order(LABELS)
    assert order.sort().values.equal(torch.arange(77))
    assert set(choose_balanced(LABELS, 10, "n").tolist()) < set(choose_balanced(LABELS, 11, "n").tolist())
    assert order.equal(balanced_order(LABELS))
    assert not order.equal(balanced_order(LABELS, seed=1))


@pytest.mark.parametrize("count", [0, -1, 78])
def test_impossible_subset_names_the_option(count: int) -> None:
    with pytest.raises(RecastError, match=f"num_val must be between 1 and 77 .* got {count}"):
        choose_balanced(LABELS, count, "num_val")


def test_split_is_stratified() -> None:
    train, val = hold_out(LABELS, 0.1)
    assert torch.cat([train, val]).sort().values.equal(torch.arange(77))
    assert LABELS[val].bincount().tolist() == [5, 1, 2]


def test_split_keeps_a_single_image_for_training() -> None:
    train, val = hold_out(torch.tensor([0, 1, 1]), 0.5)
    assert 0 in train
    assert len(val) == 1


def test_held_out_images_are_a_share_of_every_class() -> None:
    train, val = hold_out(LABELS, 0.3)
    assert torch.cat([train, val]).sort().values.equal(torch.arange(77))
    assert LABELS[val].bincount().tolist() == [15, 2, 6]
    for fraction in (0.0, 1.0, -1.0):
        with pytest.raises(RecastError, match="val_fraction must be between 0 and 1"):
            hold_out(LABELS, fraction)
    with pytest.raises(RecastError, match="every class has a single image"):
        hold_out(torch.tensor([0, 1, 2]), 0.5)


def test_fraction_is_of_every_class_nested_and_at_least_one() -> None:
    assert LABELS[choose_fraction(LABELS, 0.1)].bincount().tolist() == [5, 1, 2]
    assert LABELS[choose_fraction(LABELS, 0.001)].bincount().tolist() == [1, 1, 1]
    assert choose_fraction(LABELS, 1.0).equal(torch.arange(77))
    small, large = choose_fraction(LABELS, 0.2), choose_fraction(LABELS, 0.5)
    assert set(small.tolist()) < set(large.tolist())
    assert small.equal(choose_fraction(LABELS, 0.2))
    assert small.equal(small.sort().values)
    for fraction in (0.0, 1.1):
        with pytest.raises(RecastError, match="data_fraction must be above 0 and at most 1"):
            choose_fraction(LABELS, fraction)
