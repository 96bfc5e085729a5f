"""Bench: train, evaluate, explain and report, and the command line. Imports no torch."""

from recast.models.names import PLUGINS

if "recast.lab.tasks" not in PLUGINS:
    PLUGINS.append("recast.lab.tasks")
