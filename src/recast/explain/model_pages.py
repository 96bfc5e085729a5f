"""`explain_model`: any network by its name, or a file of `recast.save`, on images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from recast.data.seeding import seeded
from recast.device import choose_device
from recast.errors import RecastError
from recast.explain.class_names import imagenet_names, read_class_names
from recast.explain.make import IMAGENET, make_scene
from recast.explain.open_model import SAVED, chance, open_model, weights_of
from recast.explain.pictures import Input, find_images, page_stem, read_files, read_image, safe_stem
from recast.explain.write import Explained, check_target, write_pages
from recast.models.adapt import classifiers
from recast.models.build import input_defaults
from recast.run.config import ModelConfig

SEED = 0
"""Of random weights: the same command draws the same picture."""
SIDE = 224
"""Of images for a network that does not say its own size."""


class Inputs(NamedTuple):
    """What images a network takes; None: it does not say."""

    size: tuple[int, int] | None
    """(height, width)."""
    crop_pct: float | None
    """Share of the short side that the crop keeps."""
    mean: Sequence[float] | None
    std: Sequence[float] | None


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
    open first, and that a PNG draws. Raises `RecastError` as `open_model`, `find_images`, `read_files`, `make_scene`
    and `write_pages` do, and for a normalisation or crop that cannot be; nothing is written then.
    """
    known = Path(config.name).stem if config.name.endswith(SAVED) else config.name
    _check(mean, std, crop_pct, size)
    target = Path(f"{safe_stem(known)}-{page_stem(images)}.html") if out is None else Path(out)
    check_target(target)
    if asked := next((word for word in images if str(word).startswith("val:")), None):
        raise RecastError(f"{asked} is of a run's data, and {config.name} is no run: name image files or folders")
    if not images:
        raise RecastError(f"which images? recast explain {config.name} IMAGE …: files or folders")
    files = find_images(images)  # a mistyped path is told before the network is made
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
    said, of_weights = chance(config)
    notes += [*assumed(config.name, given), *of_weights]
    scene = make_scene(
        known + said,
        inputs,
        [(None, {"recast": model.to(chosen)})],
        names,
        normalisation,
        {"recast": "Network"},
        notes,
        [
            ("Network", config.name),
            ("Weights", weights_of(config)),
            ("Images", f"{seen[0]}×{seen[1]} pixels (height × width)"),
            ("Normalisation", "; ".join(", ".join(f"{value:.4g}" for value in values) for values in normalisation)),
        ],
    )
    return Explained(write_pages(scene, target, layer=layer), scene, notes)


def num_outputs(model: nn.Module) -> int | None:
    """How many classes the network tells apart; None where one cannot tell without running it."""
    told = getattr(model, "num_classes", None)
    if isinstance(told, int):
        return told or None
    try:
        name = classifiers(model)[0]
    except RecastError:
        return None
    layer = model.get_submodule(name)
    found = getattr(layer, "out_features", getattr(layer, "out_channels", None))
    return found if isinstance(found, int) else None


def inputs_of(model: nn.Module) -> Inputs:
    """What timm's cfg of the network says."""
    defaults, cfg = input_defaults(model), getattr(model, "pretrained_cfg", None)
    if defaults is None or not isinstance(cfg, Mapping):
        return Inputs(None, None, None, None)
    height, width = (int(side) for side in cfg["input_size"][-2:])
    crop_pct = cfg.get("crop_pct")
    return Inputs((height, width), None if crop_pct is None else float(crop_pct), defaults.mean, defaults.std)


def assumed(name: str, known: Inputs) -> list[str]:
    """A note on what neither the network nor the user says; none where all is said."""
    missing = {"--img-size": f"{SIDE}×{SIDE} pixels"} if known.size is None else {}
    missing |= {f"--{what}": f"ImageNet's {what}" for what in ("mean", "std") if getattr(known, what) is None}
    if not missing:
        return []
    return [f"{name} does not say what images it takes; assumed: {', '.join(missing.values())} ({', '.join(missing)})."]


def _check(
    mean: Sequence[float] | None, std: Sequence[float] | None, crop_pct: float | None, size: tuple[int, int] | None
) -> None:
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) != 3:
            raise RecastError(f"{name} must be three numbers, R G B, got {len(values)}: {_listed(values)}")
    if mean is not None and not all(0 <= value <= 1 for value in mean):
        raise RecastError(f"mean is of pixels in [0, 1], got {_listed(mean)}: divide what is of 0 to 255 by 255")
    if std is not None and not all(0 < value < math.inf for value in std):
        raise RecastError(f"std must be positive numbers, got {_listed(std)}")
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise RecastError(f"crop_pct must be above 0 and at most 1, got {crop_pct:g}")
    if crop_pct is not None and size is not None and size[0] != size[1]:
        raise RecastError(
            f"crop_pct is of square images, and of {size[0]}×{size[1]} pixels the largest middle part is taken: leave "
            "it out"
        )


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)
