"""Measure models side by side: `evaluate({"parent": a, "recast": b}, ["clean", "pgd"], data)` gives rows.

`recast.rows` reads and writes them without torch; the rest is imported on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recast.rows import Row, read_rows, write_rows

if TYPE_CHECKING:
    from recast.evaluation.suites import SUITES, evaluate

__all__ = ["SUITES", "Row", "evaluate", "read_rows", "write_rows"]


def __getattr__(name: str) -> object:
    if name not in ("SUITES", "evaluate"):
        raise AttributeError(f"module 'recast.evaluation' has no attribute {name!r}")
    from recast.evaluation import suites

    value = getattr(suites, name)
    globals()[name] = value
    return value
