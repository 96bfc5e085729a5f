import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast import GPSA, AttentionBeside, RecastConfig, plan, recast_

GATES: list[dict[str, Any]] = [
    {"gate": "beside"},
    {"gate": "linear"},
    {"gate": "sigmoid"},
    {"gate": "bias", "bias_init": 4.0},
]


def every_geometry() -> nn.Sequential:
    """Strides, dilation, even and asymmetric kernels, groups, reflection, a transposed convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 2, padding="same", groups=3),
        nn.ReLU(),
        nn.Conv2d(6, 4, (1, 3), padding=(0, 1), padding_mode="reflect"),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, dilation=2, padding=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def recast_network(open_gates: Any, **config: Any) -> nn.Sequential:
    """`every_geometry` recast for images of 12×14, with open gates."""
    model = every_geometry()
    if config.get("gate") == "bias":
        model[6] = nn.Conv2d(4, 4, 1)
    recast_(model, plan(model, torch.zeros(1, 3, 12, 14), RecastConfig(**config), where="all"))
    for seed, layer in enumerate(model):
        if isinstance(layer, GPSA):
            open_gates(layer, seed)
        elif isinstance(layer, AttentionBeside):
            torch.nn.init.constant_(layer.gamma, 0.5)
    return model


def on_pixels(layer: Any, maps: Tensor, x: Tensor) -> np.ndarray:
    """A layer's maps of all queries, (H, I, J, Y, X) over the real pixels."""
    size = x.shape[-2:]
    if isinstance(layer, AttentionBeside):
        return maps[0].unflatten(-1, size).unflatten(1, queries_beside(layer, x)).detach().numpy()
    at_rows, at_columns = layer.geometry.pixels(*size)
    queries = [len(at) for at in layer.geometry.query_positions(*size)]
    grid = maps[0].unflatten(-1, layer.geometry.padded_size(*size))[..., at_rows, at_columns]
    return grid.unflatten(1, queries).detach().numpy()


def queries_beside(layer: AttentionBeside, x: Tensor) -> tuple[int, int]:
    """Rows and columns of the queries that a page has: of a larger output a query for each pixel of the input."""
    (rows, columns), (height, width) = layer.conv(x).shape[2:], x.shape[2:]
    return min(rows, height), min(columns, width)


def mix_of(layer: Any, x: Tensor) -> np.ndarray:
    """The whole attention of a layer, as `on_pixels` gives it; beside a convolution the content map."""
    if isinstance(layer, AttentionBeside):
        return on_pixels(layer, layer.attention(x, queries_beside(layer, x)), x)
    maps = layer.attention(x)
    return on_pixels(layer, maps.mix if isinstance(layer, GPSA) else maps, x)


def data_of(path: Path) -> Any:
    """The data of a page."""
    (text,) = re.findall(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return json.loads(text)
