"""Weights from files that may be foreign: read as tensors only, matched to the network, checked in full, then loaded.

A pickle may run any code when it is read, so `.pth` files are read with torch's `weights_only` reader, which knows
tensors and plain containers and refuses everything else.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import pickle
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recast.errors import RecastError, listed, shown
from recast.files import require
from recast.json_text import parse_json
from recast.models.checksum import checksum
from recast.models.foreign import foreign
from recast.names import plain_name
from recast.reading import check_archive
from recast.tracing.examples import check_weights

PICKLED = (".pth", ".pt", ".bin", ".tar", ".ckpt")
DEEPEST = 8
"""Levels of mappings and lists in which weights are looked for."""
AVERAGED = re.compile(r"(^|[._])ema([._]|$)")
"""In the name of a moving average, which timm prefers to the weights themselves."""
OTHER = 3
"""Rank of a set of weights that is neither an average nor under `state_dict` or `model`."""
PLAIN: list[Any] = [
    argparse.Namespace, np.dtype, np.ndarray,
    *(kind for kind in vars(np.dtypes).values() if isinstance(kind, type)),
    *((value.__reduce__()[0], f"numpy.{core}.multiarray.{name}")
      for value, name in ((np.int64(), "scalar"), (np.empty(0), "_reconstruct")) for core in ("core", "_core")),
    *((getattr(pathlib, f"Pure{name}"), f"{module}.{pure}{name}") for name in ("PosixPath", "WindowsPath")
      for pure in ("", "Pure") for module in ("pathlib", "pathlib._local")),
]  # fmt: skip
"""Data that training scripts save beside the weights, and that runs no code: arguments, NumPy's numbers, paths."""
HEADER, CHECKSUM = "recast", "recast_checksum"
"""In the metadata of a file of `recast.save`: how to build the model, and the `checksum` of that and of the tensors."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read every tensor of a `.safetensors` file or a file of `torch.save`, on the CPU, by its dotted name.

    Raises RecastError for a file that is missing, truncated or of another kind, or that holds code.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise RecastError(f"checkpoint {path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    content = read_safetensors(path) if path.suffix.lower() == ".safetensors" else _read_pickled(path)
    if not isinstance(content, Mapping | list | tuple):
        raise RecastError(f"checkpoint {path} must hold a mapping of names to tensors, got {type(content).__name__}")
    if not (tensors := dict(_tensors(content))):
        raise RecastError(f"checkpoint {path} holds no weights")
    return tensors


def _tensors(content: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in mappings and lists with their dotted names, without the parts of torch.compile and FSDP.

    NumPy arrays with a name of their own are tensors too; those in lists are a run's notes.
    """
    if isinstance(content, Tensor):
        yield plain_name(name), content
    elif isinstance(content, np.ndarray):
        with suppress(TypeError):  # text, dates, objects
            yield plain_name(name), torch.from_numpy(content.astype(content.dtype.newbyteorder("=")))
    elif isinstance(content, Mapping | list | tuple) and depth < DEEPEST:
        items = content.items() if isinstance(content, Mapping) else enumerate(content)
        for key, value in items:
            if isinstance(value, np.ndarray) and not isinstance(content, Mapping):
                continue
            yield from _tensors(value, f"{name}.{key}" if name else str(key), depth + 1)


def select_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], source: str | Path, key: str | None = None
) -> dict[str, Tensor]:
    """Select the weights of `model` from the `tensors` of a checkpoint, under the model's names.

    They are those below the prefix (`state_dict.`, `model.module.`) that fits most names of the model. Of several sets
    that fit as well, a moving average is taken, then `state_dict` and `model`, as timm does; `key` takes another. A
    warning names the set that was taken and what was left out. Where less than half of the network fits, and of the
    file, the weights are another network's: that a block or two have the names of the whole does not make them sets.
    Raises RecastError if nothing lies below `key`, and for several sets with no rule to choose.
    """
    if key is not None:
        inside = {name: value for name, value in tensors.items() if name.startswith(f"{key}.")}
        if not inside:
            keys = listed(list(dict.fromkeys(name.partition(".")[0] for name in tensors)), 5)
            raise RecastError(f"{source} has no weights under {key!r}, only {keys}: choose with checkpoint_key=NAME")
        tensors = inside
    names = {name for name in model.state_dict() if not name.endswith(".num_batches_tracked")}
    fits = Counter(start for name in tensors for start in _prefixes(name) if name.removeprefix(start) in names)
    most = max(fits.values(), default=0)
    is_whole = 2 * most >= min(len(names), len(tensors))
    sets = sorted((prefix for prefix, count in fits.items() if is_whole and count == most), key=_rank)
    if len(sets) > 1 and _rank(sets[0]) == _rank(sets[1]):
        raise RecastError(f"{source} holds several sets of weights, {_listed(sets)}: choose with checkpoint_key=NAME")
    prefix = sets[0] if sets else _container(list(tensors))  # foreign names, which a converter may know
    if sets[1:]:
        warnings.warn(
            f"{source} holds several sets of weights: {_listed(sets[:1])} is loaded, checkpoint_key=NAME takes another "
            f"({_listed(sets[1:])})",
            stacklevel=3,
        )
    elif others := [name for name in tensors if not name.startswith(prefix)]:
        warnings.warn(f"{source}: left out {listed(others, 3)}, beside {_listed([prefix])}", stacklevel=3)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _prefixes(name: str) -> list[str]:
    """Return the prefixes of a name: "", `a.` and `a.b.` for `a.b.weight`."""
    return [name[: dot.end()] for dot in re.finditer(r"^|\.", name)]


def _container(names: list[str]) -> str:
    """Return the prefix of names that the network does not know, of the container that `_rank` prefers."""
    top = min((name[: name.index(".") + 1] for name in names if "." in name), key=_rank, default="")
    if _rank(top) < OTHER:
        names = [name for name in names if name.startswith(top)]
    return next(start for start in _prefixes(names[0])[::-1] if all(name.startswith(start) for name in names))


def _rank(prefix: str) -> int:
    """Return the rank of a set of weights in timm's order of preference."""
    if AVERAGED.search(prefix):
        return 0
    return next((place for place, key in enumerate(("state_dict.", "model."), 1) if prefix.startswith(key)), OTHER)


def _listed(prefixes: list[str]) -> str:
    return listed([prefix.rstrip(".") or "the top level" for prefix in prefixes], 5)


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file.

    Raises RecastError for a truncated file, and if its checksum (of `recast.save`) does not match.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # `file` is no mapping
    except (SafetensorError, OSError, ValueError) as error:
        reason = foreign(path) or f"is truncated or not a safetensors file ({error})"
        raise RecastError(f"checkpoint {path} {reason}") from None
    if CHECKSUM in metadata and metadata[CHECKSUM] != checksum(metadata.get(HEADER), tensors):
        raise RecastError(f"checkpoint {path} is damaged: its checksum does not match; use a copy of the file")
    return tensors


def read_header(path: str | Path) -> dict[str, Any]:
    """Read `{"constructor": …, "plan": …, "images": …, "forms": …}` from a saved file.

    Raises `RecastError` if it is missing, truncated or foreign.
    """
    path = Path(path)
    if not os.path.isfile(path):  # Path.is_file raises for names that are too long
        raise RecastError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(HEADER)
    except (SafetensorError, OSError, ValueError) as error:
        reason = foreign(path) or f"is no readable .safetensors file (truncated, or another format): {error}"
        raise RecastError(f"{path} {reason}") from None
    if text is None:
        raise RecastError(f"{path} was not written by recast.save: it carries no constructor and no plan")
    try:
        header = require("its header", parse_json(text, "its header"))
    except RecastError as error:
        raise RecastError(f"{path} carries a damaged header ({error})") from None
    constructor, plan = header.get("constructor"), header.get("plan")
    if not isinstance(plan, str | None):
        raise RecastError(f"{path} carries a damaged header (its plan must be text, got {shown(plan)})")
    return {
        "constructor": constructor,
        "plan": plan,
        "images": header.get("images"),
        "forms": header.get("forms") or {},
    }


def _read_pickled(path: Path) -> Any:
    if not path.stat().st_size:  # what /proc holds too, some of which waits
        raise RecastError(f"checkpoint {path} is truncated or not a file of torch.save (it is empty)")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                check_archive(archive)
        with warnings.catch_warnings(), torch.serialization.safe_globals(PLAIN):
            warnings.simplefilter("ignore")  # what torch warns of, a raw pickle, is refused below in words of our own
            return torch.load(path, map_location="cpu", weights_only=True)
    except RecastError as error:
        raise RecastError(f"cannot read checkpoint {path}: {error}") from None
    except Exception as error:  # a foreign file can break the reader in any way; nothing of it has been run
        is_pickle = zipfile.is_zipfile(path) or path.read_bytes()[:1] == pickle.PROTO
        if not (reason := foreign(path)) and isinstance(error, pickle.UnpicklingError) and is_pickle:
            reason = "holds code, which is not run: save the weights alone, torch.save(model.state_dict(), FILE)"
        reason = reason or f"is truncated or not a file of torch.save ({type(error).__name__})"
        raise RecastError(f"checkpoint {path} {reason}") from None


def load_weights_(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Load `weights` strictly into `model`. Every check comes first: on an error the model is as it was.

    `source` names the weights in messages. Dtypes follow the model (fp16 files load into an fp32 model).
    A BatchNorm's missing `num_batches_tracked` (files from before torch 0.4.1) is no error.
    """
    check_weights(model)
    if message := mismatch(model, weights):
        raise RecastError(f"{source} does not fit {type(model).__name__}: {message}")
    if name := first_nonfinite(model, weights):
        raise RecastError(f"{source} holds NaN or infinity in {name}: these weights cannot be used")
    check_writable(model)
    names = {plain_name(name): name for name in model.state_dict()}  # parts may be compiled or checkpointed
    model.load_state_dict({names.get(name, name): value for name, value in weights.items()}, strict=True)


def check_writable(model: nn.Module) -> None:
    """Raise `RecastError` for tensors into which torch copies nothing: it finds them after it has loaded the rest."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        if any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)):
            raise RecastError(f"{name} is an expanded tensor, which cannot be loaded: register its clone()")
        if value.is_inference():
            raise RecastError(f"{name} was made in torch.inference_mode, and cannot change: build the model outside it")


def mismatch(model: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """Return the reason why `weights` do not load strictly into `model`, in one line; empty if they do."""
    state = {plain_name(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    both = [name for name in state if name in weights]
    missing = [name for name in state if name not in weights and not name.endswith(".num_batches_tracked")]
    unexpected = [name for name in weights if name not in state]
    shapes = [name for name in both if state[name].shape != weights[name].shape]
    kinds = [name for name in both if state[name].is_floating_point() > weights[name].is_floating_point()]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": shapes, "not floating point": kinds}
    parts = [
        f"{len(names)} {problem} (first: {names[0]}{_shapes(state, weights, names[0]) if names is shapes else ''})"
        for problem, names in problems.items()
        if names
    ]
    if missing or unexpected:
        parts.append("build the network that these weights were saved from")
    if any(name.rpartition(".")[2] == "pos_embed" for name in shapes):
        parts.append("its positions are of another image size: set model.input_size to resample them")
    return ", ".join(parts)


def _shapes(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], name: str) -> str:
    return f" is {tuple(weights[name].shape)}, the model's is {tuple(state[name].shape)}"


def first_nonfinite(model: nn.Module, weights: Mapping[str, Tensor]) -> str | None:
    """Return the first parameter or running statistic with NaN or infinity. Other buffers (masks) may hold -inf."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    for name in names:
        value = weights.get(name)
        if value is not None and value.is_floating_point() and not value.float().isfinite().all():
            return name
    return None
