"""Dates of a schedule: Eq. 7 of PRS in whole numbers, lists of one's own, dates that training decides."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from recast import RecastError, Schedule
from recast.layers.config import ScheduleConfig, parse_dates


def plan_of(*names: str) -> Any:
    """All that a schedule reads of a plan."""
    return SimpleNamespace(steps=tuple(SimpleNamespace(name=name) for name in names))


def blocks(count: int) -> Any:
    return plan_of(*(f"blocks.{i}.mixer" for i in range(count)))


@pytest.mark.parametrize(
    ("epochs", "dates"),
    [(400, [343, 286, 229, 172, 115, 58]), (50, [41, 31, 21, 11])],  # after 342.86, 285.71, …; at a tie still none
)
def test_progressive_dates_follow_equation_7(epochs: int, dates: list[int]) -> None:
    """T·(1 − l/(L+1)) for l = 1 … L (Lee et al. 2022, Eq. 7)."""
    assert list(Schedule.progressive(blocks(len(dates)), epochs).dates.items()) == [
        (f"blocks.{i}.mixer", date) for i, date in enumerate(dates)
    ]


def test_dates_are_whole_number_arithmetic() -> None:
    """10·(1 − 1/5) is 8 exactly; 1 − l/(L+1) in floating point puts some ties on the wrong side."""
    for layers in (1, 4, 6, 9, 16, 27):
        plan = blocks(layers)
        for epochs in range(1, 60):
            schedule = Schedule.progressive(plan, epochs)
            for number in range(1, layers + 1):
                date = schedule.dates[f"blocks.{number - 1}.mixer"]
                assert (date - 1) * (layers + 1) <= epochs * (layers + 1 - number) < date * (layers + 1)


def test_at_once_and_listed() -> None:
    plan = blocks(3)
    assert Schedule.at_once(plan, 101).due(101) == tuple(f"blocks.{i}.mixer" for i in range(3))
    assert Schedule.at_once(plan, 101).due(100) == ()
    listed = Schedule.listed(plan, {2: ["blocks.2.mixer"], 5: ["blocks.0.*"]})
    assert (listed.due(2), listed.due(5), listed.waiting()) == (
        ("blocks.2.mixer",), ("blocks.0.mixer",), ("blocks.1.mixer",),
    )  # fmt: skip


def test_a_learned_schedule_gets_its_dates_and_stays_what_it_was() -> None:
    empty = Schedule.learned(blocks(2))
    later = empty.decided("blocks.1.mixer", 4)
    assert (empty.waiting(), later.waiting()) == (("blocks.0.mixer", "blocks.1.mixer"), ("blocks.0.mixer",))
    assert (empty.due(4), later.due(4)) == ((), ("blocks.1.mixer",))
    with pytest.raises(RecastError, match="does not wait"):
        later.decided("blocks.1.mixer", 5)


def test_a_plan_without_layers_has_a_schedule_without_dates() -> None:
    assert str(Schedule.progressive(plan_of(), 5)) == "schedule: progressive"


def test_slots_wait_for_their_layers() -> None:
    schedule = Schedule.progressive(blocks(3), 4, "learned")
    assert (schedule.dates, schedule.slots) == ({}, (2, 3, 4))
    assert "(the gates decide)" in str(schedule)
    schedule = schedule.decided("blocks.0.mixer", 2)
    assert (schedule.due(2), schedule.slots) == (("blocks.0.mixer",), (3, 4))
    assert Schedule.from_dict(schedule.to_dict()) == schedule


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


def test_what_is_no_plan_and_no_date_is_named() -> None:
    plan = blocks(2)
    makers: list[tuple[Callable[[Any], object], object, str]] = [
        (lambda value: Schedule.at_once(value, 1), None, "plan must be a Plan, as recast.plan gives, got None"),
        (lambda value: Schedule.at_once(plan, value), [], "epoch must be a whole number"),
        (lambda value: Schedule.progressive(plan, value), "3", "epochs must be a whole number, got '3'"),
        (lambda value: Schedule.listed(plan, value), {1: "*"}, "dates .* must be a mapping, got {1: '\\*'}"),
        (lambda value: Schedule.listed(plan, value), [1], r"dates .* must be a mapping, got \[1\]"),
        (lambda value: Schedule("own", value), 3, "layers must be a list, each item text, got 3"),
        (Schedule.from_dict, None, "the schedule: it must be a mapping"),
    ]
    for make, value, message in makers:
        with pytest.raises(RecastError, match=message):
            make(value)


def test_a_model_that_is_the_convolution_is_refused() -> None:
    with pytest.raises(RecastError, match="put it into a module"):
        Schedule.at_once(plan_of(""), 1)


def test_schedules_of_recipes() -> None:
    plan = blocks(4)
    assert Schedule.of(ScheduleConfig(), plan, 10) is None
    assert Schedule.of(ScheduleConfig("at_once", conv_epochs=3), plan, 10) == Schedule.at_once(plan, 4)
    assert Schedule.of(ScheduleConfig("progressive"), plan, 50) == Schedule.progressive(plan, 50)
    found = Schedule.of(ScheduleConfig("listed", dates=["2:blocks.3.mixer", "2:blocks.1.mixer"]), plan, 10)
    assert found is not None
    assert found.due(2) == ("blocks.1.mixer", "blocks.3.mixer")
    learned = Schedule.of(ScheduleConfig("learned"), plan, 10)
    assert learned is not None
    assert learned.dates == {}


@pytest.mark.parametrize("word", ["5", "five:blocks.0", "5:", "-1:x", "1.5:x", "9" * 5000 + ":x"])
def test_dates_as_words(word: str) -> None:
    assert parse_dates(["5:re:a", "5:b", "6:c"]) == {5: ["re:a", "b"], 6: ["c"]}
    with pytest.raises(RecastError, match="EPOCH:LAYER"):
        parse_dates([word])
    with pytest.raises(RecastError, match=r"schedule\.dates"):
        parse_dates([])
