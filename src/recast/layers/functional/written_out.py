"""The forms that write every map out: `reference`, the definition head by head, and `dense`, two products.

Both hold all B·H·N·M numbers of the maps and have derivatives of any order. `reference` is slow, and kept: everything
is compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recast.layers.functional.maps import CONTENT_MAPS, attention_maps, gaussian_map, shift_map
from recast.layers.functional.weights import Weights, block_diagonal, expand_heads, project_out, project_values
from recast.layers.geometry import Geometry


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


def gather(
    x: Tensor,
    w: Weights,
    geometry: Geometry,
    groups: int = 1,
    attend_padding: bool = False,
    content: str = "softmax",
) -> Tensor:
    """What every head gathers from the shared values, A_h X W_val: (B, C, H, I, J).

    A convolution gathers the pixel under each tap (im2col); here the gather is a mix of attention maps.
    """
    mix = attention_maps(x, w, geometry, attend_padding, content).mix
    values = geometry.pad(project_values(x, w.value, groups)).flatten(2)
    gathered = values @ mix.to(values.dtype).flatten(1, 2).transpose(-1, -2)
    return gathered.unflatten(-1, (w.num_heads, *geometry.output_size(*x.shape[-2:])))


def dense(
    x: Tensor,
    w: Weights,
    geometry: Geometry,
    groups: int = 1,
    attend_padding: bool = False,
    content: str = "softmax",
) -> Tensor:
    """One product of the merged maps with the shared values, one product with W_out.

    The second step is a convolution's own: a 1×1 product with the kernel's C/g · H columns. Holds B·H·N·M numbers.
    """
    gathered = gather(x, w, geometry, groups, attend_padding, content)
    return project_out(gathered, w.weight.flatten(2), w.bias, groups)
