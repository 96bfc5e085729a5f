"""The finished trainings of a trial: runs.jsonl, a line for each, and the weights of the recast arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from recast.config import coerce
from recast.errors import RecastError, listed
from recast.files import replaced, write_text
from recast.lab.folder.files import json_line, read_lines
from recast.lab.trial.arms import CURVE_POINTS, Training
from recast.models.checksum import checksum

FILE, WEIGHTS = "runs.jsonl", "recast_tail.safetensors"


class Runs:
    """The trainings in the folder of a trial. A row is a `Training` as plain data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []

    def open(self, say: Callable[[str], object]) -> None:
        """Read the file. Lines that are damaged, or were cut as the process was killed, are reported and removed."""
        path = self.folder / FILE
        rows, damaged = read_lines(path) if path.is_file() else ([], [])
        for number, row in rows:
            try:
                coerce(Training, row, "row")
                self.rows.append(row)
            except RecastError:
                damaged.append(number)
        if damaged:
            lines = f"line{'s' * (len(damaged) > 1)} {listed([str(number) for number in sorted(damaged)], 5)}"
            say(f"{path}: {lines} damaged or cut: what it held is trained again")
        self._write()

    def find(self, key: Mapping[str, Any], updates: int, images: int) -> tuple[dict[str, Any] | None, bool]:
        """Return the row of a training, None if it is missing, and True if damaged ones of it were removed."""
        rows = [row for row in self.rows if key.items() <= row.items()]
        for index, row in enumerate(rows):
            if self._is_whole(row, updates, images):
                return row, index > 0
            self.rows.remove(row)
        if rows:
            self._write()
        return None, bool(rows)

    def append(self, row: dict[str, Any]) -> None:
        """Add the row of a finished training."""
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json_line(row))
        self.rows.append(row)

    def save_weights(self, network: nn.Module) -> str:
        """Write the weights of the recast arm and return their checksum, for the row of its first seed."""
        weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
        with replaced(self.folder / WEIGHTS) as temporary:
            save_file(weights, temporary)
        return checksum(weights)

    def weights(self) -> dict[str, Tensor]:
        """Read the weights of the recast arm."""
        return load_file(self.folder / WEIGHTS)

    def _write(self) -> None:
        write_text(self.folder / FILE, "".join(map(json_line, self.rows)))

    def _is_whole(self, row: Mapping[str, Any], updates: int, images: int) -> bool:
        """Return True if a row is of these updates and images, and the weights that it has on disk are there."""
        if (row["updates"], len(row["right"]), len(row["curve"])) != (updates, images, min(CURVE_POINTS, updates)):
            return False
        if (row["kind"], row["arm"], row["seed"]) != ("final", "recast", 0):
            return True
        try:
            return bool(row.get("weights") == checksum(self.weights()))
        except (OSError, SafetensorError):
            return False
