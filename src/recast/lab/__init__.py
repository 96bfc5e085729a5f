"""Bench: train, evaluate, explain and report, and the command line. Imports no torch."""

from recast.models.names import PLUGINS

PLUGINS.extend(name for name in ("recast.lab.tasks", "recast.lab.networks") if name not in PLUGINS)
