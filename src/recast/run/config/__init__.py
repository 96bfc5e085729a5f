"""What a run is, as plain data: no torch in here, so that the command line starts fast.

A `Recipe` is complete: written to `recipe.yaml`, it replays the run.
"""

from __future__ import annotations

from recast.run.config.inputs import AugmentConfig, Crop, DataConfig, ModelConfig
from recast.run.config.layer import Backend, Content, Gate, RecastConfig, StrideMode
from recast.run.config.pool import PoolConfig, PoolKind, PoolStart
from recast.run.config.recipe import Recipe
from recast.run.config.schedule import ScheduleConfig
from recast.run.config.training import DistillConfig, OptimConfig, RegularizationConfig

__all__ = [
    "AugmentConfig",
    "Backend",
    "Content",
    "Crop",
    "DataConfig",
    "DistillConfig",
    "Gate",
    "ModelConfig",
    "OptimConfig",
    "PoolConfig",
    "PoolKind",
    "PoolStart",
    "RecastConfig",
    "Recipe",
    "RegularizationConfig",
    "ScheduleConfig",
    "StrideMode",
]
