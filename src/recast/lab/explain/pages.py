"""`explain_pages`: pages of a network by its name, and of a run folder's arms over their epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from recast.errors import RecastError
from recast.io import load
from recast.lab.config import Recipe
from recast.lab.config.explain import ExplainOptions
from recast.lab.data.seeding import seeded
from recast.lab.device import choose_device
from recast.lab.evaluation.run_folder import OpenRun, open_run
from recast.lab.explain.inputs import (
    Input,
    find_inputs,
    imagenet_names,
    page_stem,
    read_class_names,
    read_inputs,
    some_of_validation,
)  # fmt: skip
from recast.lab.explain.make import ASSUMED, make_scene
from recast.lab.explain.open import SAVED, names_a_run, open_model, weights_of
from recast.lab.explain.pack import first_layer
from recast.lab.explain.scene import Scene
from recast.lab.explain.write import check_target, safe_stem, write_pages
from recast.lab.recipe import why_untaught
from recast.lab.records import ARMS, Row
from recast.models.adapt import classifiers
from recast.models.build import class_names, input_defaults
from recast.models.config import ModelConfig
from recast.tables import read_records

SEED = 0
"""Of random weights: the same command draws the same picture."""
OF_MODELS = ("checkpoint", "checkpoint_key", "pretrained", "num_classes", "classes", "mean", "std", "crop_pct")
MAX_STATES = 12
"""Epochs on the slider; of more that were kept, as many at equal distances."""


Explained = tuple[list[Path], Scene, list[str]]
"""The files written, the one to open first; what they show; what to say of network and images."""


@dataclass(frozen=True)
class Subject:
    """What is explained, opened once for any number of images."""

    read: Callable[[Sequence[int | Path]], tuple[list[Input], list[str]]]
    """Files, and numbers of validation images, as its networks see them, and what to say of them (`read_inputs`)."""
    show: Callable[[Sequence[Input], Sequence[str]], Scene]
    """Images, and notes on them, run through its networks."""
    notes: Sequence[str] = ()
    """What to say of the network."""


def explain_pages(asked: ExplainOptions, size: tuple[int, int] | None = None) -> Explained:
    """Write pages of what a run's networks, or one network, attend to in images, or a PNG.

    A run's page is RUN/explain/NAME.html, a network's MODEL-IMAGE.html in the current folder. size: (height, width) of
    the images instead of the network's own. Raises `RecastError` for a network, images, names, a normalisation or a
    place to write that cannot be, and nothing is written then.
    """
    is_run = check_subject(asked, size)
    stem = page_stem(asked.images)
    default = f"{asked.subject}/explain/{stem}.html" if is_run else f"{safe_stem(_known(asked.subject))}-{stem}.html"
    target = Path(asked.out or default)
    if asked.out or not is_run:
        check_target(target)
    wanted = find_inputs(asked.images)  # a mistyped path is told before the network is made
    if not is_run and (numbers := [one for one in wanted if isinstance(one, int)]):
        raise RecastError(
            f"val:{numbers[0]} is of a run's data, and {asked.subject} is no run: name image files or folders"
        )
    if not is_run and not wanted:
        raise RecastError(f"which images? recast explain {asked.subject} IMAGE …: files or folders")
    subject = open_subject(asked, size)
    inputs, notes = subject.read(wanted)
    scene = subject.show(inputs, notes)
    if not asked.out:
        first_layer(scene, asked.layer)  # a layer without maps is refused before a folder is made
        target.parent.mkdir(exist_ok=True)
    return write_pages(scene, target, layer=asked.layer), scene, [*notes, *subject.notes]


def check_subject(asked: ExplainOptions, size: tuple[int, int] | None) -> bool:
    """Whether a run is explained. Raises `RecastError` for options that are not of what is."""
    if not names_a_run(asked.subject):
        if asked.crop_pct is not None and size is not None and size[0] != size[1]:
            raise RecastError(
                f"crop_pct is of square images, and of {size[0]}×{size[1]} pixels the largest middle part is taken: "
                "leave it out"
            )
        return False
    for name in OF_MODELS:
        if getattr(asked, name) != getattr(ExplainOptions(), name):
            option = name.replace("_", "-")
            raise RecastError(f"{asked.subject} is a run folder, which knows its own: leave --{option} away")
    return True


def open_subject(asked: ExplainOptions, size: tuple[int, int] | None, *, kept: bool = True) -> Subject:
    """The run or network of `asked`, loaded. kept: a run's earlier epochs too, each loaded when it is shown."""
    return _run(asked, size, kept) if names_a_run(asked.subject) else _model(asked, size)


def _known(name: str) -> str:
    return Path(name).stem if name.endswith(SAVED) else name


def _model(asked: ExplainOptions, size: tuple[int, int] | None) -> Subject:
    """A network as `open_model` reads it.

    Without options size, normalisation and crop are the network's own (timm's say so), else 224, ImageNet's and
    `crop_fraction`, and a note says what was assumed; names of classes ImageNet's for 1,000. Random weights are drawn
    with one seed.
    """
    config = ModelConfig(
        asked.subject, asked.checkpoint, asked.pretrained, asked.num_classes, checkpoint_key=asked.checkpoint_key
    )
    names = None if asked.classes is None else read_class_names(Path(asked.classes))
    device = choose_device(asked.device)
    with seeded(SEED):
        model = open_model(config).to(device)
    names = names or list(class_names(model) or ()) or None
    labels, outputs = {name: name for name in names or ()}, num_outputs(model)
    if names is not None and outputs not in (None, len(names)):
        raise RecastError(
            f"{asked.classes or config.name} has {len(names)} names of classes for a network with {outputs} outputs: "
            "--classes FILE must have one a line, in their order"
        )
    if names is None and outputs == 1000:
        names, labels = imagenet_names()
    own = input_defaults(model) or ASSUMED
    seen, normalisation = size or own.size, (asked.mean or own.mean, asked.std or own.std)
    assumed = {} if size else {"--img-size": "{}×{} pixels".format(*ASSUMED.size)}
    assumed |= {f"--{what}": f"ImageNet's {what}" for what in ("mean", "std") if not getattr(asked, what)}
    weights, in_title, notes = weights_of(config)
    if own is ASSUMED and assumed:
        said = f"{', '.join(assumed.values())} ({', '.join(assumed)})"
        notes = [f"{config.name} does not say what images it takes; assumed: {said}.", *notes]
    about = [
        ("Network", config.name),
        ("Weights", weights),
        ("Images", f"{seen[0]}×{seen[1]} pixels (height × width)"),
        ("Normalisation", "; ".join(", ".join(f"{value:.4g}" for value in values) for values in normalisation)),
    ]

    def read(wanted: Sequence[int | Path]) -> tuple[list[Input], list[str]]:
        return read_inputs(wanted, seen, asked.num_images, labels, asked.crop_pct or own.crop_pct)

    def show(inputs: Sequence[Input], said: Sequence[str]) -> Scene:
        states, arms = [(None, {"recast": model})], {"recast": "Network"}
        title = _known(config.name) + in_title
        return make_scene(title, inputs, states, names, normalisation, arms, [*said, *notes], about, asked.outputs)

    return Subject(read, show, notes)


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


def _run(asked: ExplainOptions, size: tuple[int, int] | None, kept: bool) -> Subject:
    """A run's arms, their predictions side by side; without images four of validation, of different classes."""
    run = open_run(Path(asked.subject))
    data, recipe = run.data, run.recipe
    states, notes = kept_states(run) if kept else ({recipe.epochs: None}, [])
    arms = {"recast": "Network"} if recipe.is_plain else {arm: ARMS[arm] for arm in ARMS if arm in run.models}
    if "parent" in arms and (why := _why_untaught(run)):
        del arms["parent"]
        notes.append(f"The predictions of the parent as it was are left out: {why}.")
    device, seen = choose_device(asked.device), size or (data.test_size, data.test_size)
    about = [
        ("Run", run.folder.resolve().name),
        ("Network", recipe.model.name),
        ("Data", f"{data.name}, {len(data.classes)} classes"),
        *_changed(recipe),
        ("Epochs shown", ", ".join(map(str, states))),
    ]

    def read(wanted: Sequence[int | Path]) -> tuple[list[Input], list[str]]:
        wanted = wanted or some_of_validation(data)
        labels = {name: name for name in data.classes}
        return read_inputs(wanted, seen, asked.num_images, labels, recipe.data.crop_pct, data)

    def show(inputs: Sequence[Input], said: Sequence[str]) -> Scene:
        title, networks = f"{recipe.model.name} on {data.name}", _networks(run, arms, states, device)
        return make_scene(
            title, inputs, networks, data.classes, (data.mean, data.std), arms, [*notes, *said], about, asked.outputs
        )

    return Subject(read, show)


def _why_untaught(run: OpenRun) -> str:
    rows = run.folder / "rows.csv"
    measured = read_records(rows, Row) if rows.is_file() else []
    return why_untaught(run.recipe, run.folder, len(run.data.classes), measured)


def kept_states(run: OpenRun) -> tuple[dict[int, Path | None], list[str]]:
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
    run: OpenRun, arms: Iterable[str], states: Mapping[int, Path | None], device: torch.device
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
        yield epoch if len(states) > 1 else None, {arm: networks[arm].to(device) for arm in arms}


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
