import pytest
import torch

from recast.errors import RecastError
from recast.lab.data.seeding import balanced_epoch, balanced_order, choose_balanced, choose_fraction, hold_out

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
    for count in (0, 78):
        with pytest.raises(RecastError, match=f"num_val must be between 1 and 77 .* got {count}"):
            choose_balanced(LABELS, count, "num_val")


def test_fraction_is_of_every_class_nested_and_at_least_one() -> None:
    assert LABELS[choose_fraction(LABELS, 0.1)].bincount().tolist() == [5, 1, 2]
    assert LABELS[choose_fraction(LABELS, 0.001)].bincount().tolist() == [1, 1, 1]
    assert choose_fraction(LABELS, 1.0).equal(torch.arange(77))
    small, large = choose_fraction(LABELS, 0.2), choose_fraction(LABELS, 0.5)
    assert set(small.tolist()) < set(large.tolist())
    assert small.equal(small.sort().values)
    train, val = hold_out(LABELS, 0.1)
    assert torch.cat([train, val]).sort().values.equal(torch.arange(77))
    assert LABELS[val].bincount().tolist() == [5, 1, 2]
    assert 0 in hold_out(torch.tensor([0, 1, 1]), 0.5)[0]  # a single image goes to training


def test_balanced_epochs() -> None:
    labels = torch.tensor([0] * 70 + [1] * 7 + [2] * 23)
    order = balanced_epoch(labels, 3, 5)
    assert order.equal(balanced_epoch(labels, 3, 5))
    assert not order.equal(balanced_epoch(labels, 3, 6))
    assert sorted(labels[order].bincount().tolist()) == [33, 33, 34]
    times = order.bincount(minlength=100)
    for label, (least, most) in enumerate([(0, 1), (4, 5), (1, 2)]):  # in turns
        assert set(times[labels == label].tolist()) <= {least, most}
    assert torch.cat([balanced_epoch(labels, 3, epoch) for epoch in range(24)]).bincount(minlength=100).min() > 0
    twice = balanced_epoch(labels, 3, 5, repeats=2)
    assert len(twice) == 100
    assert twice[::2].equal(twice[1::2])
    assert sorted(labels[twice].bincount().tolist()) == [32, 34, 34]
    assert len(balanced_epoch(torch.zeros(5, dtype=torch.long), 0, 0)) == 5
