"""Which form of a layer is cheapest: a model of their costs, in multiply-accumulates weighed by what they take."""

from __future__ import annotations

from typing import Literal

from recast.layers.geometry import Geometry

Form = Literal["split", "merged"]

PRODUCT = 1.3
"""Time of a matrix product against a convolution of as many multiply-accumulates (results/layer.csv, CPU)."""


def choose_backend(geometry: Geometry, groups: int, opened: int, has_shift: bool) -> Form:
    """`split` or `merged` for a layer of which `opened` heads have a Gaussian or a content map.

    What a head gathers costs the same in both. `split` convolves with all H taps and projects the open heads' gathers;
    `merged` projects all heads' gathers by a matrix product, which is slower than a convolution: H + PRODUCT · opened
    against PRODUCT · H. Grouped and transposed layers, where products are small, are always split.
    """
    heads = geometry.num_heads
    if groups > 1 or geometry.is_transposed or not has_shift:
        return "split"
    return "merged" if PRODUCT * heads < heads + PRODUCT * opened else "split"
