"""What a run is, as plain data: no torch in here, so that the command line starts fast.

A `Recipe` is complete: written to `recipe.yaml`, it replays the run.
"""

from __future__ import annotations

from recast.lab.config.inputs import AugmentConfig, Crop, DataConfig, ModelConfig, Task
from recast.lab.config.recipe import Recipe, check_recipe
from recast.lab.config.training import DistillConfig, EmbeddingConfig, Freeze, OptimConfig, RegularizationConfig
from recast.layers.config import Backend, Order, PoolConfig, PoolStart, RecastConfig, ScheduleConfig, parse_dates

__all__ = [
    "AugmentConfig",
    "Backend",
    "Crop",
    "DataConfig",
    "DistillConfig",
    "EmbeddingConfig",
    "Freeze",
    "ModelConfig",
    "OptimConfig",
    "Order",
    "PoolConfig",
    "PoolStart",
    "RecastConfig",
    "Recipe",
    "RegularizationConfig",
    "ScheduleConfig",
    "Task",
    "check_recipe",
    "parse_dates",
]
