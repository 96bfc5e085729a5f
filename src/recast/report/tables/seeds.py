"""Runs that differ in the seed alone: a mean, and how far it may lie from that of many more seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from recast.report.read.run import Run

# The 97.5 % quantile of Student's t by degrees of freedom; more of them than here: the normal's, corrected to 1/df.
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
MAY_DIFFER = {
    "seed",
    "device",
    "control",
    "trackers",
    "keep",
    "save_steps",
    "grad_checkpointing",
    "accumulate",
    "compile",
}
"""Fields of a recipe that say how a run is carried out, not what is computed."""


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, to 0.001.

    Above 30 degrees of freedom ν: z + (z³ + z)/(4ν) (Abramowitz and Stegun, 26.7.5), z = 1.96.
    """
    if degrees < 1:
        return math.inf
    if degrees <= len(T975):
        return T975[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of a 95 % interval over independent values: mean ± t·s/√n; infinite for a single one."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def seeds_apart(runs: Sequence[Run]) -> bool:
    """The runs are one recipe with different seeds, so that a mean over them means something."""
    return not why_no_mean(runs)


def why_no_mean(runs: Sequence[Run]) -> str:
    """Why the runs have no mean, in one sentence; empty where they have one.

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
    first = _comparable(runs[0].recipe)
    differ = sorted({key for run in runs[1:] for key in _different(first, _comparable(run.recipe))})
    if differ:
        more = f" and {len(differ) - 4} more" if len(differ) > 4 else ""
        return f"No mean is given: these runs differ in more than the seed ({', '.join(differ[:4])}{more})."
    if len({run.epochs for run in runs}) > 1:
        return "No mean is given: these runs have not been trained for the same number of epochs."
    seeds = [run.recipe.get("seed") for run in runs]
    if not all(isinstance(seed, int) for seed in seeds):
        return "No mean is given: not every run has a seed."
    if len(set(seeds)) < len(seeds):
        return "No mean is given: some of these runs have the same seed, so a mean would count one result twice."
    return ""


def _comparable(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every field with its full name, without those that may differ; a path by its last name."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _comparable(value, f"{name}.")
        elif name not in MAY_DIFFER and key != "workers":
            is_path = isinstance(value, str) and key in {"checkpoint", "data_dir", "teacher_checkpoint"}
            found[name] = PurePath(value).name if is_path else value
    return found


def _different(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [key for key in first.keys() | other.keys() if first.get(key) != other.get(key)]
