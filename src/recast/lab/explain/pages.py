"""`explain_pages`: pages of a network given by name, or of the arms of a run folder over their epochs."""

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
from recast.lab.explain.scene import Scene
from recast.lab.explain.write import check_target, safe_stem, write_pages
from recast.lab.recipe import why_untaught
from recast.lab.records import ARMS, Row
from recast.layers.config import AttentionPooling
from recast.models.adapt import classifiers
from recast.models.build import class_names, input_defaults
from recast.models.config import ModelConfig
from recast.tables import read_records

SEED = 0  # of random weights: the same command draws the same page
MODEL_OPTIONS = ("checkpoint", "checkpoint_key", "pretrained", "num_classes", "classes", "mean", "std", "crop_pct")
MAX_STATES = 12  # epochs on the slider; more are thinned out evenly

Explained = tuple[list[Path], Scene, list[str]]
"""The files written (the one to open first), their scene, and notes on the network and the images."""


@dataclass(frozen=True)
class Subject:
    """A network or run, opened once for any number of images."""

    read: Callable[[Sequence[int | Path]], tuple[list[Input], list[str]]]
    """Read files and validation images by number, as the networks see them, with notes (`read_inputs`)."""
    show: Callable[[Sequence[Input], Sequence[str]], Scene]
    """Run images through the networks; the notes are added to the scene."""
    notes: Sequence[str] = ()  # on the network


def explain_pages(options: ExplainOptions, size: tuple[int, int] | None = None) -> Explained:
    """Write pages, or a PNG, of where the networks of a run, or one network, look in images.

    By default the page of a run is RUN/explain/NAME.html, that of a network MODEL-IMAGE.html in the current folder.

    Args:
        size: (height, width) of the images; default the network's own.

    Raises:
        RecastError: an option, image, name or path is invalid. Nothing is written then.
    """
    is_run = check_subject(options, size)
    stem = page_stem(options.images)
    default = f"{options.subject}/explain/{stem}.html" if is_run else f"{safe_stem(_name(options.subject))}-{stem}.html"
    target = Path(options.out or default)
    if options.out or not is_run:
        check_target(target)
    images = find_inputs(options.images)  # reports a mistyped path before the network is built
    if not is_run and (numbers := [image for image in images if isinstance(image, int)]):
        raise RecastError(f"val:{numbers[0]} requires a run folder: name image files or folders for {options.subject}")
    if not is_run and not images:
        raise RecastError(f"no images given: recast explain {options.subject} IMAGE …, files or folders")
    subject = open_subject(options, size)
    inputs, notes = subject.read(images)
    scene = subject.show(inputs, notes)
    pages = write_pages(scene, target, layer=options.layer, make_folder=not options.out)
    return pages, scene, [*notes, *subject.notes]


def check_subject(options: ExplainOptions, size: tuple[int, int] | None) -> bool:
    """Return True if a run is explained. Raises `RecastError` for options that do not apply to the subject."""
    if not names_a_run(options.subject):
        if options.crop_pct is not None and size is not None and size[0] != size[1]:
            raise RecastError(f"--crop-pct requires a square --img-size, got {size[0]}x{size[1]}: drop --crop-pct")
        return False
    for name in MODEL_OPTIONS:
        if getattr(options, name) != getattr(ExplainOptions(), name):
            option = name.replace("_", "-")
            raise RecastError(
                f"--{option} only applies to models, and {options.subject} is a run folder: drop --{option}"
            )
    return True


def open_subject(options: ExplainOptions, size: tuple[int, int] | None) -> Subject:
    """Open the run or network of `options`."""
    return _open_run(options, size) if names_a_run(options.subject) else _open_model(options, size)


def _name(subject: str) -> str:
    return Path(subject).stem if subject.endswith(SAVED) else subject


def _open_model(options: ExplainOptions, size: tuple[int, int] | None) -> Subject:
    """Open a network with `open_model`.

    Size, normalization and crop default to the network's own, else to 224, ImageNet's and `crop_fraction`, which a note
    states. Class names default to ImageNet's for 1,000 outputs. Random weights are drawn with a fixed seed.
    """
    config = ModelConfig(
        options.subject, options.checkpoint, options.pretrained, options.num_classes,
        checkpoint_key=options.checkpoint_key,
    )  # fmt: skip
    names = None if options.classes is None else read_class_names(Path(options.classes))
    device = choose_device(options.device)
    with seeded(SEED):
        model = open_model(config).to(device)
    names = names or list(class_names(model) or ()) or None
    labels, outputs = {name: name for name in names or ()}, num_outputs(model)
    if names is not None and outputs not in (None, len(names)):
        raise RecastError(
            f"{options.classes or config.name} has {len(names)} class names, but the network has {outputs} outputs: "
            "give --classes a file with one name per line, in the order of the outputs"
        )
    if names is None and outputs == 1000:
        names, labels = imagenet_names()
    defaults = input_defaults(model) or ASSUMED
    shape, normalization = size or defaults.size, (options.mean or defaults.mean, options.std or defaults.std)
    assumed = {} if size else {"--img-size": "{}×{} pixels".format(*ASSUMED.size)}
    assumed |= {f"--{name}": f"ImageNet's {name}" for name in ("mean", "std") if not getattr(options, name)}
    weights, suffix, notes = weights_of(config)
    if defaults is ASSUMED and assumed:
        values = f"{', '.join(assumed.values())} ({', '.join(assumed)})"
        notes = [f"{config.name} does not state its input; assumed: {values}.", *notes]
    about = [
        ("Network", config.name),
        ("Weights", weights),
        ("Images", f"{shape[0]}×{shape[1]} pixels (height × width)"),
        ("Normalisation", "; ".join(", ".join(f"{value:.4g}" for value in values) for values in normalization)),
    ]

    def read(images: Sequence[int | Path]) -> tuple[list[Input], list[str]]:
        return read_inputs(images, shape, options.num_images, labels, options.crop_pct or defaults.crop_pct)

    def show(inputs: Sequence[Input], remarks: Sequence[str]) -> Scene:
        states, arms = [(None, {"recast": model})], {"recast": "Network"}
        title, remarks = _name(config.name) + suffix, [*remarks, *notes]
        return make_scene(title, inputs, states, names, normalization, arms, remarks, about, options.outputs)

    return Subject(read, show, notes)


def num_outputs(model: nn.Module) -> int | None:
    """Return the number of classes of a network; None if it cannot be determined without running it."""
    outputs = getattr(model, "num_classes", None)
    if isinstance(outputs, int):
        return outputs or None
    try:
        layer = model.get_submodule(classifiers(model)[0])
    except RecastError:
        return None
    outputs = getattr(layer, "out_features", getattr(layer, "out_channels", None))
    return outputs if isinstance(outputs, int) else None


def _open_run(options: ExplainOptions, size: tuple[int, int] | None) -> Subject:
    """Open the arms of a run. The default images are four validation images of different classes."""
    run = open_run(Path(options.subject))
    data, recipe = run.data, run.recipe
    states, notes = kept_states(run)
    arms = {"recast": "Network"} if recipe.is_plain else {arm: ARMS[arm] for arm in ARMS if arm in run.models}
    rows = read_records(path, Row) if (path := run.folder / "rows.csv").is_file() else []
    if "parent" in arms and (reason := why_untaught(recipe, run.folder, len(data.classes), rows)):
        del arms["parent"]
        notes.append(f"Predictions of the untrained parent are not shown: {reason}.")
    device, shape = choose_device(options.device), size or (data.test_size, data.test_size)
    about = [
        ("Run", run.folder.resolve().name),
        ("Network", recipe.model.name),
        ("Data", f"{data.name}, {len(data.classes)} classes"),
        *_changes(recipe),
        ("Epochs shown", ", ".join(map(str, states))),
    ]

    def read(images: Sequence[int | Path]) -> tuple[list[Input], list[str]]:
        labels = {name: name for name in data.classes}
        images = images or some_of_validation(data)
        return read_inputs(images, shape, options.num_images, labels, recipe.data.crop_pct, data)

    def show(inputs: Sequence[Input], remarks: Sequence[str]) -> Scene:
        title, networks = f"{recipe.model.name} on {data.name}", _networks(run, arms, states, device)
        normalization, remarks = (data.mean, data.std), [*notes, *remarks]
        outputs = options.outputs or data.task.outputs
        return make_scene(title, inputs, networks, data.classes, normalization, arms, remarks, about, outputs)

    return Subject(read, show)


def kept_states(run: OpenRun) -> tuple[dict[int, Path | None], list[str]]:
    """Return the epochs to show with their weights (None: weights.safetensors), and notes."""
    last = run.recipe.epochs
    paths = {epoch: path for epoch, path in run.kept.items() if epoch < last}
    epochs = list(paths)
    notes = []
    if len(epochs) > MAX_STATES - 1:
        shown = sorted({epochs[round(i * (len(epochs) - 1) / (MAX_STATES - 2))] for i in range(MAX_STATES - 1)})
        notes.append(f"{len(shown) + 1} of the {len(epochs) + 1} epochs with saved weights are shown.")
        epochs = shown
    return {**{epoch: paths[epoch] for epoch in epochs}, last: None}, notes


def _networks(
    run: OpenRun, arms: Iterable[str], states: Mapping[int, Path | None], device: torch.device
) -> Iterator[tuple[int | None, dict[str, nn.Module]]]:
    """Yield the arms at every epoch, loaded one epoch at a time; the control arm of that epoch too, if it was saved."""
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


def _changes(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the facts on what became attention."""
    if recipe.is_plain:
        return [("Recast", "nothing")]
    facts = []
    if recipe.has_layers:
        kind = "C-MHSA" if recipe.recast.gate == "bias" else f"{recipe.recast.gate} gate"
        facts += [("Recast", f"{', '.join(recipe.where)}; {kind}"), ("Schedule", recipe.schedule.kind)]
    if isinstance(recipe.pool, AttentionPooling):
        token = "one token" if recipe.pool.kind == "single" else "one token per class"
        start = "the average" if recipe.pool.start == "average" else "the paper's start"
        facts.append(("Pooling", f"attention, {token}, from {start}"))
    return facts
