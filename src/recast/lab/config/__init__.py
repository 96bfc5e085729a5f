"""What a run is, as plain data: no torch in here, so that the command line starts fast.

A `Recipe` is complete: written to `recipe.yaml`, it replays the run.
"""

from __future__ import annotations

from recast.lab.config.inputs import AugmentConfig, Crop, DataConfig
from recast.lab.config.recipe import Recipe, check_recipe
from recast.lab.config.training import DistillConfig, EmbeddingConfig, Freeze, OptimConfig, RegularizationConfig

__all__ = [
    "AugmentConfig",
    "Crop",
    "DataConfig",
    "DistillConfig",
    "EmbeddingConfig",
    "Freeze",
    "OptimConfig",
    "Recipe",
    "RegularizationConfig",
    "check_recipe",
]
