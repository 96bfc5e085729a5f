"""`explain`: pages of what attends to what: a clicked query pixel in every head, a class in the image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from recast.errors import RecastError
from recast.explain.pictures import Input, read_image
from recast.explain.predictions import ranked
from recast.explain.record_maps import record_maps
from recast.explain.scene import Picture, Prediction, Scene, State
from recast.explain.write import check_target, write_pages
from recast.models.build import input_defaults
from recast.tracing.hooks import in_eval

TOP = 5
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ARMS = {"parent": "Parent", "finetuned": "Parent, fine-tuned", "recast": "Recast"}


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
) -> Path:
    """Write a self-contained HTML page of what `model` attends to in an image; returns its path.

        recast.explain.make.explain(child, "cat.jpg", against={"parent": parent})

    image: a file, a PIL image, or pixels (3, height, width) in [0, 1], which are taken as they are.
    classes: names of the outputs; without them their numbers. mean, std: the normalisation; without them the network's
    own (timm's), or ImageNet's. size: what the image is resized and cropped to, side or (height, width); without it the
    network's own, or 224. against: networks whose predictions stand beside it ("parent", "finetuned", or any name).

    Shown are recast layers, attention pools and the attention of transformers (timm's, torchvision's); a model with
    none of these has a page too: its predictions, and that there are no maps. Models are run in eval mode, without
    gradients, and left as they were. Raises `RecastError` for an image that cannot be read, a model that cannot take
    it, or nowhere to write.
    """
    check_target(Path(out))
    defaults = input_defaults(model)
    mean = mean or (defaults.mean if defaults else IMAGENET[0])
    std = std or (defaults.std if defaults else IMAGENET[1])
    side = size or (defaults.img_size if defaults else 224)
    shape = (side, side) if isinstance(side, int) else side
    shown = _input(image, shape, classes or ())
    arms = {**(against or {}), "recast": model}
    names = {arm: ARMS.get(arm, arm) for arm in arms}
    scene = make_scene(
        title or f"{type(model).__name__} on {shown.name}",
        [shown],
        [(None, arms)],
        classes,
        (mean, std),
        names if against else {"recast": "Model"},
    )
    return write_pages(scene, Path(out), together=True)[0]


def make_scene(
    title: str,
    inputs: Sequence[Input],
    states: Iterable[tuple[int | None, Mapping[str, nn.Module]]],
    classes: Sequence[str] | None,
    normalisation: tuple[Sequence[float], Sequence[float]],
    arms: Mapping[str, str],
    notes: Sequence[str] = (),
    facts: Sequence[tuple[str, str]] = (),
) -> Scene:
    """Run every image through the networks of every state; of the arm "recast" the maps are kept.

    states: (epoch, arms), the earliest first; may be a generator that loads one after the other.
    """
    made: list[State] = []
    predictions: list[list[dict[str, tuple[Prediction, ...]]]] = [[] for _ in inputs]
    maps: list[list[dict[str, Any]]] = [[] for _ in inputs]
    order: list[str] = []
    left_out: dict[str, None] = {}
    for epoch, networks in states:
        layers: tuple[Any, ...] = ()
        for index, shown in enumerate(inputs):
            outputs = {}
            for arm, network in networks.items():
                normalised = _normalised(shown.pixels[None], normalisation, network)
                with _takes(f" ({arm})" if len(networks) > 1 else "", shown.pixels):
                    if arm == "recast":
                        outputs[arm], layers, stored, said = record_maps(network, normalised, classes)
                        maps[index].append(stored)
                        left_out |= dict.fromkeys(said)
                    else:
                        with in_eval(network), torch.no_grad():
                            outputs[arm] = network(normalised)
            best = {arm: ranked(output, classes, TOP) for arm, output in outputs.items()}
            predictions[index].append({arm: tuple(one[1:] for one in found) for arm, found in best.items() if found})
        made.append(State(epoch, layers))
        order = _merged(order, [layer.name for layer in layers])
    pictures = [
        Picture(shown.name, _bytes(shown.pixels), shown.label, shown.notes, tuple(p), tuple(m))
        for shown, p, m in zip(inputs, predictions, maps, strict=True)
    ]
    return Scene(title, dict(arms), tuple(made), tuple(pictures), (*notes, *left_out), tuple(facts), tuple(order))


def _input(
    image: str | Path | Image.Image | Tensor, size: tuple[int, int], classes: Sequence[str], name: str = "the image"
) -> Input:
    if isinstance(image, Tensor):
        if image.dim() != 3 or image.shape[0] != 3 or not image.is_floating_point():
            raise RecastError(
                f"an image must be a file, a PIL image, or pixels (3, height, width) in [0, 1], got a tensor "
                f"{tuple(image.shape)} of {image.dtype}"
            )
        return Input(name, image)
    return read_image(image if isinstance(image, Image.Image) else Path(image), size, classes)


def _normalised(pixels: Tensor, normalisation: tuple[Sequence[float], Sequence[float]], network: nn.Module) -> Tensor:
    """(x − mean) / std, on the network's device and in its dtype."""
    mean, std = (torch.tensor(tuple(values)).view(-1, 1, 1) for values in normalisation)
    normalised = (pixels - mean) / std
    parameter = next(network.parameters(), normalised)
    return normalised.to(parameter)


@contextmanager
def _takes(arm: str, pixels: Tensor) -> Iterator[None]:
    """What a network says of a size that it cannot take, as one line."""
    try:
        yield
    except RecastError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        height, width = pixels.shape[-2:]
        raise RecastError(f"the network{arm} cannot take an image of {height}×{width} pixels: {reason}") from None


def _bytes(pixels: Tensor) -> NDArray[np.uint8]:
    return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()


def _merged(order: list[str], names: list[str]) -> list[str]:
    """`order` with names that it lacks put before the next one that it has: layers that are attention later only."""
    merged = list(order)
    for index, name in enumerate(names):
        if name not in merged:
            after = next((merged.index(later) for later in names[index + 1 :] if later in merged), len(merged))
            merged.insert(after, name)
    return merged
