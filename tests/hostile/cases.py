"""Every hostile case, by kind; and what the commands give for files that nobody harmed."""

from __future__ import annotations

import os
from pathlib import Path

from judging import Case, Result, attempt, faults
from of_commands import command_cases
from of_dense import dense_cases
from of_files import EVALUATE, EXPECTED, EXPLAIN, EXPLAIN_RUN, REPORT, RESUME, file_cases, outcome
from of_images import image_cases
from of_library import library_cases
from of_promises import promise_cases

SAMPLE = int(os.environ.get("RECAST_HOSTILE", "1"))
"""Scale of the cases that are tests: some of all kinds; `.ci/run` takes 4, two hundred."""
SEED = 1


def all_cases(scale: int, number: int, world: Path) -> list[Case]:
    """The cases of all kinds, in the order of the kinds."""
    makers = file_cases, command_cases, image_cases, library_cases, promise_cases, dense_cases
    return [case for make in makers for case in make(scale, number, world)]


def expect(world: Path) -> None:
    """Find what the commands give for whole files; raises AssertionError where one of them fails."""
    for words in (EVALUATE, EXPLAIN, EXPLAIN_RUN, REPORT, RESUME):
        case = Case("whole files", words, words.split())
        result = attempt(case, world)
        assert (result.code, faults(case, result)) == (0, {}), f"{words}: {result}"[:2000]
        EXPECTED[words] = outcome(words, result)


def judge(case: Case, world: Path, keep: Path | None = None) -> tuple[Result, dict[str, str]]:
    """A case tried, and what is held against it."""
    result = attempt(case, world, keep)
    return result, faults(case, result)
