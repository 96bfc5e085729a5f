"""Geometry against `nn.Conv2d`, `nn.ConvTranspose2d` and timm's SAME: sizes, padding, offsets, the same bits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers.padding import pad_same
from torch import nn

from recast.errors import RecastError
from recast.layers.geometry import Geometry, flip_transpose

# torch says this about its own 'same' padding of even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_geometries_agree_with_the_convolution(start: int, random_case: Any) -> None:
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
def test_every_tap_meets_its_pixel(start: int, random_case: Any) -> None:
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


@pytest.mark.parametrize(
    "fields",
    [
        {"kernel": (0, 3)}, {"stride": (0, 1)}, {"dilation": (1, 0)}, {"padding": (0, -1, 0, 0)},
        {"upsample": (2, 0), "is_transposed": True}, {"padding_mode": "mirror"},
        {"padding_mode": "reflect", "same": True}, {"padding_mode": "circular", "is_transposed": True},
    ],
)  # fmt: skip
def test_impossible_geometries_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecastError):
        Geometry(**{"kernel": (3, 3)} | fields)


def test_an_input_smaller_than_the_kernel_is_refused() -> None:
    with pytest.raises(RecastError, match="4×9 pixels is smaller than the kernel"):
        Geometry((5, 5)).output_size(4, 9)
    assert Geometry((5, 5)).output_size(5, 5) == (1, 1)


# --- SAME padding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_same_pads_and_convolves_as_timm(seed: int) -> None:
    rng = random.Random(seed)
    kernel, stride, dilation = ((rng.randint(1, 5), rng.randint(1, 4)) for _ in range(3))
    x = torch.randn(2, 3, rng.randint(1, 12), rng.randint(1, 12))
    geometry = Geometry(kernel, stride, dilation=dilation, same=True)
    padded, weight = pad_same(x, kernel, stride, dilation), torch.randn(4, 3, *kernel)
    expected = F.conv2d(padded, weight, None, stride, 0, dilation)
    assert torch.equal(geometry.pad(x), padded)
    assert torch.equal(geometry.pad(x)[(..., *geometry.pixels(*x.shape[2:]))], x)
    assert geometry.output_size(*x.shape[2:]) == expected.shape[2:]
    assert torch.equal(geometry.convolve(x, weight, None, 1), expected)


# --- transposed convolutions ----------------------------------------------------------------------------------------


def transposed(seed: int, device: str = "cpu") -> tuple[nn.ConvTranspose2d, torch.Tensor]:
    """Any crop up to the kernel's reach, any output padding that PyTorch allows, on an input that leaves an output."""
    rng = random.Random(seed)
    kernel, stride, dilation = ((rng.randint(1, 5), rng.randint(1, 4)) for _ in range(3))
    cropped = tuple(rng.randint(0, d * (k - 1)) for k, d in zip(kernel, dilation, strict=True))
    added = tuple(rng.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
    groups = rng.choice((1, 1, 2, 3))
    shape = [1, 2 * groups]
    for axis in range(2):
        reach = dilation[axis] * (kernel[axis] - 1)
        fewest = 1 + max(0, -(-(2 * cropped[axis] - reach - added[axis]) // stride[axis]))
        shape.append(fewest + rng.randint(0, 4))
    build = nn.ConvTranspose2d(
        2 * groups, groups * rng.randint(1, 2), kernel, stride, cropped, added, groups, rng.random() < 0.5, dilation,
        dtype=torch.float64, device=device,
    )  # fmt: skip
    return build, torch.randn(shape, dtype=torch.float64, device=device)


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_a_transposed_convolution_is_one_of_spread_pixels(start: int) -> None:
    """`pad` holds the pixels where `pixels` says and zeros elsewhere; the flipped kernel slides over it at stride 1."""
    for seed in range(start, start + 50):
        conv, x = transposed(seed)
        g, expected, size = Geometry.of(conv), conv(x), x.shape[2:]
        spread, weight = g.pad(x), flip_transpose(conv.weight, conv.groups)
        rows, columns = g.pixels(*size)
        assert spread.shape[2:] == g.padded_size(*size), f"seed {seed}"
        assert torch.equal(spread[..., rows, columns], x), f"seed {seed}"
        assert int((spread != 0).sum()) == x.numel(), f"seed {seed}"
        plain = F.conv2d(spread, weight, conv.bias, 1, 0, conv.dilation, conv.groups)
        torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-12, msg=f"seed {seed}")
        assert torch.equal(g.convolve(x, weight, conv.bias, conv.groups), expected), f"seed {seed}"
        assert torch.equal(flip_transpose(weight, conv.groups), conv.weight)  # its own inverse
        # a query is read at the pixel nearest the middle of its window, the later one of two
        for axis, (pixels, found) in enumerate(zip((rows, columns), g.source_pixels(*size), strict=True)):
            at = range(pixels.start, pixels.stop, pixels.step)
            middles = [i + g.reach[axis] / 2 for i in range(expected.shape[2 + axis])]
            nearest = [min(range(len(at)), key=lambda n: (abs(at[n] - middle), -n)) for middle in middles]
            assert found.tolist() == nearest


def test_round_trips_of_every_kind_of_geometry() -> None:
    kinds = [Geometry.of(transposed(seed, "meta")[0]) for seed in range(50)]
    kinds += [Geometry((3, 2), (2, 1), dilation=(1, 3), same=True)]
    for geometry in kinds:
        assert Geometry(**json.loads(json.dumps(geometry.to_dict()))) == geometry
    # fields that say where queries are and what the zeros are: none may be left out
    assert len({Geometry((2, 2)), Geometry((2, 2), same=True), Geometry((2, 2), is_transposed=True)}) == 3
    assert Geometry((2, 2), upsample=(2, 1)) != Geometry((2, 2), upsample=(1, 2))


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding"), [(1, 1, 1), ((3, 1), 1, (0, 1)), (2, 3, (4, 0)), (3, (1, 2), (3, 4))]
)
def test_a_crop_beyond_the_kernels_reach_is_refused(kernel: Any, dilation: Any, padding: Any) -> None:
    conv = nn.ConvTranspose2d(1, 1, kernel, 4, padding, 0, dilation=dilation)
    with pytest.raises(RecastError, match=r"padding .* exceeds the reach of its kernel"):
        Geometry.of(conv)
