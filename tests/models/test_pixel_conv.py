"""A convolution of pixels is a convolution of tokens: the kernel T, its heads, and what a recast makes of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recast import CMHSA, GPSA, RecastConfig
from recast.papers.prs.pixel_conv import PixelConv2d
from recast.surgery.rules import convert, find_rule, is_convolution, refusal

# kernel, patch side, heads = (2⌈(K−1)/2P⌉ + 1)²
HEADS = [(1, 4, 1), (3, 4, 9), (5, 4, 9), (9, 4, 9), (11, 4, 25), (3, 16, 9), (5, 16, 9), (5, 2, 9), (7, 2, 25)]


def pixel_conv(kernel: int, patch: int, channels: tuple[int, int] = (3, 2), **options: Any) -> PixelConv2d:
    return PixelConv2d(channels[0] * patch**2, channels[1] * patch**2, kernel, patch, **options).double()


def tokens(conv: PixelConv2d) -> Tensor:
    return torch.randn(2, conv.in_channels, 5, 6, dtype=torch.float64)


def layer_of(conv: PixelConv2d, gate: Any, size: tuple[int, int], **config: Any) -> CMHSA | GPSA:
    layer = convert(conv, RecastConfig(gate=gate, **config))
    if isinstance(layer, CMHSA):
        layer.set_size_(*size)
    return layer


def test_it_convolves_the_image() -> None:
    """Cut an image into patches, and the layer does to them what the convolution does to the image."""
    conv, bias = pixel_conv(5, 4), torch.tensor([0.25, -0.5], dtype=torch.float64)
    with torch.no_grad():
        conv.bias.copy_(bias.repeat_interleave(16))
    image = torch.randn(2, 3, 12, 20, dtype=torch.float64)
    y = F.pixel_shuffle(conv(F.pixel_unshuffle(image, 4)), 4)
    torch.testing.assert_close(y, F.conv2d(image, conv.weight, bias, padding=2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "patch", "heads"), HEADS)
def test_the_kernel_of_tokens_is_the_same_convolution(kernel: int, patch: int, heads: int, error_of: Any) -> None:
    conv = pixel_conv(kernel, patch)
    T, m = conv.token_kernel(conv.weight), conv.reach
    assert T.shape == (2 * patch**2, 3 * patch**2, 2 * m + 1, 2 * m + 1)
    assert (2 * m + 1) ** 2 == heads
    x = tokens(conv)
    y, expected = F.conv2d(x, T, conv.bias, padding=m), conv(x)
    assert error_of(y, expected) < 1e-10
    if m:  # border and middle
        assert error_of(y[..., m:-m, m:-m], expected[..., m:-m, m:-m]) < 1e-10


@pytest.mark.parametrize(("gate", "config"), [("bias", {"bias_init": 40.0}), ("linear", {})])
@pytest.mark.parametrize(("kernel", "patch"), [(3, 4), (5, 4), (7, 2), (3, 16), (5, 16)])
def test_the_layer_of_attention_is_the_convolution_of_pixels(
    gate: str, config: dict[str, Any], kernel: int, patch: int, error_of: Callable[..., float]
) -> None:
    conv = pixel_conv(kernel, patch, (1, 1)).eval()
    x = tokens(conv)
    layer = layer_of(conv, gate, (5, 6), **config)
    assert (layer.num_heads, layer.in_channels) == (conv.kernel_size[0] ** 2, patch**2)
    y, expected, m = layer(x), conv(x), conv.reach
    assert error_of(y, expected) < 1e-10
    assert error_of(y[..., m:-m, m:-m], expected[..., m:-m, m:-m]) < 1e-10
    back: Any = layer.to_conv()
    assert torch.equal(back.weight, conv.token_kernel(conv.weight))
    assert error_of(back(x), expected) < 1e-10


def test_what_the_rule_keeps_and_refuses() -> None:
    conv = pixel_conv(3, 2, bias=False).eval()
    conv.weight.requires_grad_(False)
    layer = layer_of(conv, "bias", (3, 3))
    assert layer.bias is None
    assert not layer.weight.requires_grad
    assert not layer.training
    assert layer_of(pixel_conv(3, 2), "bias", (3, 3)).weight.requires_grad
    assert is_convolution(conv)
    assert refusal(conv, RecastConfig(gate="bias")) is None
    assert find_rule(conv)[0] is PixelConv2d
    assert "5×5 pixels of patches of 4×4 (3×3 tokens)" in repr(PixelConv2d(16, 16, 5, 4))
    assert (conv.kernel_size, conv.in_channels, conv.out_channels, conv.groups) == ((3, 3), 12, 8, 1)
