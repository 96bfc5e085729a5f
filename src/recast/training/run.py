"""`train`: everything that `recast train` does, from a recipe to a run folder with both arms."""

from __future__ import annotations

import copy
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import recast
from recast.calibration import calibrate_
from recast.config import Recipe
from recast.data import Data, load_data, loader
from recast.data.loading import mix_seed, seeded
from recast.device import choose_device
from recast.errors import RecastError
from recast.io import save
from recast.models.build import build, constructor, input_defaults
from recast.planning import Plan, plan
from recast.recipe import changed_keys, load_recipe, save_recipe
from recast.shapes import in_eval
from recast.surgery import applied_plan, recast_
from recast.training.checkpoint import MAY_CHANGE, Interrupted, state_path
from recast.training.fit import fit
from recast.training.metrics import check_logits, normalise
from recast.training.optim import check_trainable
from recast.verification import Exactness, verify

VERIFIED = 500
"""How many validation images parent and child are compared on before training."""

PARENT = "parent"
"""The one thing that may be in a run folder before the run: a folder with the training of its parent."""


Say = Callable[[str], object]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    command: str = "",
    say: Say | None = None,
) -> Path:
    """Recast the parent of `recipe`, verify it, train it into the folder `out`, and the parent itself the same way.

    out/                recipe.yaml environment.json plan.json verify.json metrics.jsonl weights.safetensors resume/
    out/finetuned/      the control arm (`recipe.control`): metrics.jsonl weights.safetensors resume/
    out/parent.safetensors   only where nothing else holds the parent's weights: random ones, or a new head

    recipe.yaml is the recipe with what was left open filled in (classes, normalisation), so that it replays the run.
    With `resume` a run goes on where it stopped, with the recipe in its folder; what is finished is left alone.
    `command` is kept in environment.json; `say` is given the plan and how exact the recast is, as text.

    Raises RecastError for a folder in use, whatever is wrong with recipe, data or parent (before the folder is made),
    and what `fit` raises; Interrupted after Ctrl-C.
    """
    out = Path(out)
    recipe = _recipe_of_run(recipe, out) if resume else recipe
    if not resume:
        _refuse_used(out)
    data, parent, recipe, homeless = _prepare(recipe)
    example = torch.zeros(1, 3, data.img_size, data.img_size)
    planned = plan(parent, example, recipe.recast, where=_where(recipe.where), budget=recipe.budget)
    with torch.no_grad(), in_eval(parent):
        check_logits(parent(example), 1, len(data.classes), data.name)
    out.mkdir(parents=True, exist_ok=True)
    if not resume and homeless:
        recipe = _house_parent(parent, recipe, data, out)
    save_recipe(recipe, out / "recipe.yaml")  # also when a run goes on: where things lie may have changed
    try:
        with _recorded(out, recipe, command):
            child = _child(parent, planned, data, recipe, out, say or (lambda text: None))
            fit(child, data, recipe, out, resume=resume, progress=progress, name="recast")
            if recipe.control:
                fit(parent, data, recipe, out / "finetuned", resume=resume, progress=progress, name="finetuned")
    except KeyboardInterrupt:
        folder = f'"{out}"' if " " in str(out) else str(out)
        raise Interrupted(f"interrupted: state saved; continue with: recast train --resume {folder}") from None
    return out


def train_parent(
    recipe: Recipe, out: str | Path, *, resume: bool = False, progress: bool = True, command: str = ""
) -> Path:
    """Train the parent of `recipe` itself, nothing recast: from random weights unless the recipe names others.

    Returns the weights, out/weights.safetensors: the `model.checkpoint` of a later recipe. Raises as `train` does.
    """
    out = Path(out)
    recipe = _recipe_of_run(recipe, out) if resume else recipe
    if not resume:
        _refuse_used(out)
    data, parent, recipe, _ = _prepare(recipe)
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        save_recipe(recipe, out / "recipe.yaml")
    with _recorded(out, recipe, command):
        fit(parent, data, recipe, out, resume=resume, progress=progress, name=PARENT)
    return out / "weights.safetensors"


def _refuse_used(out: Path) -> None:
    if out.is_file():
        raise RecastError(f"{out} is a file: choose another folder with --out")
    used = sorted(path.name for path in out.iterdir() if path.name != PARENT) if out.is_dir() else []
    if "recipe.yaml" in used:
        raise RecastError(f"run folder {out} exists: choose another one with --out, or continue it with --resume {out}")
    if used:
        raise RecastError(f"{out} is not empty ({used[0]}): choose another folder with --out")


def _recipe_of_run(recipe: Recipe, out: Path) -> Recipe:
    """The recipe in the run folder with what MAY_CHANGE of `recipe`, which must agree with it otherwise."""
    if not (out / "recipe.yaml").is_file():
        raise RecastError(f"{out} holds no run to resume: it has no recipe.yaml")
    stored = load_recipe(out / "recipe.yaml")
    filled = ("model.num_classes", "model.pretrained", "data.mean", "data.std")
    if changed := changed_keys(stored, recipe, ignore=(*MAY_CHANGE, *filled)):
        raise RecastError(f"{out} was started with another {', '.join(changed)}: resume it with its own recipe.yaml")
    # what `recipe` leaves open is where it was: a run folder may house its own parent
    data = replace(stored.data, workers=recipe.data.workers, data_dir=recipe.data.data_dir or stored.data.data_dir)
    model = replace(stored.model, checkpoint=recipe.model.checkpoint or stored.model.checkpoint)
    return replace(stored, device=recipe.device, control=recipe.control, data=data, model=model)


def _prepare(recipe: Recipe) -> tuple[Data, nn.Module, Recipe, bool]:
    """Data, parent, the recipe with nothing left open, and whether the parent's weights are found nowhere else."""
    check_trainable(recipe)
    choose_device(recipe.device)
    data = load_data(recipe.data)
    if missing := [name for name, part in (("training", data.train), ("validation", data.val)) if len(part) == 0]:
        raise RecastError(f"{data.name} has no {missing[0]} images: training needs both parts")
    with seeded(mix_seed("parent", recipe.seed)):
        parent = build(recipe.model, num_classes=len(data.classes))
    defaults = input_defaults(parent)
    if defaults is not None and len(defaults.mean) == 3:  # pixels must come as the parent knows them
        data = replace(data, mean=recipe.data.mean or defaults.mean, std=recipe.data.std or defaults.std)
    config = recipe.model
    own_head = config.name.startswith("torchvision:") or _pretrained_classes(parent) == len(data.classes)
    homeless = config.checkpoint is None and not (config.pretrained and own_head)
    recipe = replace(
        recipe,
        model=replace(config, num_classes=config.num_classes or len(data.classes)),
        data=replace(recipe.data, mean=data.mean, std=data.std),
    )
    return data, parent, recipe, homeless


def _pretrained_classes(model: nn.Module) -> int | None:
    cfg = getattr(model, "pretrained_cfg", None)
    return cfg.get("num_classes") if isinstance(cfg, Mapping) else None


def _house_parent(parent: nn.Module, recipe: Recipe, data: Data, out: Path) -> Recipe:
    """Keep the parent in the run folder and let the recipe name that file."""
    path = out / "parent.safetensors"
    save(parent, path, constructor=constructor(recipe.model, num_classes=len(data.classes)))
    return replace(recipe, model=replace(recipe.model, checkpoint=str(path.resolve()), pretrained=False))


def _where(where: list[str]) -> str | list[str]:
    return where[0] if len(where) == 1 else where


def _child(parent: nn.Module, planned: Plan, data: Data, recipe: Recipe, out: Path, say: Say) -> nn.Module:
    """The recast model as training starts with it; where the run goes on, its shape alone (`fit` loads the weights)."""
    if state_path(out).exists() or (out / "weights.safetensors").exists():
        return recast_(copy.deepcopy(parent), Plan.from_json((out / "plan.json").read_text(encoding="utf-8")))
    device = choose_device(recipe.device)
    parent.to(device)
    with seeded(mix_seed("recast", recipe.seed)):
        child = recast_(copy.deepcopy(parent), planned)
    exactness = _verify(parent, child, data, recipe, device)
    _write_json(out / "verify.json", exactness.to_dict())
    say(f"{planned}\nagainst the parent on {exactness.images} validation images: {exactness}\n")
    if recipe.calibrate:
        calibrate_(child, parent, _calibration_batches(data, recipe, device))
    _write_text(out / "plan.json", applied_plan(child).to_json())
    return child


def _verify(parent: nn.Module, child: nn.Module, data: Data, recipe: Recipe, device: torch.device) -> Exactness:
    """Parent and child on the first VERIFIED validation images, in the order of the recipe's seed."""
    total: Exactness | None = None
    for images, _ in loader(data.val, min(recipe.data.batch_size, 128), shuffle_seed=recipe.seed):
        found = verify(parent, child, normalise(images.to(device), data))
        total = found if total is None else total + found
        if total.images >= VERIFIED:
            break
    assert total is not None  # `_prepare` has seen images
    return total


def _calibration_batches(data: Data, recipe: Recipe, device: torch.device) -> list[Tensor]:
    """`recipe.calibrate` training images without augmentation, normalised, in batches."""
    batches, missing = [], recipe.calibrate
    for images, _ in loader(data.train.plain(), recipe.data.batch_size, shuffle_seed=recipe.seed):
        batches.append(normalise(images[:missing].to(device), data))
        missing -= len(batches[-1])
        if missing <= 0:
            break
    return batches


@contextmanager
def _recorded(out: Path, recipe: Recipe, command: str) -> Iterator[None]:
    """environment.json while and after the block runs; a resumed run adds its seconds to those before."""
    path, started, device = out / "environment.json", time.time(), choose_device(recipe.device)
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    environment = {
        "recast": recast.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type,
        "cpu_count": os.cpu_count(),
        "date": before.get("date") or datetime.now(UTC).isoformat(timespec="seconds"),
        "command": before.get("command") or command,
        "seconds": before.get("seconds", 0.0),
    }
    _write_json(path, environment)
    try:
        yield
    finally:
        environment["seconds"] = round(environment["seconds"] + time.time() - started, 1)
        _write_json(path, environment)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=1) + "\n")


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
