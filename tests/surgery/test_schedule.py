"""Dates of a schedule: Eq. 7 of PRS in whole numbers, lists of one's own."""

from types import SimpleNamespace
from typing import Any

import pytest

from recast import RecastError, Schedule


def blocks(count: int) -> Any:
    """All that a schedule reads of a plan."""
    return SimpleNamespace(steps=tuple(SimpleNamespace(name=f"blocks.{i}.mixer") for i in range(count)))


@pytest.mark.parametrize(
    ("epochs", "dates"),
    [(400, [343, 286, 229, 172, 115, 58]), (50, [41, 31, 21, 11])],  # after 342.86, 285.71, …; at a tie still none
)
def test_progressive_dates_follow_equation_7(epochs: int, dates: list[int]) -> None:
    """T·(1 − l/(L+1)) for l = 1 … L (Lee et al. 2022, Eq. 7)."""
    assert list(Schedule.progressive(blocks(len(dates)), epochs).dates.items()) == [
        (f"blocks.{i}.mixer", date) for i, date in enumerate(dates)
    ]


def test_at_once_and_listed() -> None:
    plan = blocks(3)
    assert Schedule.at_once(plan, 101).due(101) == tuple(f"blocks.{i}.mixer" for i in range(3))
    assert Schedule.at_once(plan, 101).due(100) == ()
    listed = Schedule.listed(plan, {2: ["blocks.2.mixer"], 5: ["blocks.0.*"]})
    assert (listed.due(2), listed.due(5), listed.waiting()) == (
        ("blocks.2.mixer",),
        ("blocks.0.mixer",),
        ("blocks.1.mixer",),
    )


@pytest.mark.parametrize(
    ("dates", "message"),
    [
        ({0: ["blocks.0.mixer"]}, "got 0"),
        ({1: ["blocks.0.mixr"]}, "Did you mean blocks.0.mixer"),
        ({1: ["blocks.*"], 2: ["blocks.1.mixer"]}, "two dates"),
    ],
)
def test_dates_that_cannot_be(dates: dict[int, list[str]], message: str) -> None:
    with pytest.raises(RecastError, match=message):
        Schedule.listed(blocks(2), dates)
