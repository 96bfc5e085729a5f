"""`explain_run`: the arms of a run folder on images, over the epochs whose weights were kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from recast.device import choose_device
from recast.evaluation.run_folder import Run, open_run
from recast.explain.make import ARMS, make_scene
from recast.explain.pictures import find_inputs, page_stem, read_inputs
from recast.explain.write import Explained, check_target, write_pages
from recast.io import load
from recast.run.config import Recipe

MAX_STATES = 12
"""Epochs on the slider; of more that were kept, as many at equal distances."""


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
    notes += said
    arms = {arm: ARMS[arm] for arm in ARMS if arm in run.models}
    if run.recipe.is_plain:
        arms = {"recast": "Network"}
    scene = make_scene(
        f"{run.recipe.model.name} on {run.data.name}",
        inputs,
        _networks(run, states, choose_device(device)),
        run.data.classes,
        (run.data.mean, run.data.std),
        arms,
        notes,
        _facts(run, states),
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


def _facts(run: Run, states: Mapping[int, Path | None]) -> list[tuple[str, str]]:
    recipe = run.recipe
    return [
        ("Run", str(run.folder.resolve().name)),
        ("Network", recipe.model.name),
        ("Data", f"{run.data.name}, {len(run.data.classes)} classes"),
        *_changed(recipe),
        ("Epochs shown", ", ".join(map(str, states))),
    ]


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
