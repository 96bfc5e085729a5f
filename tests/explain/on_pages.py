"""What several tests of pages share: a network of every geometry, its maps over the pixels, the data of a page."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast import GPSA, RecastConfig, plan, recast_
from recast.lab.explain.inputs import Input
from recast.lab.explain.make import make_scene
from recast.lab.explain.scene import Layer, Maps, Scene

CONFIGS: list[dict[str, Any]] = [{}, {"gate": "sigmoid"}, {"gate": "bias", "bias_init": 4.0}]


def every_geometry() -> nn.Sequential:
    """Strides, dilation, even and asymmetric kernels, groups, reflection, a transposed convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 2, padding="same", groups=3), nn.ReLU(),
        nn.Conv2d(6, 4, (1, 3), padding=(0, 1), padding_mode="reflect"), nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1), nn.ReLU(),
        nn.Conv2d(4, 4, 3, dilation=2, padding=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def recast_network(open_gates: Callable[..., GPSA], **config: Any) -> nn.Sequential:
    """`every_geometry` recast for images of 12×14, with open gates."""
    model = every_geometry()
    if config.get("gate") == "bias":
        model[6] = nn.Conv2d(4, 4, 1)
    recast_(model, plan(model, torch.zeros(1, 3, 12, 14), RecastConfig(**config), where="all"))
    for seed, layer in enumerate(model):
        if isinstance(layer, GPSA):
            open_gates(layer, seed)
    return model


def scene_of(model: nn.Module, image: Tensor, **fields: Any) -> Scene:
    """A page of one network and one image, which is not normalised."""
    networks = {"recast": model}
    return make_scene(
        "x", [Input("x.png", image)], networks, None, ((0,) * 3, (1,) * 3), {"recast": "Recast"}, **fields
    )


def on_pixels(layer: Any, maps: Tensor, x: Tensor) -> np.ndarray:
    """A layer's maps of all queries, (H, I, J, Y, X) over the real pixels."""
    size = x.shape[-2:]
    at_rows, at_columns = layer.geometry.pixels(*size)
    queries = [len(at) for at in layer.geometry.query_positions(*size)]
    grid = maps[0].unflatten(-1, layer.geometry.padded_size(*size))[..., at_rows, at_columns]
    return grid.unflatten(1, queries).detach().numpy()


def mix_of(layer: Any, x: Tensor) -> np.ndarray:
    """A of a layer, as `on_pixels` gives it."""
    maps = layer.attention(x)
    return on_pixels(layer, maps.mix if isinstance(layer, GPSA) else maps, x)


def data_of(path: Path) -> Mapping[str, Any]:
    """The data of a page."""
    return data_in(path.read_text(encoding="utf-8"))


def data_in(page: str) -> Mapping[str, Any]:
    (found,) = re.findall(r'id="data">(.*?)</script>', page, flags=re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def weights_of(layer: Layer, maps: Maps, head: int, query: tuple[int, int] = (0, 0)) -> np.ndarray:
    """The weights (Y, X) of a head for a query that is stored, as assets/maps.js computes them from a scene."""
    down, right = (np.arange(len(axis)) // maps.pool for axis in layer.keys)
    stored = maps.values[head, maps.rows.index(query[0]), maps.columns.index(query[1])]
    weights = (stored / (np.bincount(down)[:, None] * np.bincount(right)))[down][:, right]
    if layer.content is None or layer.gaussian is None or layer.center is None or layer.alpha is None:
        return weights
    place = [axis[index] for axis, index in zip(layer.queries, query, strict=True)]
    axes = []
    for axis, keys in enumerate(layer.keys):
        shares = np.exp(
            -layer.alpha[head] * (np.arange(layer.padded[axis]) - place[axis] - layer.center[head, axis]) ** 2
        )
        axes.append((shares / shares.sum())[keys])
    weights = layer.content[head] * weights + layer.gaussian[head] * np.outer(*axes)
    row, column = (at + offset for at, offset in zip(place, layer.offsets[head], strict=True))
    if layer.shift is not None and row in layer.keys[0] and column in layer.keys[1]:
        weights[layer.keys[0].index(row), layer.keys[1].index(column)] += layer.shift[head]
    return weights
