"""Bench: train, evaluate, explain and report, and the command line. Imports no torch."""

import recast.lab.tasks  # noqa: F401  registers them, and their suites
from recast.models.names import PLUGINS

if "recast.lab.networks" not in PLUGINS:
    PLUGINS.append("recast.lab.networks")
