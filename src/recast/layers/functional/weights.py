"""The tensors of a GPSA layer as the pure functions take them: projections, gates, and choices of heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.geometry import Geometry


class Gates(NamedTuple):
    """Coefficients of the three maps of the heads; of a head they sum to one. `shift=None` means zero for all.

    `shift` is (H,); `gaussian` and `content` have one entry per head that has such a map (`Weights`).
    """

    shift: Tensor | None
    gaussian: Tensor
    content: Tensor


class Weights(NamedTuple):
    """All tensors of a layer. W_val is applied as X · valueᵀ (the layout of `nn.Linear`), block-diagonal in groups.

    Every head has a tap; H_g of them have a Gaussian (`gaussian_heads`) and H_c a content map (`content_heads`), all by
    default. A map that is missing has the coefficient zero.
    """

    weight: Tensor
    """(O, C/g, kernel rows, kernel columns): W_out^h is `weight[:, :, a, c]ᵀ`, exactly a convolution's kernel."""
    bias: Tensor | None
    """(O,), added once."""
    value: Tensor | None
    """(C, C/g) or None for the identity (depthwise layers, folded layers)."""
    query: Tensor
    """(H_c·D, C), heads in order."""
    key: Tensor
    """(H_c·D, C), heads in order."""
    center: Tensor
    """Δ, (H_g, 2): rows and columns from the query's anchor, in pixels."""
    alpha: Tensor
    """Locality strength α > 0, (H_g,), in 1/pixel²."""
    gates: Gates
    gaussian_heads: tuple[int, ...] | None = None
    """Heads with a Gaussian map, in order; None: all."""
    content_heads: tuple[int, ...] | None = None
    """Heads with a content map, in order; None: all."""

    @property
    def num_heads(self) -> int:
        """One head per tap of `weight`."""
        return self.weight.shape[2] * self.weight.shape[3]

    def with_gaussian(self) -> tuple[int, ...]:
        """Heads with a Gaussian map."""
        return tuple(range(self.num_heads)) if self.gaussian_heads is None else self.gaussian_heads

    def with_content(self) -> tuple[int, ...]:
        """Heads with a content map."""
        return tuple(range(self.num_heads)) if self.content_heads is None else self.content_heads


def linear_gates(gamma: Tensor, s: Tensor) -> Gates:
    """A = (1−γ)·[(1−s)·S + s·G] + γ·C: at γ = s = 0 the convolution itself, with live gradients."""
    return Gates((1 - gamma) * (1 - s), (1 - gamma) * s, gamma)


def sigmoid_gates(lam: Tensor) -> Gates:
    """A = σ(λ)·G + (1−σ(λ))·C (d'Ascoli et al. 2021, Eq. 7)."""
    return Gates(None, torch.sigmoid(lam), torch.sigmoid(-lam))


# --- projections ------------------------------------------------------------------------------------------------------


def project_values(x: Tensor, value: Tensor | None, groups: int) -> Tensor:
    """V = X W_val, (B, C, ·, ·) → same shape; an identity W_val returns the bits of x."""
    return x if value is None else F.conv2d(x, value[:, :, None, None], groups=groups)


def project_out(gathered: Tensor, taps: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Σ_h of what head h gathered, times W_out^h: (B, C, H, I, J) and taps (O, C/g, H) → (B, O, I, J)."""
    return F.conv2d(gathered.flatten(1, 2), taps.flatten(1)[:, :, None, None], bias, groups=groups)


def fold_value(weight: Tensor, value: Tensor | None, groups: int) -> Tensor:
    """W_val · W_out^h for every head, as a kernel: (O, C/g, …) and (C, C/g) → (O, C/g, …)."""
    if value is None:
        return weight
    per_group = weight.flatten(2).unflatten(0, (groups, -1))
    folded = torch.einsum("gojh,gji->goih", per_group, value.unflatten(0, (groups, -1)))
    return folded.flatten(0, 1).view_as(weight)


# --- choices of heads -------------------------------------------------------------------------------------------------


def scatter_heads(values: Tensor, heads: tuple[int, ...] | None, num_heads: int, fill: float = 0.0) -> Tensor:
    """Entries of some heads (h, …) among `fill` for the others: (H, …). None: they are all there."""
    if heads is None:
        return values
    index = torch.tensor(heads, dtype=torch.long, device=values.device)
    return values.new_full((num_heads, *values.shape[1:]), fill).index_copy(0, index, values)


def expand_heads(w: Weights, geometry: Geometry) -> Weights:
    """The same layer with all maps present: those that were missing get the coefficient zero."""
    num_heads = w.num_heads
    if w.gaussian_heads is None and w.content_heads is None:
        return w
    absent = torch.tensor([float(h not in w.with_gaussian()) for h in range(num_heads)], device=w.alpha.device)
    offsets = torch.tensor(geometry.offsets(), dtype=w.center.dtype, device=w.center.device)

    def projection(matrix: Tensor) -> Tensor:
        if w.content_heads is None:
            return matrix
        if not w.content_heads:
            return matrix.new_zeros(num_heads, matrix.shape[1])
        per_head = matrix.unflatten(0, (len(w.content_heads), -1))
        return scatter_heads(per_head, w.content_heads, num_heads).flatten(0, 1)

    return w._replace(
        query=projection(w.query),
        key=projection(w.key),
        center=scatter_heads(w.center, w.gaussian_heads, num_heads) + absent[:, None].to(w.center.dtype) * offsets,
        alpha=scatter_heads(w.alpha, w.gaussian_heads, num_heads) + absent.to(w.alpha.dtype),
        gates=Gates(
            w.gates.shift,
            scatter_heads(w.gates.gaussian, w.gaussian_heads, num_heads),
            scatter_heads(w.gates.content, w.content_heads, num_heads),
        ),
        gaussian_heads=None,
        content_heads=None,
    )


def select_heads(w: Weights, gaussian: tuple[int, ...], content: tuple[int, ...]) -> Weights:
    """The same layer with fewer maps: `gaussian` and `content` are heads whose maps stay."""
    at = [w.with_gaussian().index(h) for h in gaussian]
    among = [w.with_content().index(h) for h in content]
    width = head_width(w)
    rows = [h * width + d for h in among for d in range(width)]
    return w._replace(
        query=w.query[rows],
        key=w.key[rows],
        center=w.center[at],
        alpha=w.alpha[at],
        gates=Gates(w.gates.shift, w.gates.gaussian[at], w.gates.content[among]),
        gaussian_heads=gaussian,
        content_heads=content,
    )


def block_diagonal(matrix: Tensor, groups: int) -> Tensor:
    """(g·a, b) → (g·a, g·b) with the g blocks on the diagonal."""
    return torch.block_diag(*matrix.chunk(groups))


def head_width(w: Weights) -> int:
    """D, the width of a head's queries and keys."""
    return w.query.shape[0] // max(1, len(w.with_content()))
