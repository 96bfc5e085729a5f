"""The tasks of `recast.lab`: a plug-in, which `recast.lab.task` loads. Imports torch only in methods."""

from __future__ import annotations

from recast.lab.task import register_task
from recast.lab.tasks.classify import Classify
from recast.lab.tasks.multilabel import MultiLabel

for _task in (Classify(), MultiLabel()):
    register_task(_task)
