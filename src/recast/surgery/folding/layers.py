"""What one layer becomes: a convolution, a larger convolution, or a layer without the maps that are closed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from recast.layers.functional.operands import fold_value
from recast.layers.geometry import Geometry, convolution
from recast.layers.gpsa import GPSA
from recast.surgery.plan import Fold


@torch.no_grad()
def fold_layer(layer: GPSA, tol: float = 0.0, kernel: int | None = None) -> nn.Module:
    """`layer` itself without the maps whose gate is within `tol`, or the convolution it is then; W_val multiplied out.

    linear: Gaussian maps with |s| ≤ tol and content maps with |γ| ≤ tol are removed; without any, the layer is a
    convolution. sigmoid: content maps with 1 − σ(λ) ≤ tol are removed. With `kernel`, a layer without content becomes a
    convolution with a kernel of that many rows and columns (`larger_kernel`). At tol = 0, without `kernel`, the
    function is the same to rounding.
    """
    layer.close_maps_(tol)
    wider = None if kernel is None or layer.content_heads else larger_geometry(layer.geometry, kernel)
    if wider is None or not layer.gaussian_heads:
        return layer.fold()
    weight, trained = layer.kernel_in_eval()
    return convolution(wider, larger_kernel(layer, weight, wider), layer.bias, layer.groups, trained).train(
        layer.training
    )


def larger_geometry(geometry: Geometry, kernel: int) -> Geometry | None:
    """The same convolution seen as one with `kernel` × `kernel` undilated taps around the same anchor; None if it
    cannot be: a smaller kernel, a transposed one, or padding that is not a number of zeros."""
    if geometry.is_transposed or geometry.same or geometry.padding_mode != "zeros":
        return None
    before = [kernel // 2 - anchor for anchor in geometry.anchor]
    after = [kernel - 1 - kernel // 2 - (r - anchor) for r, anchor in zip(geometry.reach, geometry.anchor, strict=True)]
    if kernel % 2 == 0 or min(before + after) < 0:
        return None
    top, bottom, left, right = geometry.padding
    padding = (top + before[0], bottom + after[0], left + before[1], right + after[1])
    return Geometry((kernel, kernel), geometry.stride, padding)


@torch.no_grad()
def larger_kernel(layer: GPSA, weight: Tensor, wider: Geometry) -> Tensor:
    """Σ_h (shift_h·[δ = Δ_h tap] + gaussian_h·g_h(δ)) W_val W_out^h for the taps δ of `wider`, (O, C/g, rows, columns).

    g_h is the head's Gaussian over these taps alone, its sum one. What lies outside is lost, and near the border, where
    the layer's Gaussian keeps to the tokens there are, the convolution looks at zeros.
    """
    w = layer.weights()
    taps = fold_value(weight, w.value, layer.groups).flatten(2)
    offsets = torch.tensor(wider.offsets(), device=taps.device)
    shares = w.alpha.new_zeros(layer.num_heads, wider.num_heads)
    distance = (offsets - w.center[:, None].to(w.alpha.dtype)).square().sum(-1)
    gaussian = torch.softmax(-w.alpha[:, None] * distance, dim=-1) * w.gates.gaussian[:, None].to(w.alpha.dtype)
    shares[list(w.with_gaussian())] = gaussian
    if w.gates.shift is not None:
        own = torch.tensor(layer.geometry.offsets(), device=taps.device)
        hits = (own[:, None] == offsets).all(-1)
        shares += hits.to(shares.dtype) * w.gates.shift[:, None].to(shares.dtype)
    kernel = taps.to(shares.dtype) @ shares
    return kernel.to(taps.dtype).unflatten(-1, wider.kernel).contiguous()


def describe(layer: nn.Module, batch_norm: str | None = None) -> Fold:
    """What a replay must know of a folded layer."""
    if isinstance(layer, GPSA):
        return Fold(False, layer.geometry.kernel, layer.gaussian_heads, layer.content_heads, layer.value is not None,
                    batch_norm)  # fmt: skip
    conv: Any = layer[-1] if isinstance(layer, nn.Sequential) else layer
    return Fold(True, tuple(conv.kernel_size), (), (), False, batch_norm)


def as_folded(layer: GPSA, fold: Fold) -> nn.Module:
    """`layer` in the form that `fold` describes, for weights to be loaded into."""
    if not fold.convolution:
        layer.prune_(fold.gaussian_heads, fold.content_heads)
        if not fold.value:
            layer.value = None
        return layer
    if fold.kernel == layer.geometry.kernel:
        return layer.to_conv()
    wider = larger_geometry(layer.geometry, fold.kernel[0])
    assert wider is not None, f"{layer.geometry} has no {fold.kernel} form"
    weight = layer.weight.new_zeros(*layer.weight.shape[:2], *wider.kernel)
    return convolution(wider, weight, layer.bias, layer.groups).train(layer.training)
