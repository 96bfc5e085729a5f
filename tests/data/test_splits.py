from __future__ import annotations

import pytest
import torch

from recast.data.splits import balanced_order, choose_balanced, stratified_split
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
    train, val = stratified_split(LABELS, 0.1)
    assert torch.cat([train, val]).sort().values.equal(torch.arange(77))
    assert LABELS[val].bincount().tolist() == [5, 1, 2]


def test_split_keeps_a_single_image_for_training() -> None:
    train, val = stratified_split(torch.tensor([0, 1, 1]), 0.5)
    assert 0 in train
    assert len(val) == 1
