"""The state of a training run on disk, so that it can go on where it stopped: bit for bit on the CPU,
and as far as its kernels are deterministic on an accelerator.

`resume/` holds the newest states, one file each: `state-EPOCH-STEP.pt`, tensors, numbers and text only, read with
torch's `weights_only` reader: no pickled object. Writes are atomic: there is always a whole state. Order, augmentation,
mixing and dropout are drawn from (seed, epoch, step): the position is the whole state of chance, on any number of
processes.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from recast.config import read
from recast.errors import RecastError, first_line, listed
from recast.files import free_space, replaced, row_digest
from recast.lab.config import Recipe
from recast.lab.recipe import changes, may_change, recipe_from_dict, recipe_to_dict
from recast.lab.tasks import StatefulLoss
from recast.lab.training.switches import Switches
from recast.models.weights import first_nonfinite, mismatch

VERSION = 4
OLDER = 3
"""States whose recipe has another form; they are read without comparing it."""
KEPT = 2
"""How many of the newest states stay on disk."""


@dataclass
class Position:
    """Where a run is: `step` batches of `epoch` are done (epoch 0: nothing is measured yet)."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    """Sum of the training loss over the batches of this epoch so far."""
    bad_images: list[str] = field(default_factory=list)
    """Images that this process could not read in this epoch; others took their places."""
    seconds: float = 0.0
    """Spent on this epoch so far, interruptions left out."""
    waited: float = 0.0
    """Seconds of them that were spent waiting for data."""

    @property
    def wait(self) -> float:
        """Share of the epoch's time so far that was spent waiting for data."""
        return self.waited / self.seconds if self.seconds else 0.0


@dataclass
class State:
    """Everything that training changes."""

    model: nn.Module
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    ema: ModelEmaV3 | None
    loss: StatefulLoss | None = None
    """The loss, where it keeps something from step to step."""
    switches: Switches | None = None
    """Which layers a schedule has recast so far; None without one."""
    position: Position = field(default_factory=Position)
    rows: dict[int, str] = field(default_factory=dict)
    """Epoch → `row_digest` of its row in metrics.jsonl: no two runs have the same, as clocks are in it."""

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are measured and kept: the average where there is one, the loss's too."""
        if self.ema is not None:
            return self.ema.module
        return self.model if self.loss is None or self.loss.evaluated is None else self.loss.evaluated


def states(folder: Path) -> list[Path]:
    """The states of the run in `folder`, oldest first. RecastError where something else has their folder's name."""
    kept = folder / "resume"
    if (kept.exists() or kept.is_symlink()) and not kept.is_dir():
        raise RecastError(f"{kept} is where states are saved, and it is no folder: move it away")
    return sorted(kept.glob("state-*.pt"))


def newest_state(folder: Path) -> str:
    """What to say of the state that is left: the file, or that there is none."""
    found = states(folder)
    return f"the newest state is {found[-1]}" if found else "there is no state yet"


def save_state(state: State, recipe: Recipe, folder: Path, images: int) -> None:
    """Add this state to those on disk, then drop the oldest above `KEPT`.

    `images` is the size of the training set, which a resumed run must have too. Raises RecastError for weights that are
    not finite, and when the disk refuses (full, no permission): the states before it are as they were.
    """
    position = state.position
    for module in dict.fromkeys((state.model, state.evaluated)):
        if bad := first_nonfinite(module, module.state_dict()):
            raise RecastError(
                f"{bad} is not finite after epoch {position.epoch}, step {position.step}: lower optim.lr or "
                f"optim.gate_lr, or set optim.clip_grad; {newest_state(folder)}"
            )
    path = folder / "resume" / _name(position.epoch, position.step)
    names = {id(p): name for name, p in state.model.named_parameters()}
    content = {
        "version": VERSION,
        "recipe": recipe_to_dict(recipe),
        "position": asdict(position),
        "images": images,
        "rows": state.rows,
        "kept": _kept(folder),
        "model": state.model.state_dict(),
        "ema": None if state.ema is None else state.ema.module.state_dict(),
        "loss": None if state.loss is None else state.loss.state_dict(),
        "optimizer": (optimizer := state.optimizer.state_dict()),
        "moments": _moments(optimizer),
        "groups": [[names[id(p)] for p in group["params"]] for group in state.optimizer.param_groups],
        "switches": None if state.switches is None else state.switches.record.to_dict(),
        "scaler": state.scaler.state_dict(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            torch.save(content, temporary)
    except (OSError, RuntimeError) as error:  # torch's writer tells of a full disk in a RuntimeError
        reason = getattr(error, "strerror", None) or "torch could not write it all"
        raise RecastError(
            f"cannot save the state in {path.parent} ({reason}; its disk has {free_space(folder)} left); "
            f"{newest_state(folder)}"
        ) from None
    found = states(folder)
    own = found.index(path) + 1
    for old in (*found[: max(0, own - KEPT)], *found[own:]):  # later ones are of a future given up
        if not old.is_dir():
            old.unlink(missing_ok=True)


def _name(epoch: int, step: int) -> str:
    return f"state-{epoch:05d}-{step:08d}.pt"


def _moments(optimizer: Mapping[str, Any]) -> dict[int, dict[str, list[int]]]:
    """Parameter → names and shapes of what the optimizer remembers of it."""
    return {
        index: {name: list(getattr(value, "shape", ())) for name, value in of.items()}
        for index, of in optimizer["state"].items()
    }


def _kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("epoch-*.safetensors"))


def restore_(
    state: State, recipe: Recipe, folder: Path, images: int, rows: Iterable[Mapping[str, Any]] = (),
    path: Path | None = None,
) -> Path:  # fmt: skip
    """Load the newest whole state on disk into `state` (or `path`, where it was chosen before); returns its path.

    One that is damaged, or that belongs to another run than `rows` of metrics.jsonl, is skipped with a warning; files
    missing since then are listed. Raises RecastError if no state is left, or if it belongs to another recipe (every
    difference is listed), model or number of training images.
    """
    start_again = f"delete {folder / 'resume'} to train again from the start"
    known = {row["epoch"]: row_digest(row) for row in rows}
    content, chosen = _newest_whole(states(folder) if path is None else [path], known, folder, start_again)
    try:
        _fill_(state, content, recipe, folder, images, chosen, start_again)
    except RecastError:
        raise
    except Exception as error:  # what is in a state may be anything
        raise RecastError(f"{chosen} is no state of this run ({first_line(error)}): {start_again}") from None
    if path is None:
        gone = [f"epoch {epoch} of metrics.jsonl" for epoch in state.rows if epoch not in known]
        gone += [f"checkpoints/{name}" for name in content["kept"] if name not in _kept(folder)]
        if gone:
            warnings.warn(f"{folder} has lost {listed(gone, 5)}: it goes on without", stacklevel=2)
    return chosen


def _fill_(
    state: State, content: dict[str, Any], recipe: Recipe, folder: Path, images: int, path: Path, start_again: str
) -> None:
    if content["version"] == OLDER:
        warnings.warn(f"{path} is of an older version of recast: its recipe is not compared", stacklevel=2)
    elif changed := changes(recipe_from_dict(content["recipe"], str(path)), recipe, ignore=may_change()):
        raise RecastError(f"{folder} was trained with another {', '.join(changed)}: resume it with its own recipe")
    if content["images"] != images:
        raise RecastError(f"{folder} was trained on {content['images']} images, now there are {images}: {start_again}")
    if state.switches is not None and content["switches"] is not None:
        state.switches.replay_(content["switches"], state.model, state.ema)
        if state.switches.record.switched:  # the groups that this left; their settings and state are loaded below
            parameters, defaults = dict(state.model.named_parameters()), state.optimizer.defaults
            state.optimizer.param_groups[:] = [
                {**defaults, "params": [parameters[name] for name in names]} for names in content["groups"]
            ]
    if reason := mismatch(state.model, content["model"]):
        raise RecastError(f"{path} is the state of another model ({reason}): {start_again}")
    state.model.load_state_dict(content["model"])
    if state.ema is not None:
        state.ema.module.load_state_dict(content["ema"])
    if state.loss is not None:
        state.loss.load_state_dict(content["loss"])
    state.optimizer.load_state_dict(content["optimizer"])
    state.scaler.load_state_dict(content["scaler"])
    state.position = read(Position, content["position"], str(path))
    state.rows = dict(content.get("rows", {}))


def _check_whole(content: Mapping[str, Any], path: Path) -> None:
    """Raise ValueError for a position that is not the file's, or after the run's end, and for lost moments."""
    epoch, step = content["position"]["epoch"], content["position"]["step"]
    if path.name != _name(epoch, step) or epoch > content["recipe"]["epochs"] + 1:
        raise ValueError(f"its position is epoch {epoch}, step {step}")
    if content.get("moments", moments := _moments(content["optimizer"])) != moments:
        raise ValueError("the optimizer's moments are incomplete")


def _newest_whole(
    candidates: list[Path], known: Mapping[int, str], folder: Path, start_again: str
) -> tuple[dict[str, Any], Path]:
    for path in reversed(candidates):
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is a pipe, a device or a folder")
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():  # torch writes a checksum of every tensor, and looks at none
                    raise ValueError(f"the checksum of {damaged} is of something else")
            content = torch.load(path, map_location="cpu", weights_only=True)
            version, rows = content["version"], content.get("rows", {})
            others = sum(rows.get(epoch, digest) != digest for epoch, digest in known.items())
            content["kept"] = list(map(str, content.get("kept", ())))
            if version in (OLDER, VERSION):
                _check_whole(content, path)
        except PermissionError as error:
            raise RecastError(f"cannot read {path}: {error.strerror}. Its owner can allow it (chmod u+r)") from None
        except Exception as error:  # a damaged file can break the reader in any way
            reason = f"{path} is truncated or damaged, or no state of a run ({first_line(error)})"
            warnings.warn(f"{reason}; skipping it", stacklevel=2)
            continue
        if version not in (OLDER, VERSION):
            raise RecastError(f"{path} has version {version}, expected {VERSION}: {start_again}")
        if others:
            warnings.warn(f"{path} belongs to another run than metrics.jsonl; skipping it", stacklevel=2)
            continue
        return content, path
    if candidates and not candidates[-1].exists():
        raise RecastError(f"{candidates[-1]} is not seen from here: all machines must share the run folder's storage")
    raise RecastError(f"{folder / 'resume'} holds no whole state of a run: {start_again}")
