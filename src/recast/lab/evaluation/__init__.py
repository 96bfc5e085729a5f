"""Measure models side by side: `evaluate({"parent": a, "recast": b}, ["clean", "pgd"], data)` gives rows."""

from __future__ import annotations

from recast.lab.config.evaluation import Options
from recast.lab.evaluation.context import PixelModel
from recast.lab.evaluation.runner import evaluate
from recast.lab.folder.records import Row

__all__ = ["Options", "PixelModel", "Row", "evaluate"]
