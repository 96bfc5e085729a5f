"""Attention with a relative bias: an independent implementation with loops, and the fast form on random geometries."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recast.layers.cmhsa import CMHSA
from recast.layers.functional.relative_bias import (
    BiasedWeights,
    bias_map,
    biased,
    biased_maps,
    biased_reference,
    fused_attention,
    offset_ranges,
    shared_values_attention,
)  # fmt: skip
from recast.layers.geometry import Geometry
from recast.run.config import RecastConfig
from recast.surgery.rules import find_rule

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

NUM_GEOMETRIES = int(os.environ.get("RECAST_NUM_GEOMETRIES", "50"))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
Array = NDArray[np.float64]


def layer_for(conv: nn.Conv2d, x: Tensor, seed: int = 0, **config: Any) -> CMHSA:
    """The layer of a convolution, sized for `x`, every parameter moved off its start."""
    found = find_rule(conv)
    assert found is not None
    layer = found[1](conv, RecastConfig(gate="bias", **config))
    assert isinstance(layer, CMHSA)
    layer.set_size_(*x.shape[-2:])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in (layer.value, layer.query, layer.key, layer.relative_bias):
            if parameter is not None:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.5 * noise.to(parameter.dtype))
    return layer


# --- a second reference that shares no code with the first ----------------------------------------------------------


def numpy_cmhsa(x: Array, conv: nn.Conv2d, layer: CMHSA, pad: int) -> Array:
    """One image (C, H, W) → (O, I, J), from the formulas with loops over output pixels and heads; zero padding."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    (rows, columns), stride, dilation = conv.kernel_size, conv.stride[0], conv.dilation[0]
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
    height, width = padded.shape[1:]
    out_rows = (height - dilation * (rows - 1) - 1) // stride + 1
    out_columns = (width - dilation * (columns - 1) - 1) // stride + 1
    c0, c1 = dilation * (rows - 1) // 2, dilation * (columns - 1) // 2
    low0, low1 = -(c0 + (out_rows - 1) * stride), -(c1 + (out_columns - 1) * stride)
    groups, dim = conv.groups, layer.head_dim
    values = padded if layer.value is None else np.zeros_like(padded)
    if layer.value is not None:
        size = x.shape[0] // groups
        for g in range(groups):
            block = slice(g * size, (g + 1) * size)
            values[block] = np.einsum("ij,jhw->ihw", p["value"][block], padded[block])
    y = np.zeros((conv.out_channels, out_rows, out_columns))
    for i in range(out_rows):
        for j in range(out_columns):
            at = (i * stride + c0, j * stride + c1)
            for h in range(rows * columns):
                head = slice(h * dim, (h + 1) * dim)
                q = p["query"][head] @ padded[:, at[0], at[1]]
                weights = np.zeros((height, width))
                for r in range(height):
                    for s in range(width):
                        k = p["key"][head] @ padded[:, r, s]
                        entry = p["relative_bias"][h, r - at[0] - low0, s - at[1] - low1]
                        weights[r, s] = math.exp(q @ k / math.sqrt(dim) + entry)
                gathered = (values * weights / weights.sum()).sum((1, 2))
                tap = p["weight"][:, :, h // columns, h % columns]
                o, c = conv.out_channels // groups, x.shape[0] // groups
                for g in range(groups):
                    y[g * o : (g + 1) * o, i, j] += tap[g * o : (g + 1) * o] @ gathered[g * c : (g + 1) * c]
    return y + (p["bias"][:, None, None] if "bias" in p else 0)


CASES: list[dict[str, Any]] = [
    {"padding": 1},
    {"padding": 1, "stride": 2},
    {"padding": 2, "dilation": 2, "groups": 2, "bias": False},
    {"padding": 0, "groups": 4},
]


@pytest.mark.parametrize("function", [biased_reference, biased])
@pytest.mark.parametrize("options", CASES)
def test_both_forms_are_the_loops(function: Callable[..., Tensor], options: dict[str, Any]) -> None:
    conv, x = nn.Conv2d(4, 4, 3, **options).double(), torch.randn(1, 4, 5, 6, dtype=torch.float64)
    layer = layer_for(conv, x, bias_init=2.0)
    y = function(x, layer.weights(5, 6))[0].detach().numpy()
    expected = numpy_cmhsa(x[0].numpy(), conv, layer, options["padding"])
    assert y.shape == expected.shape
    assert float(np.abs(y - expected).max()) < 1e-12


# --- random geometries ------------------------------------------------------------------------------------------------


def forms(case: Any) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Output and gradients of the reference and of the fast form; gradients are those of a random projection."""
    layer = layer_for(case.conv, case.x, bias_init=3.0)
    for function in (biased_reference, biased):
        x = case.x.clone().requires_grad_()
        y = function(x, layer.weights(*x.shape[-2:]))
        parameters = [p for p in layer.parameters() if p.numel()]
        torch.manual_seed(1)
        yield y, list(torch.autograd.grad((y * torch.randn(y.shape, dtype=y.dtype)).sum(), [x, *parameters]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fast_form_is_the_reference(dtype: torch.dtype, random_case: Any, error_of: Any) -> None:
    for seed in range(NUM_GEOMETRIES):
        case = random_case(seed, dtype)
        (y, grads), (backends, fast_grads) = forms(case)
        assert error_of(backends, y) <= TOLERANCE[dtype], case.text
        for fast_grad, grad in zip(fast_grads, grads, strict=True):
            # one key, one tap: the softmax is a constant, and both gradients are rounding
            scale = max(float(grad.abs().max()), 1e-3 if dtype == torch.float64 else 1.0)
            assert float((fast_grad - grad).abs().max()) <= TOLERANCE[dtype] * scale, case.text


def test_the_start_is_the_convolution_in_the_limit(random_case: Any, error_of: Any) -> None:
    for seed in range(NUM_GEOMETRIES):
        case = random_case(seed)
        found = find_rule(case.conv)
        assert found is not None
        layer: Any = found[1](case.conv, RecastConfig(gate="bias", bias_init=60.0))
        layer.set_size_(*case.x.shape[-2:])
        assert error_of(layer(case.x), case.conv(case.x)) <= 1e-10, case.text


# --- parts ------------------------------------------------------------------------------------------------------------


def test_offsets_and_windows() -> None:
    geometry = Geometry((3, 3), (2, 1), (1, 1, 1, 1))
    rows, columns = offset_ranges(geometry, 4, 3)  # padded 6×5, anchors at rows 1, 3 and columns 1, 2, 3
    assert (rows, columns) == (range(-3, 5), range(-3, 4))
    table = torch.arange(8 * 7.0).view(1, 8, 7)
    B = bias_map(table, geometry, 4, 3)
    assert B.shape == (1, 6, 30)
    for query, at in enumerate([(1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (3, 3)]):
        for key in range(30):
            row, column = key // 5 - at[0], key % 5 - at[1]
            assert float(B[0, query, key]) == (row + 3) * 7 + column + 3


def test_fused_attention_is_the_shared_one(error_of: Any) -> None:
    """What runs on a GPU, here by torch's reference implementation."""
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 6, 5)
    values, bias = torch.randn(2, 6, 7), torch.randn(3, 4, 6)
    assert error_of(fused_attention(q, k, values, bias), shared_values_attention(q, k, values, bias)) < 1e-6


def test_maps_are_what_the_layer_does(error_of: Any) -> None:
    conv, x = nn.Conv2d(3, 2, 3, padding=1).double(), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    layer = layer_for(conv, x, bias_init=2.0)
    w: BiasedWeights = layer.weights(4, 5)
    maps = biased_maps(x, w)
    assert [len(m) for m in maps] == [1, 2, 2]
    for m in maps:
        assert m.shape[1:] == (9, 20, 42)
        torch.testing.assert_close(m.sum(-1), torch.ones_like(m.sum(-1)))
    product = maps.position * maps.content  # one softmax of the sum of both logits
    torch.testing.assert_close(maps.mix, product / product.sum(-1, keepdim=True))
    values = layer.geometry.pad(torch.einsum("ij,bjhw->bihw", w.value, x)).flatten(2)  # type: ignore[arg-type]
    y = torch.einsum("bhnm,bcm,och->bon", maps.mix, values, w.weight.flatten(2)).unflatten(-1, (4, 5))
    assert error_of(y + w.bias[:, None, None], layer(x)) < 1e-12  # type: ignore[index]
