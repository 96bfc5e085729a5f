"""Strict JSON, with one-line errors. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recast.errors import RecastError, first_line, shown


def parse_json(text: str, source: str | Path) -> Any:
    """Parse JSON. Raises RecastError, naming `source`, for bad syntax, duplicate keys and deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise RecastError(f"{source} is truncated or not JSON: line {error.lineno}, {error.msg}") from None
    except RecursionError:
        raise RecastError(f"{source} is not read: its lists and objects are nested too deep") from None
    except ValueError as error:  # a number of 5,000 digits
        raise RecastError(f"{source} is not read: {first_line(error)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {shown(next(key for key in keys if keys.count(key) > 1))} twice")
    return mapping
