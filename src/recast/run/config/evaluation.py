"""What the suites of an evaluation can be told, as plain data."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from recast.errors import RecastError


@dataclass(frozen=True)
class Options:
    """Options of the suites; each suite reads its own."""

    eps: tuple[float, ...] = (1.0, 4.0)
    """Budgets of the attacks in 1/255 of a [0, 1] pixel."""
    steps: int = 5
    """Steps of PGD."""
    step_size: float | None = None
    """Step size of PGD in 1/255. None: 2.5·ε/steps."""
    restarts: int = 1
    """PGD is started so many times, and an image counts as correct if all fail. From the second on: random starts."""
    random_start: bool = False
    """The first start of PGD is a random point of the ball too."""
    sizes: tuple[str, ...] = ()
    """Test sizes of `resolution`: 160, or 128x192 (height x width). Empty: sizes around the model's own."""
    neighbours: tuple[int, ...] = (1, 5, 10, 20)
    """k of the `knn` suite."""
    sets: Path | None = None
    """The folder that holds imagenet-c/, imagenet-a/ and so on."""
    num_samples: int | None = None
    """Measure on this many images of every data set, class-balanced."""
    seed: int = 0
    """Of the corruptions, of random starts and of the bootstrap."""

    def __post_init__(self) -> None:
        for name in ("eps", "neighbours"):  # each once
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if not self.eps or not all(math.isfinite(budget) and budget >= 0 for budget in self.eps):
            raise RecastError(f"eps must be numbers of 0 or more (in 1/255), got {self.eps}")
        if self.seed < 0:
            raise RecastError(f"seed must be 0 or more, got {self.seed}")
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise RecastError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.step_size is not None and not (math.isfinite(self.step_size) and self.step_size > 0):
            raise RecastError(f"step_size must be a number above 0 (in 1/255), got {self.step_size}")
        if not self.neighbours or any(k < 1 for k in self.neighbours):
            raise RecastError(f"neighbours must be numbers of 1 or more, got {self.neighbours}")
        for size in self.sizes:
            parse_size(size)


def parse_size(text: str) -> tuple[int, int]:
    """(height, width) of "160" or "128x192"; RecastError for anything else."""
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if min(size) < 1:
        raise RecastError(f"sizes must be numbers such as 160, or HEIGHTxWIDTH such as 128x192, got {text!r}")
    return size
