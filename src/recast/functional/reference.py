"""The definition of the layer, head by head, every map written out. Slow, and kept: the others are compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from recast.functional.maps import CONTENT_MAPS, gaussian_map, shift_map
from recast.functional.weights import Weights, block_diagonal, expand_heads
from recast.geometry import Geometry


def reference(
    x: Tensor,
    w: Weights,
    geometry: Geometry,
    groups: int = 1,
    attend_padding: bool = False,
    content: str = "softmax",
) -> Tensor:
    """y = b + Σ_h A_h X W_val W_out^h, (B, C, height, width) → (B, O, I, J)."""
    w = expand_heads(w, geometry)
    height, width = x.shape[-2:]
    tokens = geometry.pad(x).flatten(2).transpose(1, 2)
    values = tokens if w.value is None else tokens @ block_diagonal(w.value, groups).T
    S = shift_map(geometry, height, width, x)
    G = gaussian_map(w.center, w.alpha, geometry, height, width).to(x.dtype)
    C = CONTENT_MAPS[content](x, w.query, w.key, w.num_heads, geometry, attend_padding)
    output = torch.zeros((), dtype=x.dtype, device=x.device)
    for h, tap in enumerate(w.weight.flatten(2).unbind(-1)):
        A = w.gates.gaussian[h] * G[h] + w.gates.content[h] * C[:, h]
        if w.gates.shift is not None:
            A = A + w.gates.shift[h] * S[h]
        output = output + A @ values @ block_diagonal(tap, groups).T
    if w.bias is not None:
        output = output + w.bias
    return output.transpose(1, 2).unflatten(-1, geometry.output_size(height, width))
