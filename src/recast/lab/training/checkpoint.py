"""The state of a training run on disk. A resumed run continues bit for bit on a CPU, and on an accelerator as far as
its kernels are deterministic.

`resume/` holds the newest states, one file `state-EPOCH-STEP.pt` each. They hold tensors, numbers and text, and are
read with torch's `weights_only` reader. Writes are atomic: there is always a whole state. Order, augmentation, mixing
and dropout are drawn from (seed, epoch, step), on any number of processes: no generator's state is saved.
"""

from __future__ import annotations

import warnings
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from recast.config import read
from recast.errors import RecastError, first_line
from recast.files import free_space, replaced
from recast.lab.config import Recipe
from recast.lab.config.text import changes, may_change
from recast.lab.folder.run import RunFolder
from recast.lab.task import StatefulLoss
from recast.lab.training.switches import Switches
from recast.models.weights import first_nonfinite, mismatch
from recast.surgery.chosen_forms import ChosenForms, choose_forms_

VERSION = 4
KEPT = 2
"""Number of states on disk, the newest ones."""


@dataclass
class Position:
    """Position of a run: `step` batches of `epoch` are done (epoch 0: nothing is measured yet)."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    """Sum of the training loss over the batches of this epoch so far."""
    bad_images: list[str] = field(default_factory=list)
    """Unreadable images of this process in this epoch, which others replaced."""
    seconds: float = 0.0
    """Time spent on this epoch so far, without interruptions."""
    waited: float = 0.0
    """Seconds of it spent waiting for data."""

    @property
    def wait(self) -> float:
        """Return the share of the epoch's time so far that was spent waiting for data."""
        return self.waited / self.seconds if self.seconds else 0.0


@dataclass
class State:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None
    loss: StatefulLoss | None = None
    """The loss, if it has a state."""
    switches: Switches | None = None
    """Layers that a schedule has recast so far; None without a schedule."""
    forms: ChosenForms | None = None
    """Forms of the layers that `recipe.tune` has chosen so far."""
    position: Position = field(default_factory=Position)

    @property
    def evaluated(self) -> nn.Module:
        """Return the network that is measured and saved: the average of the weights if there is one, or the model."""
        if self.ema is not None:
            return self.ema.module
        return self.model if self.loss is None or self.loss.evaluated is None else self.loss.evaluated


def newest_state(folder: RunFolder) -> str:
    """Return a phrase for messages that names the newest state."""
    paths = folder.saved_states()
    return f"the newest state is {paths[-1]}" if paths else "there is no state yet"


def save_state(state: State, settings: dict[str, Any], folder: RunFolder, images: int) -> None:
    """Write this state, then drop all but the `KEPT` newest.

    `settings` are `Recipe.plain`, `images` is the size of the training set, which must be the same on resume. Raises
    RecastError for weights that are not finite, and if the file cannot be written; the states before it stay as they
    were.
    """
    position = state.position
    for module in dict.fromkeys((state.model, state.evaluated)):
        if bad := first_nonfinite(module, module.state_dict()):
            raise RecastError(
                f"{bad} is not finite after epoch {position.epoch}, step {position.step}: lower optim.lr or "
                f"optim.gate_lr, or set optim.clip_grad; {newest_state(folder)}"
            )
    path = folder.states / f"state-{position.epoch:05d}-{position.step:08d}.pt"
    names = {id(p): name for name, p in state.model.named_parameters()}
    content = {
        "version": VERSION,
        "recipe": settings,
        "position": asdict(position),
        "images": images,
        "model": state.model.state_dict(),
        "ema": None if state.ema is None else state.ema.module.state_dict(),
        "loss": None if state.loss is None else state.loss.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "groups": [[names[id(p)] for p in group["params"]] for group in state.optimizer.param_groups],
        "switches": None if state.switches is None else state.switches.record.to_dict(),
        "scaler": state.scaler.state_dict(),
        "forms": None if state.forms is None else asdict(state.forms),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            torch.save(content, temporary)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
        space = f"its disk has {free_space(folder.path)} left"
        raise RecastError(
            f"cannot save the state in {path.parent} ({first_line(error)}; {space}); {newest_state(folder)}"
        ) from None
    paths = folder.saved_states()
    number = paths.index(path) + 1
    for old in (*paths[: max(0, number - KEPT)], *paths[number:]):  # later ones belong to an abandoned continuation
        old.unlink(missing_ok=True)


def restore_(state: State, recipe: Recipe, folder: RunFolder, images: int, path: Path | None = None) -> Path:
    """Load the newest whole state on disk (or the one in `path`) into `state`; returns its path.

    Damaged states are skipped with a warning. Raises RecastError if none is left, or if it belongs to another recipe
    (every difference is listed), model or number of training images.
    """
    start_again = f"delete {folder.states} to train again from the start"
    content, path = _newest(folder.saved_states() if path is None else [path], folder, start_again)
    if content["version"] != VERSION:
        raise RecastError(f"{path} has version {content['version']}, expected {VERSION}: {start_again}")
    if changed := changes(read(Recipe, content["recipe"], str(path)), recipe, ignore=may_change()):
        raise RecastError(
            f"{folder} was started with other settings, {', '.join(changed)}: resume it with its own recipe"
        )
    if content["images"] != images:
        raise RecastError(f"{folder} was trained on {content['images']} images, now there are {images}: {start_again}")
    if state.switches is not None and content["switches"] is not None:
        state.switches.replay_(content["switches"], state.model, state.ema)
        if state.switches.record.switched:  # parameter groups after the switches; settings and state are loaded below
            parameters, defaults = dict(state.model.named_parameters()), state.optimizer.defaults
            state.optimizer.param_groups[:] = [
                {**defaults, "params": [parameters[name] for name in names]} for names in content["groups"]
            ]
    if reason := mismatch(state.model, content["model"]):
        raise RecastError(f"{path} is the state of a different model ({reason}): {start_again}")
    state.model.load_state_dict(content["model"])
    if state.ema is not None:
        state.ema.module.load_state_dict(content["ema"])
    if state.loss is not None:
        state.loss.load_state_dict(content["loss"])
    state.optimizer.load_state_dict(content["optimizer"])
    state.scaler.load_state_dict(content["scaler"])
    if content.get("forms") is not None:
        state.forms = read(ChosenForms, content["forms"], str(path))
        choose_forms_(state.model, state.forms)
    state.position = read(Position, content["position"], str(path))
    return path


def _newest(candidates: list[Path], folder: RunFolder, start_again: str) -> tuple[dict[str, Any], Path]:
    """Return the content and path of the newest state that is whole."""
    for path in reversed(candidates):
        try:
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():  # torch writes a checksum of every tensor, and checks none
                    raise ValueError(f"wrong checksum of {damaged}")
            content = torch.load(path, map_location="cpu", weights_only=True)
            if not {"version", "recipe", "position", "model"} <= content.keys():
                raise ValueError("keys are missing")
            return content, path
        except Exception as error:  # a damaged file can break the reader in any way
            warnings.warn(f"{path} cannot be read ({first_line(error)}); skipping it", stacklevel=3)
    raise RecastError(f"{folder.states} holds no complete state of a run: {start_again}")
