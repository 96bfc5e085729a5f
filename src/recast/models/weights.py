"""Weights from files that may be foreign: read as tensors only, checked in full, then loaded.

A pickle may run any code when it is read, so `.pth` files are read with torch's `weights_only` reader, which knows
tensors and plain containers and refuses everything else.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recast.errors import RecastError, shown
from recast.run.files import require
from recast.run.reading import parse_json
from recast.surgery.proof import checksum

PICKLED = (".pth", ".pt", ".bin", ".tar")
WRAPPERS = ("state_dict", "model", "model_state_dict", "net")  # where training scripts keep the weights
PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and torch.compile
HEADER, CHECKSUM = "recast", "recast_checksum"
"""In the metadata of a file of `recast.save`: how to build the model, and the `checksum` of that and of the tensors."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Name → tensor of a `.safetensors` or `.pth/.pt/.bin` file, on the CPU; wrappers and prefixes taken off.

    Raises RecastError for a file that is absent, truncated, of another kind, or that holds code.
    """
    path = Path(path)
    if not path.is_file():
        raise RecastError(
            f"checkpoint {path} does not exist" if not path.exists() else f"checkpoint {path} is not a file"
        )
    if path.suffix == ".safetensors":
        content: Any = read_safetensors(path)
    elif path.suffix in PICKLED:
        content = _read_pickled(path)
    else:
        raise RecastError(
            f"checkpoint {path} must end in .safetensors, {', '.join(PICKLED)}, got {path.suffix or 'no suffix'}"
        )
    return _checked(unwrapped(content), path)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` file. Raises RecastError for a truncated one, and where they are not those that
    its checksum is of (files of `recast.save` carry one)."""
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # `file` is no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise RecastError(f"checkpoint {path} is truncated or not a safetensors file ({error})") from None
    if CHECKSUM in told and told[CHECKSUM] != checksum(told.get(HEADER), tensors):
        raise RecastError(f"checkpoint {path} is damaged: its checksum is of other content. Use a copy or make it anew")
    return tensors


def read_header(path: str | Path) -> dict[str, Any]:
    """`{"constructor": …, "plan": …, "proof": …}` of a saved file.

    Raises `RecastError` if it is missing, truncated or foreign.
    """
    path = Path(path)
    if not path.is_file():
        raise RecastError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(HEADER)
    except (SafetensorError, OSError, ValueError) as error:
        raise RecastError(f"{path} is no readable .safetensors file (truncated, or another format): {error}") from None
    if text is None:
        raise RecastError(f"{path} was not written by recast.save: it carries no constructor and no plan")
    try:
        header = require("its header", parse_json(text, "its header"))
    except RecastError as error:
        raise RecastError(f"{path} carries a damaged header ({error})") from None
    constructor, plan = header.get("constructor"), header.get("plan")
    if not isinstance(plan, str | None):
        raise RecastError(f"{path} carries a damaged header (its plan must be text, got {shown(plan)})")
    return {"constructor": constructor, "plan": plan, "proof": header.get("proof") or {}}


def _read_pickled(path: Path) -> Any:
    if not path.stat().st_size:  # what /proc holds too, some of which waits
        raise RecastError(f"checkpoint {path} is truncated or not a file of torch.save (it is empty)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of, a raw pickle, is refused below in words of our own
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a foreign file can break the reader in any way; nothing of it has been run
        members, named = [], []
        with suppress(Exception):  # what calls itself an archive need not be one
            members = zipfile.ZipFile(path).namelist()
            named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if any(name.endswith("/constants.pkl") for name in members):
            reason = "is a TorchScript program, not weights: save its state_dict alone"
        elif isinstance(error, pickle.UnpicklingError) and (members or path.read_bytes()[:1] == pickle.PROTO):
            reason = (
                f"needs {[*named, 'code'][0]} to be run while it is read, which is refused: "
                "save its state_dict alone (torch.save(model.state_dict(), ...) or safetensors)"
            )
        else:
            reason = f"is truncated or not a file of torch.save ({type(error).__name__})"
        raise RecastError(f"checkpoint {path} {reason}") from None


def unwrapped(content: Any) -> Any:
    """What lies below the wrappers of training scripts, without the prefixes of DataParallel and torch.compile."""
    while isinstance(content, Mapping) and content:
        below = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        prefix = next((p for p in PREFIXES if all(str(name).startswith(p) for name in content)), None)
        if below is not None:
            content = below
        elif prefix is not None:
            content = {name.removeprefix(prefix): value for name, value in content.items()}
        else:
            break
    return content


def _checked(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise RecastError(f"checkpoint {path} must hold a mapping of names to tensors, got {type(content).__name__}")
    if not content:
        raise RecastError(f"checkpoint {path} holds no weights")
    for name, value in content.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise RecastError(
                f"checkpoint {path} must hold a mapping of names to tensors (or one below {', '.join(WRAPPERS)}), "
                f"but {name!r} is {type(value).__name__}"
            )
    return dict(content)


def load_weights_(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Load `weights` strictly into `model`. Every check comes first: on an error the model is as it was.

    `source` names the weights in messages. Dtypes follow the model (fp16 files load into an fp32 model).
    A BatchNorm's missing `num_batches_tracked` (files from before torch 0.4.1) is no error.
    """
    if message := mismatch(model, weights):
        raise RecastError(f"{source} does not fit {type(model).__name__}: {message}")
    if name := first_nonfinite(model, weights):
        raise RecastError(f"{source} holds NaN or infinity in {name}: these weights cannot be used")
    model.load_state_dict(dict(weights), strict=True)


def mismatch(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """What keeps `weights` from loading strictly into `model`, in one line; empty if nothing does."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    both = [name for name in own if name in weights]
    missing = [name for name in own if name not in weights and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in weights if name not in own]
    shapes = [name for name in both if own[name].shape != weights[name].shape]
    kinds = [name for name in both if own[name].is_floating_point() > weights[name].is_floating_point()]
    parts = [
        f"{len(names)} {what} (first: {names[0]}{detail(names[0])})"
        for names, what, detail in (
            (missing, "missing", lambda name: ""),
            (unexpected, "unexpected", lambda name: ""),
            (
                shapes,
                "of another shape",
                lambda name: f" is {tuple(weights[name].shape)}, the model's is {tuple(own[name].shape)}",
            ),
            (kinds, "not floating point", lambda name: f" is {weights[name].dtype}"),
        )
        if names
    ]
    if shapes and not (missing or unexpected or kinds) and (classes := _head_classes(shapes, own, weights)):
        parts.append(f"the file has {classes} classes: pass num_classes={classes}")
    if any(name.rpartition(".")[2] == "pos_embed" for name in shapes):
        parts.append("its positions are of another image size: set model.input_size to resample them")
    return ", ".join(parts)


def _head_classes(shapes: list[str], own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> int | None:
    """Number of classes of the file if only the rows of one layer differ, else None."""
    layers = {name.rpartition(".")[0] for name in shapes}
    rows = {len(weights[name]) for name in shapes if weights[name].ndim}
    same_rest = all(own[name].shape[1:] == weights[name].shape[1:] for name in shapes)
    return rows.pop() if len(layers) == 1 and len(rows) == 1 and same_rest else None


def first_nonfinite(model: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Name of the first parameter or running statistic with NaN or infinity. Other buffers (masks) may hold -inf."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    for name in names:
        value = weights.get(name)
        if value is not None and value.is_floating_point() and not value.float().isfinite().all():
            return name
    return None
