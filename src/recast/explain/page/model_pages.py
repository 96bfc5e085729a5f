"""`explain_model`: any network by its name, or a file of `recast.save`, on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from recast.config import ModelConfig
from recast.device import choose_device
from recast.errors import RecastError
from recast.explain.page.class_names import imagenet_names, read_class_names
from recast.explain.page.make import IMAGENET, make_scene
from recast.explain.page.open_model import SAVED, is_trained, open_model, weights_of
from recast.explain.page.pictures import Input, find_images, page_stem, read_files, read_image, safe_stem
from recast.explain.page.write import Explained, check_target, write_pages
from recast.models.adapt import classifiers
from recast.models.build import input_defaults

CHANCE = "Random weights: what the network says and where it looks is chance."


def explain_model(
    config: ModelConfig,
    images: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    classes: str | Path | None = None,
    size: tuple[int, int] | None = None,
    num_images: int = 16,
    layer: str | None = None,
    device: str = "cpu",
) -> Explained:
    """Write pages of what a network attends to in images, or a PNG.

    config: `name` is a model's name or a file of `recast.save`, as `open_model` reads it. images: files and folders, of
    which at most `num_images` are taken. out: the file, HTML or PNG; without it MODEL-IMAGE.html in the current folder.
    classes: a text file with the name of one class a line; without it a network of 1,000 classes has ImageNet's, any
    other numbers. size: (height, width); without it, as normalisation and crop, the network's own (timm's say so), else
    224 and ImageNet's. layer: the one that is open first, and that a PNG draws. Raises `RecastError` as `open_model`,
    `find_images`, `read_files`, `make_scene` and `write_pages` do; nothing is written then.
    """
    known = Path(config.name).stem if config.name.endswith(SAVED) else config.name
    target = Path(f"{safe_stem(known)}-{page_stem(images)}.html") if out is None else Path(out)
    check_target(target)
    if asked := next((word for word in images if str(word).startswith("val:")), None):
        raise RecastError(f"{asked} is of a run's data, and {config.name} is no run: name image files or folders")
    if not images:
        raise RecastError(f"which images? recast explain {config.name} IMAGE …: files or folders")
    files = find_images(images)  # a mistyped path is told before the network is made
    names = None if classes is None else read_class_names(Path(classes))
    chosen = choose_device(device)
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
    shape, crop_pct, normalisation = input_of(model)
    seen = size or shape

    def read(path: int | Path) -> Input:
        assert isinstance(path, Path)
        return replace(read_image(path, seen, (), crop_pct), label=labels.get(path.resolve().parent.name))

    inputs, said = read_files(files, read, num_images)
    scene = make_scene(
        known,
        inputs,
        [(None, {"recast": model.to(chosen)})],
        names,
        normalisation,
        {"recast": "Network"},
        [
            *said,
            *([] if is_trained(config) else ["Random weights: what the network says and where it looks is chance."]),
        ],
        [
            ("Network", config.name),
            ("Weights", weights_of(config)),
            ("Images", f"{seen[0]}×{seen[1]} pixels (height × width)"),
            ("Normalisation", "; ".join(", ".join(f"{value:.4g}" for value in values) for values in normalisation)),
        ],
    )
    return Explained(write_pages(scene, target, layer=layer), scene, said)


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


def input_of(
    model: nn.Module,
) -> tuple[tuple[int, int], float | None, tuple[Sequence[float], Sequence[float]]]:
    """(height, width), share of the short side that the crop keeps, (mean, std): of timm's cfg, else ImageNet's."""
    defaults, cfg = input_defaults(model), getattr(model, "pretrained_cfg", None)
    if defaults is None or not isinstance(cfg, Mapping):
        return (224, 224), None, IMAGENET
    height, width = (int(side) for side in cfg["input_size"][-2:])
    crop_pct = cfg.get("crop_pct")
    return (height, width), None if crop_pct is None else float(crop_pct), (defaults.mean, defaults.std)
