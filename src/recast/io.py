"""Saving and loading: one safetensors file that holds the weights, how to build the parent, and the plan.

Loading a recast model = build the parent, replay the plan, load the weights. No pickle is written or read.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.cmhsa import RecastLayer
from recast.models.build import build_from, check_constructor, replayed
from recast.models.sources import check_registered, reaching
from recast.models.weights import CHECKSUM, HEADER, load_weights_, read_header, read_safetensors
from recast.run.fields import typed
from recast.run.files import free_space, replaced
from recast.surgery.apply import refresh_gates_
from recast.surgery.folding.forms import as_it_is, is_as_told, last_of, modules_by_name
from recast.surgery.plan import plan_of
from recast.surgery.proof import checksum, proof_of
from recast.surgery.wrappers import unwrapped
from recast.tracing.examples import check_weights

HUB, HUB_FILE = "hf-hub:", "model.safetensors"
"""What the name of a repository on the Hugging Face Hub begins with, and the file that it holds."""


def local_file(path: str | Path) -> Path:
    """Where a file lies; of hf-hub:user/name[@revision], its copy in the Hub's cache, fetched where it is not there."""
    if not str(path).startswith(HUB):
        return Path(path)
    from huggingface_hub import hf_hub_download

    repo, _, revision = str(path).removeprefix(HUB).partition("@")
    with reaching(f"could not fetch {path}", "look at the name; a private one needs hf auth login"):
        return Path(hf_hub_download(repo, HUB_FILE, revision=revision or None))


@typed("model", "path")
def save(model: nn.Module, path: str | Path, constructor: str | dict[str, Any] | None = None) -> Path:
    """Write a model (recast or plain) to one `.safetensors` file, with its plan and constructor; returns its path.

    The file of a recast model also holds what `check` looks at: its parent's fingerprint, the latest comparison by
    `verify` that held, what `fold_` did, and what `export` found.

    `constructor` says how to build the parent: a name (timm:NAME or NAME, torchvision:NAME, upernet:NAME and the like,
    pkg.module:function), or {"name": …, "kwargs": {"num_classes": …}}; without it, `load` needs the parent. Raises
    `RecastError` for another suffix, and for a constructor that `load` would not understand, or whose network there is
    not. Written to a temporary name first: a file that is there is replaced only by a whole one.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise RecastError(f"weights are saved as .safetensors, got {path.name}")
    if constructor is not None:
        constructor = {"name": constructor} if isinstance(constructor, str) else constructor
        check_registered(*check_constructor(constructor)[:2])
    model = unwrapped(model)  # a wrapper has names of its own
    check_weights(model)
    plan = plan_of(model)
    layers = modules_by_name(model)
    inner = [name for name, module in layers.items() if plan is None and plan_of(module) is not None]
    if inner and constructor is not None:
        raise RecastError(
            f"{inner[0]} of {type(model).__name__} was recast, and no constructor makes that: save the network that "
            "recast_ changed, or leave the constructor out and load into a parent that was recast alike"
        )
    header: dict[str, Any] = {"constructor": constructor, "plan": None}
    if plan is not None:
        for step in plan.steps:
            layer = layers.get(step.name)
            if layer is None or not isinstance(last_of(layer), RecastLayer | nn.Conv2d | nn.ConvTranspose2d):
                raise RecastError(
                    f"{step.name} was recast and is not a recast layer or a convolution any more: the plan is another "
                    "network's"
                )
        steps, proof = [as_it_is(layers[step.name], step) for step in plan.steps], proof_of(model)
        told = [one for one in proof.folded or () if is_as_told(one, layers[one.name])]
        header["plan"] = replace(plan, steps=tuple(steps)).to_json()
        header["proof"] = replace(proof, folded=proof.folded and told).to_dict()
    tensors: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu().contiguous()
        # safetensors refuses two names for one memory
        tensors[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
        storages.add(tensor.untyped_storage().data_ptr())
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", HEADER: json.dumps(header)}
    metadata[CHECKSUM] = checksum(metadata[HEADER], tensors)
    with replaced(path) as temporary:
        try:
            save_file(tensors, temporary, metadata=metadata)
        except SafetensorError as error:  # of a full disk too
            raise RecastError(f"cannot write {path}: {error}; its disk has {free_space(path.parent)} left") from None
    return path


@typed("path", "parent", "trust")
def load(path: str | Path, parent: nn.Module | None = None, *, trust: bool = False) -> nn.Module:
    """The saved model, in eval mode. `parent` replaces the saved constructor; it is copied, never changed.

    `path` may be hf-hub:user/name, or hf-hub:user/name@revision, that `push_to_hub` wrote. A file may name a
    `pkg.mod:function` as its constructor: it is called only with `trust`.

    Raises `RecastError` before any weight is loaded if the file is truncated or foreign, if it names no constructor and
    no `parent` is given, or if its tensors are not the model's.
    """
    path = local_file(path)
    header = read_header(path)
    if parent is None:
        if header["constructor"] is None:
            raise RecastError(f"{path} does not say how to build its parent: pass load(path, parent=model)")
        model = build_from(header["constructor"], trust=trust)
    else:
        # torch cannot copy what a hook computed (the older weight_norm): cut it off its graph
        computed = (v for m in parent.modules() for v in vars(m).values() if isinstance(v, Tensor) and not v.is_leaf)
        model = copy.deepcopy(parent, {id(tensor): tensor.detach().clone() for tensor in computed})
    model = replayed(model, header, path)
    load_weights_(model, read_safetensors(path), path)
    return refresh_gates_(model.eval())
