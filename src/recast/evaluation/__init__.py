"""Measure models side by side: `evaluate({"parent": a, "recast": b}, ["clean", "pgd"], data)` gives rows.

`recast.run.records` reads and writes them without torch; the rest is imported on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from recast.run.records import Difference, Row, read_differences, read_rows, write_differences, write_rows

if TYPE_CHECKING:
    from recast.evaluation.bench import Options, PixelModel
    from recast.evaluation.suites import SUITES, evaluate, measure

__all__ = [
    "SUITES",
    "Difference",
    "Options",
    "PixelModel",
    "Row",
    "evaluate",
    "measure",
    "read_differences",
    "read_rows",
    "write_differences",
    "write_rows",
]
_PLACES = {"Options": "bench", "PixelModel": "bench", "SUITES": "suites", "evaluate": "suites", "measure": "suites"}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'recast.evaluation' has no attribute {name!r}")
    value = getattr(import_module(f"recast.evaluation.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
