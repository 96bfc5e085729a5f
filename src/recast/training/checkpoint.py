"""The state of a training run on disk, so that it can go on where it stopped: bit for bit on the CPU,
and as far as its kernels are deterministic on an accelerator.

`resume/state.pt` holds tensors, numbers and text only and is read with torch's `weights_only` reader: no pickled
object. It is written under another name, flushed to the disk, then renamed over the old one: there is always one
whole state.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from recast.config import Recipe
from recast.errors import RecastError
from recast.models.weights import mismatch
from recast.recipe import changed_keys, recipe_from_dict, recipe_to_dict

VERSION = 1

MAY_CHANGE = ("device", "control", "data.workers", "data.data_dir", "model.checkpoint")
"""What may differ when a run goes on: where it runs and where things lie, not what it computes."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the state was saved. The message says how to go on; the command line prints it and exits with 130.

    A KeyboardInterrupt, so that an `except Exception` around a study does not go on with the next run.
    """


@dataclass
class Position:
    """Where a run is: `step` batches of `epoch` are done (epoch 0: nothing is measured yet)."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    """Sum of the training loss over the images of this epoch so far."""
    images: int = 0
    seconds: float = 0.0
    """Spent on this epoch so far, interruptions left out."""


@dataclass
class State:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None
    position: Position

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are measured and kept: the average where there is one."""
        return self.model if self.ema is None else self.ema.module


def state_path(folder: Path) -> Path:
    """Where the state of the run in `folder` lies."""
    return folder / "resume" / "state.pt"


def save_state(state: State, recipe: Recipe, folder: Path) -> None:
    """Replace the state on disk by this one."""
    path = state_path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": VERSION,
        "recipe": recipe_to_dict(recipe),
        "position": asdict(state.position),
        "model": state.model.state_dict(),
        "ema": None if state.ema is None else state.ema.module.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.scaler.state_dict(),
        "random": _random_states(),
    }
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def restore_(state: State, recipe: Recipe, folder: Path) -> None:
    """Load the state on disk into `state`, the random generators included.

    Raises RecastError if the file is truncated or foreign, or belongs to another recipe or model.
    """
    path = state_path(folder)
    start_again = f"delete {path.parent} to train again from the start"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        version = content["version"]
    except Exception as error:  # a damaged file can break the reader in any way
        raise RecastError(f"{path} is truncated or no state of a run ({type(error).__name__}): {start_again}") from None
    if version != VERSION:
        raise RecastError(f"{path} has version {version}, expected {VERSION}: {start_again}")
    saved = recipe_from_dict(content["recipe"], str(path))
    if changed := changed_keys(saved, recipe, ignore=MAY_CHANGE):
        raise RecastError(f"{folder} was trained with another {', '.join(changed)}: resume it with its own recipe")
    if reason := mismatch(state.model, content["model"]):
        raise RecastError(f"{path} is the state of another model ({reason}): {start_again}")
    try:
        state.model.load_state_dict(content["model"])
        if state.ema is not None:
            state.ema.module.load_state_dict(content["ema"])
        state.optimizer.load_state_dict(content["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise RecastError(
            f"{path} is the state of another model ({str(error).splitlines()[0]}): {start_again}"
        ) from None
    state.scaler.load_state_dict(content["scaler"])
    state.position = Position(**content["position"])
    _set_random_states(content["random"])


def _random_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": [version, list(numbers), gauss],
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if "mps" in states and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if len(states.get("cuda", ())) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def shielded() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done: no state is ever half a step.

    Signals reach the main thread only; anywhere else there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
    if pressed:
        raise KeyboardInterrupt
