"""Measure models side by side: `evaluate({"parent": a, "recast": b}, ["clean", "pgd"], data)` gives rows."""

from __future__ import annotations

from recast.evaluation.context import PixelModel
from recast.evaluation.runner import evaluate
from recast.run.config.evaluation import Options
from recast.run.records import Row

__all__ = ["Options", "PixelModel", "Row", "evaluate"]
