"""Runs that differ in the seed alone: a mean, and how far it may lie from that of many more seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from recast.report.load import Run
from recast.run.config import Recipe
from recast.run.recipe import HOW_IT_RUNS, PATHS, flat

MAY_DIFFER = {*HOW_IT_RUNS, "seed", "compile"}
LISTED = 4
"""Differences that are named; of more, their number is told."""


def why_no_mean(runs: Sequence[Run]) -> str:
    """Why the runs have no mean, in one sentence; empty where they are one recipe with different seeds.

    Paths count by their last name only: the same file may lie anywhere.
    """
    if len(runs) < 2:
        return "A mean needs at least two runs."
    if len({run.data_key for run in runs}) > 1:
        return "No mean is given: these runs are of different data."
    counts = sorted({row.n for run in runs for row in run.rows if row.suite == "clean"})
    if len(counts) > 1:
        found = " and ".join(f"{count:,}" for count in counts)
        return f"No mean is given: these runs were measured on different numbers of images ({found})."
    recipes = [_comparable(run.recipe) for run in runs]
    differ = sorted(key for key in recipes[0] if any(recipe[key] != recipes[0][key] for recipe in recipes))
    if differ:
        more = f" and {len(differ) - LISTED} more" if len(differ) > LISTED else ""
        return f"No mean is given: these runs differ in more than the seed ({', '.join(differ[:LISTED])}{more})."
    if len({run.epochs for run in runs}) > 1:
        return "No mean is given: these runs have not been trained for the same number of epochs."
    seeds = [run.recipe.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        return "No mean is given: some of these runs have the same seed, so a mean would count one result twice."
    return ""


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """Every field with its full name, without those that may differ; a path by its last name."""
    found = {key: value for key, value in flat(recipe).items() if key not in MAY_DIFFER}
    for section, field in PATHS:
        path = found[f"{section}.{field}"]
        found[f"{section}.{field}"] = path and PurePath(path).name
    return found
