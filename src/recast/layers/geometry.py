"""Geometry of a convolution: kernel, stride, padding and dilation as numbers, and the token grids they define.

Tokens are the pixels of the *explicitly padded* input. One attention head stands for one position of the kernel; an
output pixel's query sits at the position nearest the kernel's centre (its anchor), and the head's centre of attention Δ
is the offset of its own position from there.

A transposed convolution is a convolution of its input with zeros between the pixels (`upsample` apart), with its kernel
flipped. The zeros are treated as padding: seen by the shift and the Gaussian, never by content attention.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from recast.config import CountOrZero, Pixels, checked
from recast.errors import RecastError, SizeError

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@checked
class Geometry:
    """The shape of a 2-D convolution without its weights. Pairs are (rows, columns).

    A cross-correlation with this geometry computes, for output pixel (i, j) on the padded input x_p,
    `y(i, j) = b + Σ_{a,c} W[:, :, a, c] · x_p(i·s₀ + a·d₀, j·s₁ + c·d₁)`.

    Raises:
        RecastError: for a number out of range, and for a padding mode that the convolution does not have.

    Example:
        >>> geometry = recast.Geometry.of(nn.Conv2d(3, 8, 3, stride=2, padding=1))
        >>> geometry.num_heads, geometry.output_size(32, 32)
        (9, (16, 16))
    """

    kernel: tuple[Pixels, Pixels]
    stride: tuple[Pixels, Pixels] = (1, 1)
    padding: tuple[CountOrZero, CountOrZero, CountOrZero, CountOrZero] = (0, 0, 0, 0)
    """Pixels added at the top, bottom, left and right."""
    padding_mode: PaddingMode = "zeros"
    dilation: tuple[Pixels, Pixels] = (1, 1)
    same: bool = False
    """TensorFlow's SAME padding: as many zeros as ⌈size/stride⌉ outputs require; `padding` is unused."""
    upsample: tuple[Pixels, Pixels] = (1, 1)
    """Distance of the input's pixels on the grid, with zeros between them: a transposed convolution's stride."""
    is_transposed: bool = False
    """The kernel is that of a transposed convolution, flipped; its `stride` is 1."""

    def __post_init__(self) -> None:
        if self.padding_mode != "zeros" and (self.same or self.is_transposed):
            raise RecastError(
                f"padding_mode must be 'zeros' for SAME and transposed convolutions, got {self.padding_mode!r}"
            )

    @classmethod
    def of(cls, conv: nn.Conv2d | nn.ConvTranspose2d) -> Geometry:
        """Return the geometry of `conv`, string paddings resolved; an odd `"same"` total puts the extra pixel last."""
        kernel, stride, dilation = _pair(conv.kernel_size), _pair(conv.stride), _pair(conv.dilation)
        if isinstance(conv, nn.ConvTranspose2d):  # its `padding` crops the output, `output_padding` adds to its end
            cropped = _pair(conv.padding)
            top, left = (d * (k - 1) - p for k, d, p in zip(kernel, dilation, cropped, strict=True))
            if min(top, left) < 0:
                raise RecastError(f"padding {cropped} of a transposed convolution exceeds the reach of its kernel")
            rows, columns = _pair(conv.output_padding)
            padding = (top, top + rows, left, left + columns)
            return cls(kernel, padding=padding, dilation=dilation, upsample=stride, is_transposed=True)
        if conv.padding == "same":
            padding = _same_padding(kernel, dilation)
        else:
            rows, columns = (0, 0) if conv.padding == "valid" else _pair(conv.padding)
            padding = (rows, rows, columns, columns)
        return cls(kernel, stride, padding, conv.padding_mode, dilation)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able fields."""
        return asdict(self)

    @property
    def num_heads(self) -> int:
        """Number of heads, one per kernel position: h = row · kernel columns + column, as in `weight.flatten(2)`."""
        return self.kernel[0] * self.kernel[1]

    @cached_property
    def reach(self) -> tuple[int, int]:
        """Distance between the first and the last kernel position, d(k−1), in pixels."""
        return tuple(d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True))  # type: ignore[return-value]

    @cached_property
    def anchor(self) -> tuple[int, int]:
        """Position of the query of output pixel (0, 0) on the padded grid: ⌊d(k−1)/2⌋, also for even kernels."""
        return self.reach[0] // 2, self.reach[1] // 2

    @property
    def keeps_size(self) -> bool:
        """True if every pixel of the input is the anchor of one output pixel, in the same order."""
        is_same = self.same or self.padding == _same_padding(self.kernel, self.dilation)
        return is_same and self.stride == (1, 1) and not self.is_transposed

    def offsets(self) -> list[tuple[int, int]]:
        """Return Δ of every head, (rows, columns) from the anchor: integers, so that a sharp head meets one pixel."""
        (rows, columns), (d0, d1), (c0, c1) = self.kernel, self.dilation, self.anchor
        return [(a * d0 - c0, c * d1 - c1) for a in range(rows) for c in range(columns)]

    def heads(self, choice: str | int | tuple[int, ...]) -> tuple[int, ...]:
        """Return the heads that a `RecastConfig.content_heads` or `gaussian_heads` names, in order.

        A number n takes the middle head and n − 1 of the others, spread evenly; a smaller kernel takes all.
        Raises RecastError for a position that the kernel does not have.
        """
        every = tuple(range(self.num_heads))
        if choice in ("all", "none"):
            return every if choice == "all" else ()
        if isinstance(choice, tuple):
            if choice[-1] >= self.num_heads:
                raise RecastError(f"a kernel of {self.kernel[0]}×{self.kernel[1]} has no position {choice[-1]}")
            return choice
        count = min(int(choice), self.num_heads)
        offsets = self.offsets()
        middle = min(every, key=lambda head: sum(offset**2 for offset in offsets[head]))
        others = [head for head in every if head != middle]
        step = (len(others) - 1) / max(1, count - 2)
        return tuple(sorted((middle, *(others[round(i * step)] for i in range(count - 1)))))

    def padding_at(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Return the pixels added at the top, bottom, left and right of an input of `height` × `width` pixels."""
        if not self.same:
            return self.padding
        added: list[Any] = []
        for size, stride, reach in zip((height, width), self.stride, self.reach, strict=True):
            missing: Any = (size - 1) // stride * stride + reach + 1 - size  # older ONNX rounds −5 // 2 up
            total = missing.clamp(min=0) if isinstance(missing, Tensor) else max(missing, 0)  # a tensor in a trace
            added += [total // 2, total - total // 2]
        return tuple(added)

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the key grid for an input of `height` × `width` pixels."""
        top, bottom, left, right = self.padding_at(height, width)
        return (height - 1) * self.upsample[0] + 1 + top + bottom, (width - 1) * self.upsample[1] + 1 + left + right

    def pixels(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of the key grid that hold the input's pixels; the others are padding."""
        top, _, left, _ = self.padding_at(height, width)
        (u0, u1) = self.upsample
        return slice(top, top + (height - 1) * u0 + 1, u0), slice(left, left + (width - 1) * u1 + 1, u1)

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the output. Raises `RecastError` if the kernel does not fit."""
        rows, columns = (
            (padded - reach - 1) // stride + 1
            for padded, reach, stride in zip(self.padded_size(height, width), self.reach, self.stride, strict=True)
        )
        if type(rows) is int and (rows < 1 or columns < 1):  # in an exported program sizes are symbols
            raise SizeError(f"input of {height}×{width} pixels is smaller than the kernel {self}")
        return rows, columns

    def query_positions(self, height: int, width: int) -> tuple[range, range]:
        """Return rows and columns of the queries' anchors on the padded grid."""
        (c0, c1), (s0, s1), (rows, columns) = self.anchor, self.stride, self.output_size(height, width)
        return range(c0, c0 + rows * s0, s0), range(c1, c1 + columns * s1, s1)

    def source_pixels(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the input's row and column nearest the middle of every output's window.

        In a transposed convolution most anchors fall on inserted zeros; queries are read here instead.
        """
        padding = self.padding_at(height, width)
        sources: list[Tensor] = []
        for axis, (size, count) in enumerate(zip((height, width), self.output_size(height, width), strict=True)):
            before, step, reach = padding[2 * axis], self.upsample[axis], self.reach[axis]
            middles = 2 * self.stride[axis] * torch.arange(count) + reach - 2 * before  # in half pixels
            sources.append(((middles + step) // (2 * step)).clamp(0, size - 1))
        return sources[0], sources[1]

    def pad(self, x: Tensor) -> Tensor:
        """Pad x (B, C, H, W) to (B, C, H_p, W_p), with zeros between the pixels where `upsample` > 1."""
        height, width = x.shape[-2:]
        (u0, u1), (top, bottom, left, right) = self.upsample, self.padding_at(height, width)
        if (u0, u1) != (1, 1):
            x = F.pad(x[..., :, None, :, None], (0, u1 - 1, 0, 0, 0, u0 - 1)).flatten(-4, -3).flatten(-2, -1)
            # the zeros after the last pixel are no part of the grid
            bottom, right = bottom - u0 + 1, right - u1 + 1
        if type(top) is int and (top, bottom, left, right) == (0, 0, 0, 0):
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, (left, right, top, bottom), mode=mode)

    @property
    def _crop(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """`padding` and `output_padding` of the transposed convolution."""
        top, bottom, left, right = self.padding
        return (self.reach[0] - top, self.reach[1] - left), (bottom - top, right - left)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """Convolve x as the module of this geometry does, so that equal weights give equal bits."""
        top, bottom, left, right = self.padding
        if self.is_transposed:
            kernel, (cropped, added) = flip_transpose(weight, groups), self._crop
            return F.conv_transpose2d(x, kernel, bias, self.upsample, cropped, added, groups, self.dilation)
        padding: tuple[int, int] | str | None = None
        if self.padding_mode == "zeros" and not self.same:
            if (top, left) == (bottom, right):
                padding = (top, left)
            elif self.stride == (1, 1) and self.padding == _same_padding(self.kernel, self.dilation):
                padding = "same"
        if padding is None:
            x, padding = self.pad(x), (0, 0)
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation, groups)

    def __str__(self) -> str:
        def times(pair: tuple[int, int]) -> str:
            return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}×{pair[1]}"

        text = f"{self.kernel[0]}×{self.kernel[1]}"
        if self.is_transposed:
            text += f" transposed stride {times(self.upsample)}"
        if self.stride != (1, 1):
            text += f" stride {times(self.stride)}"
        if self.dilation != (1, 1):
            text += f" dilation {times(self.dilation)}"
        if self.same:
            text += " pad same"
        elif any(self.padding):
            text += f" pad {self.padding[0] if len({*self.padding}) == 1 else self.padding}"
            text += "" if self.padding_mode == "zeros" else f" {self.padding_mode}"
        return text


def _same_padding(kernel: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, int, int, int]:
    (rows, columns) = (d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    return rows // 2, rows - rows // 2, columns // 2, columns - columns // 2


def flip_transpose(weight: Tensor, groups: int) -> Tensor:
    """Map the kernel of a transposed convolution (C, O/g, …) to that of a convolution (O, C/g, …), and back."""
    flipped = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(-2, -1)
    return flipped.contiguous(
        memory_format=torch.channels_last if is_channels_last(weight) else torch.contiguous_format
    )


def is_channels_last(t: Tensor) -> bool:
    """Return True if the strides are channels_last only; one channel or one pixel fits both formats."""
    # strides first: vmap has no answer for is_contiguous
    return t.stride(1) < t.stride(2) and t.is_contiguous(memory_format=torch.channels_last)


PADDING_LAYERS: dict[str, type[nn.Module]] = {
    "zeros": nn.ZeroPad2d,
    "reflect": nn.ReflectionPad2d,
    "replicate": nn.ReplicationPad2d,
    "circular": nn.CircularPad2d,
}


def convolution(
    geometry: Geometry, kernel: Tensor, bias: Tensor | None, groups: int, trained: bool = True
) -> nn.Module:
    """Return the module that computes `geometry.convolve(x, kernel, bias, groups)`.

    `kernel` (O, C/g, rows, columns) becomes its parameter and is not copied, `bias` (O,) is. A padding layer precedes
    it where `nn.Conv2d` cannot express the padding.
    """
    g, (top, bottom, left, right) = geometry, geometry.padding
    options: dict[str, Any] = {"in_channels": kernel.shape[1] * groups, "out_channels": kernel.shape[0]}
    options |= {"kernel_size": g.kernel, "dilation": g.dilation, "groups": groups, "bias": bias is not None}
    options |= {"device": kernel.device, "dtype": kernel.dtype}
    pads_first = not g.is_transposed and not g.same and (top, left) != (bottom, right)
    conv: nn.Module
    if g.is_transposed:
        cropped, added = g._crop
        conv = nn.ConvTranspose2d(**options, stride=g.upsample, padding=cropped, output_padding=added)
        kernel = flip_transpose(kernel, groups)
    elif g.same:
        conv = Conv2dSame(**options, stride=g.stride)
    elif pads_first:
        conv = nn.Conv2d(**options, stride=g.stride)
    else:
        conv = nn.Conv2d(**options, stride=g.stride, padding=(top, left), padding_mode=g.padding_mode)
    conv.weight = nn.Parameter(kernel, trained)
    if bias is not None:
        conv.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return nn.Sequential(PADDING_LAYERS[g.padding_mode]((left, right, top, bottom)), conv) if pads_first else conv
