"""What a run is, as plain data: no torch in here, so that the command line starts fast.

A `Recipe` is complete: written to `recipe.yaml`, it replays the run.
"""

from __future__ import annotations

from recast.run.config.attention import Backend, Order, PoolConfig, PoolStart, RecastConfig, ScheduleConfig, parse_dates
from recast.run.config.inputs import AugmentConfig, Crop, DataConfig, ModelConfig, Task
from recast.run.config.recipe import Recipe, check_recipe
from recast.run.config.training import DistillConfig, EmbeddingConfig, Freeze, OptimConfig, RegularizationConfig

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
