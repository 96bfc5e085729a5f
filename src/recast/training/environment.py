"""environment.json: on what a run was made, and how long it took."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from recast.device import surroundings
from recast.run.files import write_json
from recast.training.distributed import is_first, process_count


@contextmanager
def recorded(out: Path, device: torch.device, command: str) -> Iterator[None]:
    """Keep environment.json while and after the block runs; a resumed run adds its seconds to those before."""
    if not is_first():
        yield
        return
    path, started = out / "environment.json", time.time()
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    environment = {
        **surroundings(device),
        "processes": process_count(),
        "date": before.get("date") or datetime.now(UTC).isoformat(timespec="seconds"),
        "command": before.get("command") or command,
        "seconds": before.get("seconds", 0.0),
    }
    write_json(path, environment)
    try:
        yield
    finally:
        environment["seconds"] = round(environment["seconds"] + time.time() - started, 1)
        with suppress(OSError):  # a full disk: why the run ended is worth more than its seconds
            write_json(path, environment)
