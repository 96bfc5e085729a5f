"""What is asked of an image: a task is one object, and everything that depends on it is one of its methods.

`TASKS` has them by name: classification, segmentation and detection from the folders here, those of papers and of users
once they are registered. `task_of` reads a recipe, `Data.task` says what the labels of images are. A task's folder
imports no torch before one of its methods is called: the command line and reports read words and names alone.
"""

from __future__ import annotations

from recast.lab.tasks.base import (
    TASKS,
    Loss,
    Meter,
    StatefulLoss,
    Task,
    register_task,
    suites_of,
    task_of,
    task_of_data,
)
from recast.lab.tasks.classify import Classify
from recast.lab.tasks.detect import Detect
from recast.lab.tasks.multilabel import MultiLabel
from recast.lab.tasks.segment import Segment

__all__ = ["TASKS", "Loss", "Meter", "StatefulLoss", "Task", "register", "suites_of", "task_of", "task_of_data"]

for _task in (Classify(), MultiLabel(), Segment(), Detect()):
    register_task(_task)
