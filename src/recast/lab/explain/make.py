"""`explain` and `make_scene`: show where networks look in images, by query pixel in every head, or by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError, errors_in
from recast.lab.analysis.grad_cam import grad_cam
from recast.lab.data.bands import is_rgb
from recast.lab.explain.inputs import Input, likeliest, read_image, read_outputs, rgb_bytes
from recast.lab.explain.maps import TOP_CLASSES, Described, cam_layer, map_name, record_maps
from recast.lab.explain.scene import Layer, Outputs, Picture, Prediction, Scene
from recast.lab.explain.write import check_target, write_scene
from recast.lab.folder.records import ARMS
from recast.models.build import InputDefaults, class_names, input_defaults
from recast.modes import in_eval

TOP = 5
STRETCHED = "Shown with more contrast: each band from its 2 % to its 98 % quantile. The network sees the stored values."
ASSUMED = InputDefaults((224, 224), None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
"""Input of a network that does not state its own."""


def assumed_input(model: nn.Module) -> InputDefaults:
    """Return `ASSUMED`; for a detector of torchvision, which normalises images itself, their pixels."""
    is_detector = isinstance(getattr(model, "transform", None), GeneralizedRCNNTransform)
    return ASSUMED._replace(mean=(0.0,) * 3, std=(1.0,) * 3) if is_detector else ASSUMED


def explain(
    model: nn.Module,
    image: str | Path | Tensor,
    out: str | Path = "explain.html",
    *,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    size: int | tuple[int, int] | None = None,
    against: Mapping[str, nn.Module] | None = None,
    title: str | None = None,
    outputs: Outputs | None = None,
) -> Path:
    """Write a self-contained HTML page that shows where `model` looks in an image.

        recast.lab.explain.make.explain(child, "cat.jpg", against={"parent": parent})

    The page shows recast layers, attention pools and the attention of transformers (timm's, torchvision's). A model
    without any of these gets a page with its predictions and Grad-CAM. Models run in eval mode, without gradients, and
    are left unchanged.

    Args:
        image: a file, or pixels (3, height, width) in [0, 1], which are used as they are.
        out: the page.
        classes: names of the outputs; default those stored by `recast.save`, else numbers.
        mean, std: normalization; default the network's own (timm, a saved file), for a detector of torchvision, which
            normalises images itself, none, else ImageNet's.
        size: resize and crop to this side or (height, width); default the network's own, else 224.
        against: other networks whose predictions are shown beside it, by name ("parent", "finetuned", or any other).
        title: title of the page.
        outputs: "softmax" for exclusive classes, "sigmoid" for independent labels, or "logits"; default a sigmoid for
            one output, else a softmax.

    Returns:
        The path of the page.

    Raises:
        RecastError: the image cannot be read, the model cannot take it, or `out` cannot be written.
    """
    check_target(Path(out))
    defaults, classes = input_defaults(model) or assumed_input(model), classes or class_names(model)
    shape = (size, size) if isinstance(size, int) else size or defaults.size
    shown = _input(image, shape, classes or ())
    arms = {**(against or {}), "recast": model}
    scene = make_scene(
        title or f"{type(model).__name__} on {shown.name}",
        [shown],
        arms,
        classes,
        (mean or defaults.mean, std or defaults.std),
        {arm: ARMS.get(arm, arm) for arm in arms} if against else {"recast": "Model"},
        outputs=outputs,
    )
    return write_scene(scene, Path(out))


def _input(image: str | Path | Tensor, size: tuple[int, int], classes: Sequence[str]) -> Input:
    if not isinstance(image, Tensor):
        return read_image(Path(image), size, {name: name for name in classes})
    if image.dim() == 3 and image.shape[0] == 3 and image.is_floating_point():
        return Input("the image", image)
    raise RecastError(
        f"image must be a file, or pixels (3, height, width) in [0, 1], got a tensor {tuple(image.shape)} of "
        f"{image.dtype}"
    )


def make_scene(
    title: str,
    inputs: Sequence[Input],
    networks: Mapping[str, nn.Module],
    classes: Sequence[str] | None,
    normalization: tuple[Sequence[float], Sequence[float]],
    arms: Mapping[str, str],
    notes: Sequence[str] = (),
    about: Sequence[tuple[str, str]] = (),
    outputs: Outputs | None = None,
    bands: Sequence[int] = (),
) -> Scene:
    """Run every image through the networks and return the scene of a page.

    Attention maps are recorded for the arm "recast", Grad-CAM for all arms.

    Args:
        networks: by arm.
        normalization: mean and std of each channel.
        arms: name of each arm on the page.
        bands: numbers of the bands that are shown of images with several, from 1.
        notes, about: remarks, and (term, value) pairs on how the page was made.
    """
    pictures: list[Picture] = []
    layers: dict[str, Layer] = {}
    messages = dict.fromkeys(notes)
    mean, std = (list(values) for values in normalization)
    for image in inputs:
        pixels = normalize(image.pixels[None], mean, std)
        predictions, described, remarks = _look(networks, pixels, classes, arms, outputs)
        maps = {layer.name: maps for layer, maps in described}
        shown = rgb_bytes(image.pixels, bands)
        stretched = () if is_rgb(image.pixels, bands) else (STRETCHED,)
        pictures.append(Picture(image.name, shown, image.label, (*image.notes, *stretched), predictions, maps))
        layers |= {layer.name: layer for layer, _ in described}
        messages |= dict.fromkeys(remarks)
    return Scene(title, dict(arms), tuple(layers.values()), tuple(pictures), tuple(messages), tuple(about))


def _look(
    networks: Mapping[str, nn.Module],
    pixels: Tensor,
    classes: Sequence[str] | None,
    arms: Mapping[str, str],
    outputs: Outputs | None,
) -> tuple[dict[str, tuple[Prediction, ...]], list[Described], list[str]]:
    """Run normalized pixels (1, C, height, width) through every arm.

    Returns:
        Predictions by arm, attention maps of the arm "recast" and Grad-CAM, and notes on layers without maps.
    """
    outcomes: dict[str, Any] = {}
    described: list[Described] = []
    messages: list[str] = []
    for arm, network in networks.items():
        x = _on_device(pixels, network)
        with errors_in("running the network ({}) on an image of {}×{} pixels".format(arms[arm], *x.shape[-2:])):
            if arm == "recast":
                outcomes[arm], described, messages = record_maps(network, x, classes, outputs)
            else:
                with in_eval(network), torch.no_grad():
                    outcomes[arm] = network(x)
    rankings = {arm: likeliest(output, classes, TOP, outputs) for arm, output in outcomes.items()}
    predictions = {arm: ranking for arm, ranking in rankings.items() if ranking}
    # Grad-CAM of the likeliest classes of the arm "recast", for every arm with the same number of outputs
    maps, names = {}, {}
    top = rankings["recast"][:TOP_CLASSES]
    numbers = [prediction.number for prediction in top]
    for arm in predictions if top and outcomes["recast"].dim() == 2 else ():
        x = _on_device(pixels, networks[arm])
        if outcomes[arm].shape != outcomes["recast"].shape:
            continue
        cams = grad_cam(networks[arm], x, torch.tensor([numbers], device=x.device))
        if cams is not None:
            values = read_outputs(outcomes[arm], outputs)[0][0, numbers].tolist()
            prefix = f"{arms[arm]}: " if len(arms) > 1 else ""
            maps[arm] = cams
            names[arm] = [f"{prefix}{map_name(p._replace(probability=v))}" for p, v in zip(top, values, strict=True)]
    return predictions, [*described, cam_layer(maps, names)] if maps else described, messages


def _on_device(pixels: Tensor, network: nn.Module) -> Tensor:
    """Return a copy of the pixels on the device and with the dtype of a network, which may write into it."""
    return pixels.to(next(network.parameters(), pixels), copy=True)
