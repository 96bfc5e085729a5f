"""Geometry against `nn.Conv2d` itself: sizes, padding, offsets, string paddings, the convolution's own bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recast.errors import RecastError
from recast.geometry import Geometry

# torch says this about its own 'same' padding of even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

MODES = ("zeros", "reflect", "replicate", "circular")


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_geometries_agree_with_the_convolution(start: int, random_case: Callable[..., Any]) -> None:
    for seed in range(start, start + 50):
        conv, x, text = random_case(seed)
        geometry = Geometry.of(conv)
        expected = conv(x)
        assert geometry.output_size(*x.shape[2:]) == expected.shape[2:], text
        assert geometry.padded_size(*x.shape[2:]) == geometry.pad(x).shape[2:], text
        assert torch.equal(geometry.convolve(x, conv.weight, conv.bias, conv.groups), expected), text
        plain = F.conv2d(geometry.pad(x), conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
        torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-12, msg=text)


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_every_tap_meets_its_pixel(start: int, random_case: Callable[..., Any]) -> None:
    """Anchor + Δ_h is the pixel that the convolution multiplies by tap h, found here by a kernel with one tap set."""
    for seed in range(start, start + 50):
        conv, x, text = random_case(seed)
        geometry = Geometry.of(conv)
        rows, columns = geometry.padded_size(*x.shape[2:])
        numbered = torch.arange(rows * columns, dtype=torch.float64).reshape(1, 1, rows, columns)
        rows_at, columns_at = geometry.query_positions(*x.shape[2:])
        assert len(geometry.offsets()) == geometry.num_heads == conv.weight[0, 0].numel()
        for head, (down, right) in enumerate(geometry.offsets()):
            one_tap = torch.zeros(1, 1, *geometry.kernel, dtype=torch.float64)
            one_tap.view(-1)[head] = 1
            seen = F.conv2d(numbered, one_tap, None, geometry.stride, 0, geometry.dilation)[0, 0]
            expected = [[(i + down) * columns + j + right for j in columns_at] for i in rows_at]
            assert seen.tolist() == expected, f"{text}, head {head}"


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (2, 3), (4, 1), (3, 4)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_same_puts_the_odd_pixel_last(kernel: tuple[int, int], dilation: tuple[int, int], mode: str) -> None:
    conv = nn.Conv2d(1, 1, kernel, padding="same", dilation=dilation, padding_mode=mode)
    top, bottom, left, right = Geometry.of(conv).padding
    assert (top + bottom, left + right) == tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    assert 0 <= bottom - top <= 1
    assert 0 <= right - left <= 1
    x = torch.randn(1, 1, 11, 12)
    assert Geometry.of(conv).output_size(11, 12) == (11, 12)
    assert torch.equal(Geometry.of(conv).convolve(x, conv.weight, conv.bias, 1), conv(x))


def test_asymmetric_padding_of_any_kind_is_computed() -> None:
    """Paddings that `nn.Conv2d` has no word for: explicit padding, then the plain convolution."""
    x, weight = torch.randn(1, 2, 7, 6), torch.randn(3, 2, 3, 2)
    for padding, mode in itertools.product([(1, 0, 2, 1), (0, 2, 0, 0), (2, 2, 1, 1)], MODES):
        geometry = Geometry((3, 2), (2, 1), padding, mode, (1, 2))  # type: ignore[arg-type]
        top, bottom, left, right = padding
        padded = F.pad(x, (left, right, top, bottom), mode="constant" if mode == "zeros" else mode)
        expected = F.conv2d(padded, weight, None, (2, 1), 0, (1, 2))
        torch.testing.assert_close(geometry.convolve(x, weight, None, 1), expected)
        assert geometry.output_size(7, 6) == expected.shape[2:]


def test_offsets_in_kernel_order_are_integers_around_an_integer_anchor() -> None:
    assert Geometry((3, 3)).offsets() == [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
    assert Geometry((2, 2)).offsets() == [(0, 0), (0, 1), (1, 0), (1, 1)]  # ConViT's ±½ would meet no pixel
    assert Geometry((2, 3), dilation=(3, 2)).offsets() == [(-1, -2), (-1, 0), (-1, 2), (2, -2), (2, 0), (2, 2)]
    assert Geometry((4, 1)).anchor == (1, 0)


def test_round_trip_through_plain_fields() -> None:
    geometry = Geometry((2, 3), (1, 2), (0, 1, 1, 1), "reflect", (3, 1))
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in geometry.to_dict().items()}  # as JSON gives it back
    assert Geometry.from_dict(fields) == geometry
    assert hash(Geometry.from_dict(fields)) == hash(geometry)


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": (0, 3)},
        {"kernel": (3, 3), "stride": (0, 1)},
        {"kernel": (3, 3), "dilation": (1, 0)},
        {"kernel": (3, 3), "padding": (0, -1, 0, 0)},
        {"kernel": (3, 3), "padding_mode": "mirror"},
    ],
)
def test_impossible_geometries_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecastError):
        Geometry(**fields)


def test_an_input_smaller_than_the_kernel_is_refused() -> None:
    with pytest.raises(RecastError, match="4×9 pixels is smaller than the kernel"):
        Geometry((5, 5)).output_size(4, 9)
    assert Geometry((5, 5)).output_size(5, 5) == (1, 1)


def test_text_names_what_is_not_default() -> None:
    assert str(Geometry((3, 3), padding=(1, 1, 1, 1))) == "3×3 pad 1"
    text = str(Geometry((3, 5), (2, 1), (1, 2, 1, 2), "circular", (2, 3)))
    assert all(part in text for part in ("3×5", "stride 2×1", "dilation 2×3", "(1, 2, 1, 2)", "circular"))
