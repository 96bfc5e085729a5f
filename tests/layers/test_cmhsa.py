"""The C-MHSA layer against `nn.Conv2d` and loops in NumPy, its fast form, its table of biases."""

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from layer_helpers import PAD_1, InCode, outputs_and_gradients
from numpy.typing import NDArray
from torch import Tensor, nn

from recast import CMHSA, RecastConfig, RecastError
from recast.layers.functional import relative_bias
from recast.layers.functional.relative_bias import biased, biased_maps, biased_reference, offset_ranges
from recast.surgery.rules import convert

NUM_GEOMETRIES = int(os.environ.get("RECAST_NUM_GEOMETRIES", "50"))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
Array = NDArray[np.float64]


def layer_of(conv: nn.Module, size: tuple[int, int], **config: Any) -> CMHSA:
    layer: Any = convert(conv, RecastConfig(gate="bias", **config))
    layer.set_size_(*size)
    return layer


def moved(layer: CMHSA) -> CMHSA:
    """The layer with every parameter but kernel and bias off its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (layer.value, layer.query, layer.key, layer.relative_bias):
            if parameter is not None:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.5 * noise.to(parameter.dtype))
    return layer


def numpy_cmhsa(x: Array, conv: nn.Conv2d, layer: CMHSA, pad: int) -> Array:
    """One image (C, H, W) → (O, I, J), from the formulas with loops over output pixels and heads; 3×3, zero padding."""
    p = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    stride, dilation, groups, dim = conv.stride[0], conv.dilation[0], conv.groups, layer.head_dim

    def in_blocks(matrix: Array, vectors: Array) -> Array:
        """Every group's rows of (·, C/g) times its channels of (C, …)."""
        pairs = zip(np.split(matrix, groups), np.split(vectors, groups), strict=True)
        return np.concatenate([np.tensordot(block, vector, 1) for block, vector in pairs])

    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
    height, width = padded.shape[1:]
    rows, columns = ((n - 2 * dilation - 1) // stride + 1 for n in (height, width))
    values = padded if layer.value is None else in_blocks(p["value"], padded)
    queries, keys = (np.tensordot(p[name], padded, 1) for name in ("query", "key"))
    y = np.zeros((conv.out_channels, rows, columns))
    for i, j, h in np.ndindex(rows, columns, 9):
        row, column, head = i * stride + dilation, j * stride + dilation, slice(h * dim, (h + 1) * dim)
        # offsets from this query begin at −row and −column, the table's at those of the last query
        top, left = (rows - 1 - i) * stride, (columns - 1 - j) * stride
        biases = p["relative_bias"][h, top : top + height, left : left + width]
        weights = np.exp(np.tensordot(queries[head, row, column], keys[head], 1) / math.sqrt(dim) + biases)
        gathered = (values * weights / weights.sum()).sum((1, 2))
        y[:, i, j] += in_blocks(p["weight"][:, :, h // 3, h % 3], gathered)
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
    layer = moved(layer_of(conv, (5, 6), bias_init=2.0))
    y = function(x, layer.weights(5, 6))[0].detach().numpy()
    expected = numpy_cmhsa(x[0].numpy(), conv, layer, options["padding"])
    assert y.shape == expected.shape
    assert float(np.abs(y - expected).max()) < 1e-12


def in_form(form: Callable[..., Tensor], layer: CMHSA) -> InCode:
    return InCode(lambda m, x: form(x, m.layer.weights(*x.shape[-2:])), layer=layer)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fast_form_is_the_reference(dtype: torch.dtype, random_case: Any, error_of: Any) -> None:
    for seed in range(NUM_GEOMETRIES):
        case = random_case(seed, dtype)
        layer = moved(layer_of(case.conv, case.x.shape[-2:], bias_init=3.0))
        expected = outputs_and_gradients(in_form(biased_reference, layer), case.x)
        measured = outputs_and_gradients(in_form(biased, layer), case.x)
        assert error_of(measured.pop("output"), expected.pop("output")) <= TOLERANCE[dtype], case.text
        for name, gradient in expected.items():
            # one key, one tap: the softmax is a constant, and both gradients are rounding
            scale = max(float(gradient.abs().max()), 1e-3 if dtype == torch.float64 else 1.0)
            assert float((measured[name] - gradient).abs().max()) <= TOLERANCE[dtype] * scale, case.text


def test_the_start_is_the_convolution_in_the_limit(random_case: Any, error_of: Any) -> None:
    for seed in range(NUM_GEOMETRIES):
        case = random_case(seed)
        layer = layer_of(case.conv, case.x.shape[-2:], bias_init=60.0)
        assert error_of(layer(case.x), case.conv(case.x)) <= 1e-10, case.text


def test_the_table_holds_the_positions_of_t_cnns_eq_3(error_of: Any) -> None:
    """v_posᵀ r_δ = −α(‖δ‖² − 2 Δ·δ), Eq. 4: without content the convolution for a large α."""
    conv, x = nn.Conv2d(4, 4, 3, padding=1).double(), torch.randn(2, 4, 5, 6, dtype=torch.float64)
    layer = layer_of(conv, (5, 6))
    rows, columns = (torch.arange(s.start, s.stop) for s in offset_ranges(layer.geometry, 5, 6))
    with torch.no_grad():
        for head, (row, column) in enumerate(layer.geometry.offsets()):
            squares = rows[:, None] ** 2 + columns**2
            layer.relative_bias[head] = -60.0 * (squares - 2 * (row * rows[:, None] + column * columns))
    assert error_of(layer(x), conv(x)) <= 1e-10


def test_fused_attention_is_the_one_written_out(error_of: Any) -> None:
    """What runs on a GPU, here by torch's reference implementation."""
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    values, bias = torch.randn(2, 6, 7), torch.randn(3, 4, 6)
    fused, written_out = relative_bias.fused_attention, relative_bias.written_out_attention
    assert error_of(fused(q, k, values, bias), written_out(q, k, values, bias)) < 1e-6


def test_maps_are_what_the_layer_does(error_of: Any) -> None:
    conv, x = nn.Conv2d(3, 2, 3, padding=1).double(), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    layer = moved(layer_of(conv, (4, 5), bias_init=2.0))
    w = layer.weights(4, 5)
    maps = biased_maps(x, w)
    assert [len(m) for m in maps] == [1, 2, 2]
    for m in maps:
        assert m.shape[1:] == (9, 20, 42)
        torch.testing.assert_close(m.sum(-1), torch.ones_like(m.sum(-1)))
    product = maps.position * maps.content  # one softmax of the sum of both logits
    torch.testing.assert_close(maps.mix, product / product.sum(-1, keepdim=True))
    values = layer.geometry.pad(torch.einsum("ij,bjhw->bihw", w.value, x)).flatten(2)
    y = torch.einsum("bhnm,bcm,och->bon", maps.mix, values, w.weight.flatten(2)).unflatten(-1, (4, 5))
    assert error_of(y + w.bias[:, None, None], layer(x)) < 1e-12


def test_there_and_back() -> None:
    for conv in (
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 4, (2, 5), stride=(2, 1), padding=(0, 3), groups=2, bias=False),
        nn.Conv2d(6, 6, 3, padding="same", dilation=2, groups=6, padding_mode="reflect"),
    ):
        back = layer_of(conv, (9, 9)).to_conv()
        assert isinstance(back, nn.Conv2d)
        assert torch.equal(back.weight, conv.weight)
        assert back.bias is None if conv.bias is None else torch.equal(back.bias, conv.bias)
        x = torch.randn(1, conv.in_channels, 9, 9)
        assert torch.equal(back(x), conv(x))


@pytest.mark.parametrize("size", [(6, 8), (4, 8), (6, 3), (5, 5), (3, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_smaller_input_uses_the_middle_of_the_table(size: tuple[int, int], stride: int) -> None:
    """As a table made for that size, with the same number at every offset."""
    conv = nn.Conv2d(3, 3, 3, padding=1, stride=stride).double()
    layer, x = moved(layer_of(conv, (6, 8))), torch.randn(2, 3, *size, dtype=torch.float64)
    smaller = copy.deepcopy(layer)
    smaller.set_size_(*size)
    assert smaller.relative_bias.numel() < layer.relative_bias.numel() or size == (6, 8)
    torch.testing.assert_close(layer(x), smaller(x), rtol=0, atol=1e-12)


def test_a_larger_table_keeps_what_was_learned() -> None:
    layer = moved(layer_of(nn.Conv2d(3, 3, 3, padding=1).double(), (5, 5)))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    before = layer(x)
    layer.relative_bias.requires_grad_(False)
    layer.set_size_(7, 6)
    assert layer.relative_bias.shape == (9, 15, 13)
    assert not layer.relative_bias.requires_grad
    torch.testing.assert_close(layer(x), before, rtol=0, atol=1e-12)
    assert layer(x.new_zeros(1, 3, 7, 6)).shape == (1, 3, 7, 6)


def test_what_is_refused() -> None:
    with pytest.raises(RecastError, match=r"gate='bias' .*transposed convolutions"):
        layer_of(nn.ConvTranspose2d(3, 3, 2), (3, 3))
    layer = layer_of(nn.Conv2d(3, 3, 3, padding=1), (6, 8))
    with pytest.raises(RecastError, match=r"up to 6×8 pixels, got 8×6: .* call set_size_\(8, 6\)"):
        layer(torch.randn(1, 3, 8, 6))
    with pytest.raises(RecastError, match=r"\(B, 3, H, W\), got \(1, 2, 6, 6\)"):
        layer(torch.randn(1, 2, 6, 6))
    with pytest.raises(RecastError, match=r"call set_size_\(height, width\) first"):
        CMHSA(3, 3, PAD_1)(torch.randn(1, 3, 6, 6))
