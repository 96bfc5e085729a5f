"""`explain` and `make_scene`: what attends to what, of networks and images: a clicked query pixel in every head, or a
class in the image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from recast.analysis.grad_cam import grad_cam
from recast.errors import RecastError, first_line
from recast.lab.explain.inputs import Input, likeliest, read_image, read_outputs
from recast.lab.explain.maps import TOP_CLASSES, Described, called, cam_layer, record_maps
from recast.lab.explain.scene import Layer, Outputs, Picture, Prediction, Scene, State
from recast.lab.explain.write import check_target, write_pages
from recast.lab.records import ARMS
from recast.models.build import InputDefaults, class_names, input_defaults
from recast.tracing.hooks import in_eval

TOP = 5
ASSUMED = InputDefaults((224, 224), None, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
"""Of a network that does not say what images it takes."""


def explain(
    model: nn.Module,
    image: str | Path | Image.Image | Tensor,
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
    """Write a self-contained HTML page of what `model` attends to in an image; returns its path.

        recast.lab.explain.make.explain(child, "cat.jpg", against={"parent": parent})

    image: a file, a PIL image, or pixels (3, height, width) in [0, 1], which are taken as they are.
    classes: names of the outputs; without them those of a file of `save`, or their numbers. mean, std: the
    normalisation; without them the network's own (timm's, a file's), or ImageNet's. size: what the image is resized and
    cropped to, side or (height, width); without it the network's own, or 224. against: networks whose predictions stand
    beside it ("parent", "finetuned", or any name). outputs: "softmax" for exclusive classes, "sigmoid" for labels that
    may occur together, or "logits"; by default one output is a sigmoid, more are a softmax.

    Shown are recast layers, attention pools and the attention of transformers (timm's, torchvision's); a model with
    none of these has a page too: its predictions, and that there are no maps. Models are run in eval mode, without
    gradients, and left as they were. Raises `RecastError` for an image that cannot be read, a model that cannot take
    it, or nowhere to write.
    """
    check_target(Path(out))
    own, classes = input_defaults(model) or ASSUMED, classes or class_names(model)
    shape = (size, size) if isinstance(size, int) else size or own.size
    if not isinstance(image, Tensor):
        source = image if isinstance(image, Image.Image) else Path(image)
        shown = read_image(source, shape, {name: name for name in classes or ()})
    elif image.dim() == 3 and image.shape[0] == 3 and image.is_floating_point():
        shown = Input("the image", image)
    else:
        raise RecastError(
            f"an image must be a file, a PIL image, or pixels (3, height, width) in [0, 1], got a tensor "
            f"{tuple(image.shape)} of {image.dtype}"
        )
    arms = {**(against or {}), "recast": model}
    scene = make_scene(
        title or f"{type(model).__name__} on {shown.name}",
        [shown],
        [(None, arms)],
        classes,
        (mean or own.mean, std or own.std),
        {arm: ARMS.get(arm, arm) for arm in arms} if against else {"recast": "Model"},
        outputs=outputs,
    )
    return write_pages(scene, Path(out))[0]


def make_scene(
    title: str,
    inputs: Sequence[Input],
    states: Iterable[tuple[int | None, Mapping[str, nn.Module]]],
    classes: Sequence[str] | None,
    normalisation: tuple[Sequence[float], Sequence[float]],
    arms: Mapping[str, str],
    notes: Sequence[str] = (),
    about: Sequence[tuple[str, str]] = (),
    outputs: Outputs | None = None,
) -> Scene:
    """Run every image through the networks of every state; of the arm "recast" the maps are kept, of all Grad-CAM.

    states: (epoch, arms), the earliest first; may be a generator that loads one after the other.
    """
    done: list[State] = []
    pictures = [Picture(shown.name, _bytes(shown.pixels), shown.label, shown.notes) for shown in inputs]
    order: list[str] = []
    left_out: dict[str, None] = {}
    mean, std = (list(values) for values in normalisation)
    for epoch, networks in states:
        layers: tuple[Layer, ...] = ()
        for picture, shown in zip(pictures, inputs, strict=True):
            seen: dict[str, tuple[Tensor, Any]] = {}
            for arm, network in networks.items():
                x = normalize(shown.pixels[None], mean, std)
                x = x.to(next(network.parameters(), x))  # its device and dtype
                try:
                    if arm == "recast":
                        output, described, said = record_maps(network, x, classes, outputs)
                        layers = tuple(layer for layer, _ in described)
                        picture.maps.append({layer.name: maps for layer, maps in described})
                        left_out |= dict.fromkeys(said)
                    else:
                        with in_eval(network), torch.no_grad():
                            output = network(x)
                except RecastError:
                    raise
                except (AssertionError, RuntimeError, ValueError) as error:
                    which = f"the network ({arm})" if len(networks) > 1 else "the network"
                    height, width = x.shape[-2:]
                    raise RecastError(
                        f"{which} cannot take an image of {height}×{width} pixels: {first_line(error)}"
                    ) from None
                seen[arm] = x, output
            best = {arm: likeliest(output, classes, TOP, outputs) for arm, (_, output) in seen.items()}
            picture.predictions.append({arm: found for arm, found in best.items() if found})
            if cams := _grad_cam(networks, seen, best, arms, outputs):
                layers = (*layers, cams[0])
                picture.maps[-1][cams[0].name] = cams[1]
        done.append(State(epoch, layers))
        order = _merged(order, [layer.name for layer in layers])
    return Scene(title, dict(arms), tuple(done), tuple(pictures), (*notes, *left_out), tuple(about), tuple(order))


def _grad_cam(
    networks: Mapping[str, nn.Module], seen: Mapping[str, tuple[Tensor, Any]],
    best: Mapping[str, Sequence[Prediction]], arms: Mapping[str, str], outputs: Outputs | None,
) -> Described | None:  # fmt: skip
    """Grad-CAM of the classes that are the likeliest of the network shown, in every arm that has as many outputs."""
    chosen = best["recast"][:TOP_CLASSES]
    numbers = [one.number for one in chosen]
    maps, names = {}, {}
    for arm, (x, output) in seen.items():
        if not chosen or not best[arm] or output.dim() != 2 or output.shape != seen["recast"][1].shape:
            continue
        found = grad_cam(networks[arm], x, torch.tensor([numbers], device=x.device))
        if found is not None:
            maps[arm], shares = found, read_outputs(output, outputs)[0][0, numbers].tolist()
            who = f"{arms[arm]}: " if len(arms) > 1 else ""
            names[arm] = [f"{who}{called(one._replace(probability=p))}" for one, p in zip(chosen, shares, strict=True)]
    return cam_layer(maps, names) if maps else None


def _bytes(pixels: Tensor) -> Any:
    return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def _merged(order: list[str], names: list[str]) -> list[str]:
    """`order` with names that it lacks put before the next one that it has: layers that are attention later only."""
    merged = list(order)
    for index, name in enumerate(names):
        if name not in merged:
            after = next((merged.index(later) for later in names[index + 1 :] if later in merged), len(merged))
            merged.insert(after, name)
    return merged
