"""The walk in a few lines: how many of how many, and every row that falls short with its cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import median

from recast.zoo.examine import ZooRow

EXACT = ("exact", "exact_fp64")
NOTHING = ("no spatial convolution", "no two-dimensional convolution")


def summary(rows: Iterable[ZooRow]) -> str:
    """One block per library: architectures recast exactly, out of all that hold a spatial convolution."""
    by_source: dict[str, list[ZooRow]] = {}
    for row in rows:
        by_source.setdefault(row.model.partition(":")[0], []).append(row)
    return "\n".join(line for source, found in by_source.items() for line in _lines(source, found))


def _lines(source: str, rows: list[ZooRow]) -> list[str]:
    counts = Counter(row.status for row in rows)
    held = [row for row in rows if row.status not in NOTHING]
    exact = [row for row in held if row.status in EXACT]
    lines = [
        f"{source}: {len(exact)} of {len(held)} architectures with a spatial convolution recast exactly "
        f"({counts['exact_fp64']} of them exceed 1e-4 in fp32 and keep to 1e-9 in fp64); "
        f"{len(rows) - len(held)} of {len(rows)} have none"
    ]
    if exact:
        bitwise = sum(row.last_split_bitwise is True and row.all_split_bitwise in (True, "") for row in exact)
        lines += [
            f"  bitwise equal in split: {bitwise} of {len(exact)}",
            f"  dense in fp32, median: {_median(exact, 'last_dense_error'):.1e} for the last stage, "
            f"{_median(exact, 'all_dense_error'):.1e} for everything within the budget; in fp64 where it exceeds 1e-4: "
            f"at most {_largest(exact, 'error_fp64'):.1e}",
            f"  split against reference with random open heads: at most {_largest(exact, 'open_error'):.1e} "
            f"over {sum(row.open_layers for row in exact)} layers",
            f"  layers recast: {sum(row.all_recast for row in exact)}; smallest control {_smallest_control(exact):.1e}",
        ]
    seconds, peak = sum(row.seconds for row in rows), max((row.peak_gib for row in rows), default=0.0)
    lines.append(f"  {seconds / 60:.0f} minutes of one process each, at most {peak:.1f} GiB")
    lines += [f"  {row.model}: {row.status}, {row.cause}" for row in held if row.status not in EXACT]
    return lines


def _largest(rows: list[ZooRow], column: str) -> float:
    return max((value for row in rows if isinstance(value := getattr(row, column), float)), default=0.0)


def _median(rows: list[ZooRow], column: str) -> float:
    found = [value for row in rows if isinstance(value := getattr(row, column), float)]
    return median(found) if found else 0.0


def _smallest_control(rows: list[ZooRow]) -> float:
    return min((row.control for row in rows if isinstance(row.control, float)), default=0.0)
