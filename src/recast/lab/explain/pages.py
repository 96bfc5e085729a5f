"""`explain_page`: the page of a network given by name, or of the arms of a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import nn

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.config.explain import ExplainOptions
from recast.lab.data.device import choose_device
from recast.lab.data.seeding import seeded
from recast.lab.explain.inputs import find_inputs, imagenet_names, page_stem, read_class_names, read_inputs
from recast.lab.explain.make import ASSUMED, assumed_input, make_scene
from recast.lab.explain.scene import Scene
from recast.lab.explain.write import check_target, safe_stem, write_scene
from recast.lab.folder.records import ARMS
from recast.lab.folder.run import RunFolder
from recast.lab.open import SAVED, check_same, names_a_run, open_model, open_run, weights_of
from recast.lab.task import task_named
from recast.layers.pool_config import AttentionPooling
from recast.models.adapt import classifiers
from recast.models.build import class_names, input_defaults
from recast.models.config import ModelConfig

SEED = 0  # of random weights: the same command draws the same page
MODEL_OPTIONS = ("checkpoint", "checkpoint_key", "pretrained", "num_classes", "classes", "mean", "std", "crop_pct")


def explain_page(options: ExplainOptions, size: tuple[int, int] | None) -> tuple[Path, Scene, list[str]]:
    """Write a page of where the networks of a run, or one network, look in images.

    By default the page of a run is RUN/explain/NAME.html, that of a network MODEL-IMAGE.html in the current folder.

    Args:
        size: (height, width) of the images; None: the network's own.

    Returns:
        The file written, its scene, and notes on the network and the images.

    Raises:
        RecastError: an option, image, name or path is invalid. Nothing is written then.
    """
    is_run = names_a_run(options.subject)
    _check_options(options, size, is_run)
    default = f"{options.subject}/explain/" if is_run else f"{safe_stem(_name(options.subject))}-"
    target = Path(options.out or f"{default}{page_stem(options.images)}.html")
    if options.out or not is_run:
        check_target(target)
    images = find_inputs(options.images)  # reports a mistyped path before the network is built
    scene, notes = (_explain_run if is_run else _explain_model)(options, size, images)
    scene.first_layer(options.layer)  # raises for another layer before a folder is made
    if not options.out:
        target.parent.mkdir(exist_ok=True)
    return write_scene(scene, target, options.layer), scene, notes


def _name(subject: str) -> str:
    return Path(subject).stem if subject.endswith(SAVED) else subject


def _check_options(options: ExplainOptions, size: tuple[int, int] | None, is_run: bool) -> None:
    """Raise `RecastError` for options that do not apply to the subject."""
    for name in ("bands", "data_dir"):
        if getattr(options, name) and not is_run:
            option = f"--{name.replace('_', '-')}"
            raise RecastError(f"{option} requires a run folder, got {options.subject}: drop it")
    if is_run:
        for name in MODEL_OPTIONS:
            if getattr(options, name) != getattr(ExplainOptions(), name):
                option = f"--{name.replace('_', '-')}"
                raise RecastError(f"{option} only applies to models, and {options.subject} is a run folder: drop it")
        return
    if options.crop_pct is not None and size is not None and size[0] != size[1]:
        raise RecastError(f"--crop-pct requires a square --img-size, got {size[0]}x{size[1]}: drop --crop-pct")
    if not options.images:
        if "/" in options.subject and ":" not in options.subject and not Path(options.subject).exists():
            RunFolder(options.subject).check()
        raise RecastError(f"no images given: recast explain {options.subject} IMAGE …, files or folders")
    if numbers := [word for word in options.images if word.startswith("val:")]:
        raise RecastError(f"{numbers[0]} requires a run folder: name image files or folders for {options.subject}")


def _explain_model(
    options: ExplainOptions, size: tuple[int, int] | None, images: Sequence[int | Path]
) -> tuple[Scene, list[str]]:
    """Return the scene of a network opened with `open_model`, and notes.

    Size, normalization and crop default to the network's own, else to 224, ImageNet's and `crop_fraction`, which a note
    states. Class names default to ImageNet's for 1,000 outputs. Random weights are drawn with a fixed seed.
    """
    config = ModelConfig(
        options.subject,
        options.checkpoint,
        options.pretrained,
        options.num_classes,
        checkpoint_key=options.checkpoint_key,
    )
    names = None if options.classes is None else read_class_names(Path(options.classes))
    device = choose_device(options.device)
    with seeded(SEED):
        model = open_model(config).to(device)
    names = names or list(class_names(model) or ()) or None
    labels = {name: name for name in names or ()}
    if names is None and _num_outputs(model) == 1000:
        names, labels = imagenet_names()
    stated = input_defaults(model)
    defaults = stated or assumed_input(model)
    shape, normalization = size or defaults.size, (options.mean or defaults.mean, options.std or defaults.std)
    assumed = {} if size else {"--img-size": "{}×{} pixels".format(*ASSUMED.size)}
    if defaults is ASSUMED:
        assumed |= {f"--{name}": f"ImageNet's {name}" for name in ("mean", "std") if not getattr(options, name)}
    weights, suffix, notes = weights_of(config)
    if stated is None and assumed:
        values = f"{', '.join(assumed.values())} ({', '.join(assumed)})"
        notes = [f"{config.name} does not state its input; assumed: {values}.", *notes]
    about = [
        ("Network", config.name),
        ("Weights", weights),
        ("Images", f"{shape[0]}×{shape[1]} pixels (height × width)"),
        ("Normalisation", "; ".join(", ".join(f"{value:.4g}" for value in values) for values in normalization)),
    ]
    inputs, remarks = read_inputs(images, shape, options.num_images, labels, options.crop_pct or defaults.crop_pct)
    notes = [*remarks, *notes]
    title = _name(config.name) + suffix
    networks, arms = {"recast": model}, {"recast": "Network"}
    return make_scene(title, inputs, networks, names, normalization, arms, notes, about, options.outputs), notes


def _num_outputs(model: nn.Module) -> int | None:
    """Return the number of classes of a network; None if it cannot be determined without running it."""
    outputs: int | None = getattr(model, "num_classes", None)
    with suppress(RecastError):
        layer = model.get_submodule(classifiers(model)[0])
        outputs = outputs or getattr(layer, "out_features", getattr(layer, "out_channels", None))
    return outputs


def _explain_run(
    options: ExplainOptions, size: tuple[int, int] | None, images: Sequence[int | Path]
) -> tuple[Scene, list[str]]:
    """Return the scene of the arms of a run, and notes on the images; by default on four of different classes."""
    run = open_run(options.subject, options.data_dir)
    data, recipe = run.data, run.recipe
    if options.data_dir:
        check_same(run.folder, data, goes_on=False)
    notes: list[str] = []
    arms = {"recast": "Network"} if recipe.is_plain else {arm: ARMS[arm] for arm in ARMS if arm in run.models}
    rows = run.folder.rows()
    if "parent" in arms and (reason := run.folder.why_no_baseline(recipe.model, len(data.classes), rows)):
        del arms["parent"]
        notes.append(f"Predictions of the parent before training are not shown: {reason}.")
    device, shape = choose_device(options.device), size or (data.test_size, data.test_size)
    about = [
        ("Run", run.folder.name),
        ("Network", recipe.model.name),
        ("Data", f"{recipe.data.title}, {len(data.classes)} classes"),
        *_changes(recipe),
        ("Epochs", str(recipe.epochs)),
    ]
    labels = {name: name for name in data.classes}
    inputs, remarks = read_inputs(images, shape, options.num_images, labels, recipe.data.crop_pct, data)
    title = f"{recipe.model.name} on {recipe.data.title}"
    networks = {"recast": run.models["finetuned"]} if recipe.is_plain else run.models
    networks = {arm: networks[arm].to(device) for arm in arms}
    scene = make_scene(
        title, inputs, networks, data.classes, (data.mean, data.std), arms, [*notes, *remarks], about,
        options.outputs or task_named(data.val.task).outputs, parse_bands(options.bands),
    )  # fmt: skip
    return scene, remarks


def parse_bands(text: str | None) -> tuple[int, ...]:
    """Return the numbers of `--bands 3,2,1`, or of one band. Raises RecastError for anything else."""
    numbers = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(",")) if text else ()
    if len(numbers) not in (0, 1, 3) or 0 in numbers:
        raise RecastError(f"--bands must be one number or three, such as 3,2,1, got {text!r}")
    return numbers


def _changes(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the facts on what became attention."""
    if recipe.is_plain:
        return [("Recast", "nothing")]
    facts = []
    if recipe.has_layers:
        facts += [("Recast", f"{', '.join(recipe.selection)}; {recipe.attention}"), ("Schedule", recipe.schedule.kind)]
    if isinstance(recipe.pool, AttentionPooling):
        token = "one token" if recipe.pool.kind == "single" else "one token per class"
        start = "the average" if recipe.pool.start == "average" else "the paper's start"
        facts.append(("Pooling", f"attention, {token}, from {start}"))
    return facts
