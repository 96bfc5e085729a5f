"""Merge the three maps of every head, then two products: a convolution by im2col whose gather is attention."""

from __future__ import annotations

from torch import Tensor

from recast.functional.maps import attention_maps
from recast.functional.weights import Weights, project_out, project_values
from recast.geometry import Geometry


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
