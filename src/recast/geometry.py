"""Where a convolution looks: kernel, stride, padding and dilation as numbers, and the token grids they define.

Tokens are the pixels of the *explicitly padded* input. One attention head stands for one kernel tap; an output pixel's
query sits at the tap nearest the kernel's centre (its anchor), and the head's centre of attention Δ is the tap's offset
from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from recast.errors import RecastError

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def _pair(value: int | Iterable[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, second = (int(v) for v in value)
    return first, second


@dataclass(frozen=True)
class Geometry:
    """The shape of a 2-D convolution without its weights. Pairs are (rows, columns).

    A cross-correlation with this geometry computes, for output pixel (i, j) on the padded input x_p,
    `y(i, j) = b + Σ_{a,c} W[:, :, a, c] · x_p(i·s₀ + a·d₀, j·s₁ + c·d₁)`.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Pixels added at the top, bottom, left and right."""
    padding_mode: PaddingMode = "zeros"
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        positive = (*self.kernel, *self.stride, *self.dilation)
        if min(positive) < 1 or min(self.padding) < 0:
            raise RecastError(f"kernel, stride and dilation must be ≥ 1 and padding ≥ 0, got {self}")
        if self.padding_mode not in get_args(PaddingMode):
            raise RecastError(f"padding_mode must be one of {get_args(PaddingMode)}, got {self.padding_mode!r}")

    @classmethod
    def of(cls, conv: nn.Conv2d) -> Geometry:
        """The geometry of `conv`, string paddings resolved; an odd `"same"` total puts the extra pixel last."""
        kernel, dilation = _pair(conv.kernel_size), _pair(conv.dilation)
        if conv.padding == "same":
            padding = _same_padding(kernel, dilation)
        elif conv.padding == "valid":
            padding = (0, 0, 0, 0)
        else:
            rows, columns = _pair(cast("tuple[int, int]", conv.padding))
            padding = (rows, rows, columns, columns)
        return cls(kernel, _pair(conv.stride), padding, conv.padding_mode, dilation)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Geometry:
        """The inverse of `to_dict`: lists become tuples again."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list | tuple) else v for name, v in fields.items()}
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return asdict(self)

    @property
    def num_heads(self) -> int:
        """One head per tap; head h = row · kernel columns + column, the order of `weight.flatten(2)`."""
        return self.kernel[0] * self.kernel[1]

    @property
    def reach(self) -> tuple[int, int]:
        """Distance between the first and the last tap, d(k−1), in pixels."""
        return tuple(d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True))  # type: ignore[return-value]

    @property
    def anchor(self) -> tuple[int, int]:
        """Where output pixel (0, 0) has its query, on the padded grid: ⌊d(k−1)/2⌋, an integer also for even kernels."""
        return self.reach[0] // 2, self.reach[1] // 2

    def offsets(self) -> list[tuple[int, int]]:
        """Δ of every head, (rows, columns) from the anchor: integers, so that a sharp head meets exactly one pixel."""
        (rows, columns), (d0, d1), (c0, c1) = self.kernel, self.dilation, self.anchor
        return [(a * d0 - c0, c * d1 - c1) for a in range(rows) for c in range(columns)]

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the key grid for an input of `height` × `width` pixels."""
        top, bottom, left, right = self.padding
        return height + top + bottom, width + left + right

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the output. Raises `RecastError` if the kernel does not fit."""
        rows, columns = (
            (padded - reach - 1) // stride + 1
            for padded, reach, stride in zip(self.padded_size(height, width), self.reach, self.stride, strict=True)
        )
        if rows < 1 or columns < 1:
            raise RecastError(f"an input of {height}×{width} pixels is smaller than the kernel: {self}")
        return rows, columns

    def query_positions(self, height: int, width: int) -> tuple[range, range]:
        """Rows and columns of the queries' anchors on the padded grid."""
        (c0, c1), (s0, s1), (rows, columns) = self.anchor, self.stride, self.output_size(height, width)
        return range(c0, c0 + rows * s0, s0), range(c1, c1 + columns * s1, s1)

    def pad(self, x: Tensor) -> Tensor:
        """Explicit padding: (B, C, H, W) → (B, C, H_p, W_p)."""
        top, bottom, left, right = self.padding
        if not any(self.padding):
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, (left, right, top, bottom), mode=mode)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """The convolution itself, called as `nn.Conv2d` calls it so that equal weights give equal bits."""
        top, bottom, left, right = self.padding
        if self.padding_mode == "zeros" and (top, left) == (bottom, right):
            return F.conv2d(x, weight, bias, self.stride, (top, left), self.dilation, groups)
        if (
            self.padding_mode == "zeros"
            and self.stride == (1, 1)
            and self.padding == _same_padding(self.kernel, self.dilation)
        ):
            return F.conv2d(x, weight, bias, self.stride, "same", self.dilation, groups)
        return F.conv2d(self.pad(x), weight, bias, self.stride, 0, self.dilation, groups)

    def __str__(self) -> str:
        text = f"{self.kernel[0]}×{self.kernel[1]}"
        if self.stride != (1, 1):
            text += f" stride {self.stride[0]}" + (f"×{self.stride[1]}" if self.stride[0] != self.stride[1] else "")
        if self.dilation != (1, 1):
            text += f" dilation {self.dilation[0]}" + (
                f"×{self.dilation[1]}" if self.dilation[0] != self.dilation[1] else ""
            )
        if any(self.padding):
            pads = set(self.padding)
            text += f" pad {pads.pop() if len(pads) == 1 else self.padding}"
            text += "" if self.padding_mode == "zeros" else f" {self.padding_mode}"
        return text


def _same_padding(kernel: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, int, int, int]:
    (rows, columns) = (d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    return rows // 2, rows - rows // 2, columns // 2, columns - columns // 2
