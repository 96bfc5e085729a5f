"""What is imported only when it is needed: plug-ins (`recast.models.names.PLUGINS`), optional packages, public names.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from recast.errors import RecastError
from recast.models.names import PLUGINS

if TYPE_CHECKING:
    from recast.lab.config import DataConfig

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


def optional_package(name: str, package: str, purpose: str, error: type[RecastError] = RecastError) -> Any:
    """Import an optional package, or raise an `error` that says how to install it."""
    try:
        return import_module(name)
    except ImportError as missing:
        raise error(f"{purpose} ({missing}): pip install {package}") from None


def public_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return `__getattr__` that imports a package's names from their modules (or modules themselves) on first use."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        return module if homes[name] == name else getattr(module, name)

    return get
