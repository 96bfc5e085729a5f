"""What plug-ins (`recast.models.names.PLUGINS`) bring, by name, and their loading. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.models.names import PLUGINS

T = TypeVar("T")

FINDERS: dict[str, Callable[[DataConfig], Any]] = {}
"""Data sets of tasks → functions that read them (`Task.find`)."""


def plugged(table: Mapping[str, T], name: str) -> T:
    """Return table[name]. Plug-ins are loaded in order until one brings it; raises RecastError if none does."""
    for plugin in PLUGINS:
        if name in table:
            break
        import_module(plugin)
    if name not in table:
        raise RecastError(f"no plug-in brings {name}: register it in a module of PLUGINS ({', '.join(PLUGINS)})")
    return table[name]
