"""Measure models side by side: `evaluate({"parent": a, "recast": b}, ["clean", "pgd"], data)` gives rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recast.lab.config.evaluation import Options as Options
from recast.lab.plugins import public_names

if TYPE_CHECKING:
    from recast.lab.evaluation import attacks as attacks
    from recast.lab.evaluation.context import PixelModel as PixelModel
    from recast.lab.evaluation.runner import evaluate as evaluate

__getattr__ = public_names(__name__, {"PixelModel": "context", "attacks": "attacks", "evaluate": "runner"})
