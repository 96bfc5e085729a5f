"""The C-MHSA layer against `nn.Conv2d`, its table of biases, and what a layer owes its users."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from recast.errors import RecastError
from recast.layers.cmhsa import CMHSA
from recast.layers.config import RecastConfig
from recast.layers.geometry import Geometry
from recast.surgery.rules import find_rule, refusal

PADDED = Geometry((3, 3), padding=(1, 1, 1, 1))


def layer_of(conv: nn.Module, size: tuple[int, int], **config: Any) -> CMHSA:
    layer: Any = find_rule(conv)[1](conv, RecastConfig(gate="bias", **config))  # type: ignore[index]
    layer.set_size_(*size)
    return layer


def moved(layer: CMHSA, scale: float = 0.3) -> CMHSA:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(scale * torch.randn(parameter.shape).to(parameter.dtype))
    return layer


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("bias_init", [5.0, 10.0, 20.0, 30.0, 40.0])
def test_how_far_the_start_is_from_the_convolution(kernel: int, bias_init: float, error_of: Any) -> None:
    """A head's tap loses (L−1)·e^−M / (1 + (L−1)·e^−M) of its attention, in the middle and at the border alike."""
    conv, x = nn.Conv2d(4, 5, kernel, padding=kernel // 2).double(), double(2, 4, 7, 9)
    layer = layer_of(conv, (7, 9), bias_init=bias_init)
    leak = (layer.geometry.padded_size(7, 9)[0] * layer.geometry.padded_size(7, 9)[1] - 1) * math.exp(-bias_init)
    on_tap = layer.attention(x).amax(-1)
    torch.testing.assert_close(on_tap, torch.full_like(on_tap, 1 / (1 + leak)), rtol=0, atol=1e-12)
    y, expected = layer(x), conv(x)
    inner = (..., slice(kernel // 2, -(kernel // 2)), slice(kernel // 2, -(kernel // 2)))
    for part, convolved in ((y, expected), (y[inner], expected[inner])):
        error = error_of(part, convolved)
        assert error <= max(kernel**2 * leak, 1e-10)
        assert error > 1e-3 * leak  # and it is no closer than it can be


def test_there_and_back() -> None:
    for conv in (
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(4, 4, (2, 5), stride=(2, 1), padding=(0, 3), groups=2, bias=False),
        nn.Conv2d(6, 6, 3, padding="same", dilation=2, groups=6, padding_mode="reflect"),
    ):
        back = layer_of(conv, (9, 9)).to_conv()
        assert isinstance(back, nn.Conv2d)
        assert torch.equal(back.weight, conv.weight)
        assert back.bias is None if conv.bias is None else torch.equal(back.bias, conv.bias)  # type: ignore[arg-type]
        x = torch.randn(1, conv.in_channels, 9, 9)
        assert torch.equal(back(x), conv(x))


def test_the_table_has_the_offsets_of_the_largest_input() -> None:
    layer = layer_of(nn.Conv2d(2, 2, 3, padding=1), (6, 8), bias_init=7.0)
    assert layer.relative_bias.shape == (9, 13, 17)  # −6…6 rows, −8…8 columns
    centre = layer.relative_bias[:, 5:8, 7:10].flatten(1)
    assert torch.equal(centre, 7 * torch.eye(9))
    assert layer.relative_bias.sum().item() == 63


@pytest.mark.parametrize("size", [(6, 8), (4, 8), (6, 3), (5, 5), (3, 3)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_smaller_input_uses_the_middle_of_the_table(size: tuple[int, int], stride: int) -> None:
    """As a table made for that size, with the same number at every offset."""
    conv = nn.Conv2d(3, 3, 3, padding=1, stride=stride).double()
    layer, x = moved(layer_of(conv, (6, 8))), double(2, 3, *size)
    other = copy.deepcopy(layer)
    other.set_size_(*size)
    assert other.relative_bias.numel() < layer.relative_bias.numel() or size == (6, 8)
    torch.testing.assert_close(layer(x), other(x), rtol=0, atol=1e-12)


def test_a_larger_table_keeps_what_was_learned() -> None:
    layer = moved(layer_of(nn.Conv2d(3, 3, 3, padding=1).double(), (5, 5)))
    x = double(2, 3, 5, 5)
    before = layer(x)
    layer.relative_bias.requires_grad_(False)
    layer.set_size_(7, 6)
    assert layer.relative_bias.shape == (9, 15, 13)
    assert not layer.relative_bias.requires_grad
    torch.testing.assert_close(layer(x), before, rtol=0, atol=1e-12)
    assert layer(double(1, 3, 7, 6)).shape == (1, 3, 7, 6)


def test_sizes_that_do_not_fit_are_refused() -> None:
    layer = layer_of(nn.Conv2d(3, 3, 3, padding=1), (6, 8))
    with pytest.raises(RecastError, match=r"up to 6×8 pixels, got 8×6: .* call set_size_\(8, 6\)"):
        layer(torch.randn(1, 3, 8, 6))
    with pytest.raises(RecastError, match=r"CMHSA expects \(batch, 3, height, width\), got \(1, 2, 6, 6\)"):
        layer(torch.randn(1, 2, 6, 6))
    with pytest.raises(RecastError, match=r"call set_size_\(height, width\) first"):
        CMHSA(3, 3, PADDED)(torch.randn(1, 3, 6, 6))


def test_what_the_rule_keeps() -> None:
    conv = nn.Conv2d(4, 6, 3, padding=1, bias=False).double().eval()
    conv.weight.requires_grad_(False)
    layer = layer_of(conv, (5, 5))
    assert layer.bias is None
    assert layer.weight.dtype == layer.relative_bias.dtype == torch.float64
    assert not layer.weight.requires_grad
    assert not layer.training
    assert (layer.kernel_size, layer.stride, layer.dilation, layer.padding) == ((3, 3), (1, 1), (1, 1), (1, 1))
    normed = layer_of(weight_norm(nn.Conv2d(4, 6, 3)), (5, 5), keep_parametrization=True)
    assert "parametrizations.weight.original0" in dict(normed.named_parameters())
    assert refusal(layer) == refusal(normed) == "is already CMHSA"
    for part in ("4 → 6, 3×3 pad 1", "9 heads × 1", "gate=bias", "inputs up to 5×5", "bias=False"):
        assert part in repr(layer)


def test_each_gate_has_its_layer() -> None:
    with pytest.raises(RecastError, match="gate='bias' has no transposed convolutions"):
        layer_of(nn.ConvTranspose2d(3, 3, 2), (3, 3))
