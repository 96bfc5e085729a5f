"""Tasks: each is an object, and everything that depends on the task is one of its methods.

`TASKS` has them by name: classification with one label or several from the folders here, and those registered by papers
and users. A task's folder imports torch only in methods: the command line and reports read words and names.
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
from recast.lab.tasks.multilabel import MultiLabel

__all__ = ["TASKS", "Loss", "Meter", "StatefulLoss", "Task", "register_task", "suites_of", "task_of", "task_of_data"]

for _task in (Classify(), MultiLabel()):
    register_task(_task)
