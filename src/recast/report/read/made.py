"""evaluation.json of a run folder: how the numbers of each suite were made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recast.run.files import mapping, number, read_json, require


@dataclass(frozen=True)
class Made:
    """How one suite's numbers were made; "" or NaN for what was not written down."""

    suite: str
    command: str
    date: str
    seconds: float
    device: str
    machine: str
    versions: dict[str, str]
    dataset: str
    images: float
    options: Mapping[str, Any]


def read_made(path: Path) -> list[Made]:
    """Raises RecastError for a truncated file or one of another format."""
    suites = require(f"suites of {path}", require(str(path), read_json(path), ("suites",))["suites"], ())
    return [_made(suite, require(f"{suite} of {path}", found, ())) for suite, found in suites.items()]


def _made(suite: str, found: dict[str, Any]) -> Made:
    command = found.get("command")
    return Made(
        suite=suite,
        command=shlex.join(map(str, command)) if isinstance(command, list) else str(command or ""),
        date=str(found.get("date") or ""),
        seconds=number(found.get("seconds")),
        device=str(found.get("device") or ""),
        machine=str(found.get("machine") or ""),
        versions={name: str(version) for name, version in mapping(found.get("versions")).items() if version},
        dataset=str(found.get("dataset") or ""),
        images=number(found.get("images")),
        options=mapping(found.get("options")),
    )
