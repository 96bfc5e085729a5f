"""Settings of a run as plain data. Imports no torch, so that the command line starts fast.

A `Recipe` is complete: written to `recipe.yaml`, it replays the run.
"""

from __future__ import annotations

from recast.lab.config.inputs import Augmentation, AugmentConfig, Crop, DataConfig, ImagesConfig
from recast.lab.config.recipe import Freeze, OptimConfig, PaperConfig, Recipe, RegularizationConfig
from recast.lab.config.schedules import ScheduleConfig
from recast.lab.config.tasks import ClassifyConfig, TaskConfig

__all__ = [
    "AugmentConfig",
    "Augmentation",
    "ClassifyConfig",
    "Crop",
    "DataConfig",
    "Freeze",
    "ImagesConfig",
    "OptimConfig",
    "PaperConfig",
    "Recipe",
    "RegularizationConfig",
    "ScheduleConfig",
    "TaskConfig",
]
