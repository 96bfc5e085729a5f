"""Trust: `pkg.module:function` in a file runs only if the user allows it.

A recipe, a run folder and a saved file may come from anywhere. A function is imported if the user typed its name, or
passed `trust=True`. Imports no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from recast.errors import RecastError
from recast.models.names import REGISTRIES

_TYPED: ContextVar[frozenset[str]] = ContextVar("_TYPED", default=frozenset())
_TRUST: ContextVar[bool] = ContextVar("_TRUST", default=False)


@contextmanager
def trusting(*typed: str | None, trust: bool = False) -> Iterator[None]:
    """Allow the functions whose names were `typed` inside the block; with `trust`, those that files name too."""
    typed_before = _TYPED.set(_TYPED.get() | set(filter(None, typed)))
    trust_before = _TRUST.set(_TRUST.get() or trust)
    try:
        yield
    finally:
        _TYPED.reset(typed_before)
        _TRUST.reset(trust_before)


def is_function(name: str | None) -> bool:
    """Return True if a model's name means a function of the user."""
    return name is not None and ":" in name and name.partition(":")[0] not in REGISTRIES


def may_run(name: str) -> bool:
    """Return True if the user typed the name of a function, or trusts files."""
    return name in _TYPED.get() or _TRUST.get()


def check_trusted(*names: str | None) -> None:
    """Raise RecastError for a function that a file names and the user did not."""
    for name in names:
        if name is not None and is_function(name) and not may_run(name):
            raise RecastError(
                f"the file names code to run, {name}: if you trust its author, add trust=True and "
                f"put the folder of {name.partition(':')[0]} on PYTHONPATH"
            )


def elsewhere(name: str) -> str:
    """Return the addition to a message where `import_path` skips the current folder."""
    return "" if name in _TYPED.get() else " (not looked for in the current folder: put its folder on PYTHONPATH)"


@contextmanager
def import_path(name: str) -> Iterator[None]:
    """Set `sys.path` for the module of a function.

    The current folder comes first if the user typed the name; if a file names it, it is used only if on PYTHONPATH.
    """
    before, here = list(sys.path), os.path.realpath(os.getcwd())
    if name in _TYPED.get():
        # a console script does not look there, `python -m` does: both should find the user's file
        sys.path.insert(0, here)
    else:
        listed = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        asked = any(os.path.realpath(path) == here for path in listed)
        sys.path[:] = [path for path in before if asked or (path and os.path.realpath(path) != here)]
    try:
        yield
    finally:
        sys.path[:] = before
