"""Text and JSON of a run folder: what is missing, truncated or of another shape is an error that names the file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from recast.errors import RecastError


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecastError(f"{path} is missing: {path.parent} is not a complete run folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecastError(f"cannot read {path}: {error}") from None


def require(where: str, found: object, keys: Iterable[str]) -> dict[str, Any]:
    """`found` as an object that holds `keys`; `where` names it in the error."""
    if not isinstance(found, dict):
        raise RecastError(f"{where} must be a JSON object, got {type(found).__name__}")
    missing = [key for key in keys if key not in found]
    if missing:
        raise RecastError(f"{where} lacks {', '.join(missing)}")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return require(str(path), _parse(path), ())


def read_names(path: Path) -> list[str]:
    """The JSON list of texts in a file."""
    found = _parse(path)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise RecastError(f"{path} must be a JSON list of names")
    return found


def _parse(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise RecastError(f"{path} is truncated or not JSON: line {error.lineno}, {error.msg}") from None


def mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float:
    """A float, NaN for what is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
