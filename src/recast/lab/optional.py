"""Packages that only some commands need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from recast.errors import RecastError


def optional_package(name: str, package: str, purpose: str, error: type[RecastError] = RecastError) -> Any:
    """Import an optional package, or raise an `error` that says how to install it."""
    try:
        return import_module(name)
    except ImportError as missing:
        raise error(f"{purpose} ({missing}): pip install {package}") from None
