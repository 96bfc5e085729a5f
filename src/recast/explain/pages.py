"""`explain_model` and `explain_run`: pages of a network by its name, and of a run folder's arms over their epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from recast.data.seeding import seeded
from recast.device import choose_device
from recast.errors import RecastError
from recast.evaluation.run_folder import Run, open_run
from recast.explain.inputs import (
    Input,
    find_inputs,
    imagenet_names,
    page_stem,
    read_class_names,
    read_files,
    read_image,
    read_inputs,
)
from recast.explain.make import ARMS, IMAGENET, SIDE, Inputs, inputs_of, make_scene
from recast.explain.open import SAVED, open_model, weights_of
from recast.explain.write import Explained, check_target, safe_stem, write_pages
from recast.io import load
from recast.models.adapt import classifiers
from recast.run.config import ModelConfig, Recipe

SEED = 0
"""Of random weights: the same command draws the same picture."""
MAX_STATES = 12
"""Epochs on the slider; of more that were kept, as many at equal distances."""


def explain_model(
    config: ModelConfig,
    images: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    classes: str | Path | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    crop_pct: float | None = None,
    size: tuple[int, int] | None = None,
    num_images: int = 16,
    layer: str | None = None,
    device: str = "cpu",
) -> Explained:
    """Write pages of what a network attends to in images, or a PNG.

    config: `name` is a model's name or a file of `recast.save`, as `open_model` reads it. images: files and folders, of
    which at most `num_images` are taken. out: the file, HTML or PNG; without it MODEL-IMAGE.html in the current folder.
    classes: a text file with the name of one class a line; without it a network of 1,000 classes has ImageNet's, any
    other numbers. size: (height, width); mean, std: of each colour in [0, 1] pixels; crop_pct: the share of the short
    side that a square crop keeps. Without them the network's own (timm's say so), else 224, ImageNet's and
    `crop_fraction`, and a note says what was assumed. Random weights are drawn with one seed. layer: the one that is
    open first, and that a PNG draws. Raises `RecastError` as `open_model`, `find_inputs`, `read_files`, `make_scene`
    and `write_pages` do, and for a normalisation or crop that does not fit; nothing is written then.
    """
    known = Path(config.name).stem if config.name.endswith(SAVED) else config.name
    _check(Inputs(size, crop_pct, mean, std))
    target = Path(f"{safe_stem(known)}-{page_stem(images)}.html") if out is None else Path(out)
    check_target(target)
    if asked := next((word for word in images if str(word).startswith("val:")), None):
        raise RecastError(f"{asked} is of a run's data, and {config.name} is no run: name image files or folders")
    if not images:
        raise RecastError(f"which images? recast explain {config.name} IMAGE …: files or folders")
    files = find_inputs(images)  # a mistyped path is told before the network is made
    names = None if classes is None else read_class_names(Path(classes))
    chosen = choose_device(device)
    with seeded(SEED):
        model = open_model(config)
    outputs = num_outputs(model)
    if names is not None and outputs is not None and len(names) != outputs:
        raise RecastError(
            f"{classes} names {len(names)} classes, {config.name} has {outputs}: one name a line, in the order of its "
            "outputs"
        )
    labels = {name: name for name in names or ()}
    if names is None and outputs == 1000:
        names, labels = imagenet_names()
    own = inputs_of(model)
    given = Inputs(size or own.size, crop_pct or own.crop_pct, mean or own.mean, std or own.std)
    seen = given.size or (SIDE, SIDE)
    normalisation = given.mean or IMAGENET[0], given.std or IMAGENET[1]

    def read(path: int | Path) -> Input:
        assert isinstance(path, Path)
        return replace(read_image(path, seen, (), given.crop_pct), label=labels.get(path.resolve().parent.name))

    inputs, notes = read_files(files, read, num_images)
    weights = weights_of(config)
    notes += [*_assumed(config.name, given), *weights.notes]
    about = {
        "Network": config.name,
        "Weights": weights.told,
        "Images": f"{seen[0]}×{seen[1]} pixels (height × width)",
        "Normalisation": "; ".join(", ".join(f"{value:.4g}" for value in values) for values in normalisation),
    }
    states = [(None, {"recast": model.to(chosen)})]
    scene = make_scene(
        known + weights.title, inputs, states, names, normalisation, {"recast": "Network"}, notes, [*about.items()]
    )
    return Explained(write_pages(scene, target, layer=layer), scene, notes)


def num_outputs(model: nn.Module) -> int | None:
    """How many classes the network tells apart; None where one cannot tell without running it."""
    told = getattr(model, "num_classes", None)
    if isinstance(told, int):
        return told or None
    try:
        layer = model.get_submodule(classifiers(model)[0])
    except RecastError:
        return None
    found = getattr(layer, "out_features", getattr(layer, "out_channels", None))
    return found if isinstance(found, int) else None


def _assumed(name: str, known: Inputs) -> list[str]:
    """A note on what neither the network nor the user says; none where all is said."""
    missing = {"--img-size": f"{SIDE}×{SIDE} pixels"} if known.size is None else {}
    missing |= {f"--{what}": f"ImageNet's {what}" for what in ("mean", "std") if getattr(known, what) is None}
    if not missing:
        return []
    return [f"{name} does not say what images it takes; assumed: {', '.join(missing.values())} ({', '.join(missing)})."]


def _check(given: Inputs) -> None:
    for name, values in (("mean", given.mean), ("std", given.std)):
        if values is not None and len(values) != 3:
            listed = " ".join(f"{value:g}" for value in values)
            raise RecastError(f"{name} must be three numbers, R G B, got {len(values)}: {listed}")
    if given.crop_pct is not None and given.size is not None and given.size[0] != given.size[1]:
        raise RecastError(
            f"crop_pct is of square images, and of {given.size[0]}×{given.size[1]} pixels the largest middle part is "
            "taken: leave it out"
        )


def explain_run(
    folder: str | Path,
    images: Sequence[str | Path] = (),
    out: str | Path | None = None,
    *,
    size: tuple[int, int] | None = None,
    num_images: int = 16,
    layer: str | None = None,
    device: str = "cpu",
) -> Explained:
    """Write pages of what a run's heads attend to in images, the arms' predictions side by side.

    images: files, folders, `val:N` for the N-th validation image of the run's data; none: four validation images of
    different classes. At most `num_images` are taken. size: (height, width) instead of the run's validation size.
    out: the file, HTML or PNG; without it RUN/explain/NAME.html. layer: the one that is open first, and that a PNG
    draws. Raises `RecastError` as `open_run`, `read_inputs` and `write_pages` do; nothing is written then.
    """
    target = Path(out) if out is not None else Path(folder) / "explain" / f"{page_stem(images)}.html"
    if out is not None:
        check_target(target)
    find_inputs(images)  # a mistyped path is told before the run is loaded
    run = open_run(folder)
    side = run.data.test_size
    inputs, said = read_inputs(images, run.data, size or (side, side), num_images, run.recipe.data.crop_pct)
    states, notes = kept_states(run)
    scene = make_scene(
        f"{run.recipe.model.name} on {run.data.name}",
        inputs,
        _networks(run, states, choose_device(device)),
        run.data.classes,
        (run.data.mean, run.data.std),
        {"recast": "Network"} if run.recipe.is_plain else {arm: ARMS[arm] for arm in ARMS if arm in run.models},
        notes + said,
        [
            ("Run", str(run.folder.resolve().name)),
            ("Network", run.recipe.model.name),
            ("Data", f"{run.data.name}, {len(run.data.classes)} classes"),
            *_changed(run.recipe),
            ("Epochs shown", ", ".join(map(str, states))),
        ],
    )
    if out is None:
        target.parent.mkdir(exist_ok=True)
    return Explained(write_pages(scene, target, layer=layer), scene, said)


def kept_states(run: Run) -> tuple[dict[int, Path | None], list[str]]:
    """Epochs to show, where the weights of each lie (None: weights.safetensors), and what to say of them."""
    last = run.recipe.epochs
    kept = {epoch: path for epoch, path in run.kept.items() if epoch < last}
    epochs = list(kept)
    notes = []
    if len(epochs) > MAX_STATES - 1:
        chosen = sorted({epochs[round(i * (len(epochs) - 1) / (MAX_STATES - 2))] for i in range(MAX_STATES - 1)})
        notes.append(f"Of {len(epochs) + 1} epochs whose weights were kept, {len(chosen) + 1} are shown.")
        epochs = chosen
    return {**{epoch: kept[epoch] for epoch in epochs}, last: None}, notes


def _networks(
    run: Run, states: Mapping[int, Path | None], device: torch.device
) -> Iterator[tuple[int | None, dict[str, nn.Module]]]:
    """The arms at every epoch, loaded one epoch at a time; the control arm's of that epoch too, where it was kept."""
    for epoch, path in states.items():
        if run.recipe.is_plain:
            (trained,) = run.models.values()
            networks = {"recast": trained if path is None else load(path, trained)}
        else:
            networks = dict(run.models)
            if path is not None:
                networks["recast"] = load(path, parent=run.models["parent"])
                control = run.folder / "finetuned" / "checkpoints" / path.name
                if "finetuned" in networks and control.is_file():
                    networks["finetuned"] = load(control, run.models["parent"])
        yield epoch if len(states) > 1 else None, {arm: network.to(device) for arm, network in networks.items()}


def _changed(recipe: Recipe) -> list[tuple[str, str]]:
    """What of the parent became attention."""
    if recipe.is_plain:
        return [("Recast", "nothing")]
    found = []
    if recipe.has_layers:
        kind = "C-MHSA" if recipe.recast.gate == "bias" else f"{recipe.recast.gate} gate"
        found += [("Recast", f"{', '.join(recipe.where)}; {kind}"), ("Schedule", recipe.schedule.name)]
    if recipe.pool.is_on:
        token = "one token" if recipe.pool.kind == "single" else "one token a class"
        start = "the average" if recipe.pool.start == "average" else "the paper's start"
        found.append(("Pooling", f"attention, {token}, from {start}"))
    return found
