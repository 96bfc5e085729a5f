"""Operands of the pure functions: the tensors of a GPSA layer, its gates, choices of heads, and projections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recast.layers.geometry import Geometry

SOFTPLUS_BETA = 5.0


class Gates(NamedTuple):
    """Coefficients of the Gaussian and the content maps, one entry for each head with this map (`Weights`)."""

    gaussian: Tensor
    """(H_g,)"""
    content: Tensor
    """(H_c,)"""
    has_shift: bool = True
    """True if the shift has the remaining share of each head, so that coefficients sum to 1; False: no shift."""


class Weights(NamedTuple):
    """The tensors and settings of a GPSA layer.

    W_val is applied as X · valueᵀ (the layout of `nn.Linear`), block-diagonal in groups.

    Every head has a position of the kernel; H_g of them have a Gaussian (`gaussian_heads`) and H_c a content map
    (`content_heads`). A map that is missing has the coefficient zero.
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
    gaussian_heads: tuple[int, ...]
    """Heads with a Gaussian map, in order."""
    content_heads: tuple[int, ...]
    """Heads with a content map, in order."""
    geometry: Geometry
    head_dim: int
    """D, the width of a head's queries and keys."""
    groups: int = 1
    attend_padding: bool = False
    """Content attention sees the padding tokens."""
    content: str = "softmax"
    """Its kind, softmax or linear (`maps.content_map`)."""

    @property
    def gathers_padding(self) -> bool:
        """True if padding tokens can add to a gather: they are not zero, or content attends to them."""
        return self.geometry.padding_mode != "zeros" or self.attend_padding

    @property
    def content_sees_grid(self) -> bool:
        """True if content sees every token that can add to a gather."""
        return self.geometry.padding_mode == "zeros" or self.attend_padding

    @property
    def shift(self) -> Tensor | None:
        """Coefficient of every head's shift, (H,): what its other maps leave of 1. None: heads have no shift."""
        if not self.gates.has_shift:
            return None
        num_heads = self.geometry.num_heads
        pairs = (self.gates.gaussian, self.gaussian_heads), (self.gates.content, self.content_heads)
        shares = [scatter_heads(share, heads, num_heads) for share, heads in pairs if heads]
        return 1 - sum(shares[1:], shares[0]) if shares else self.gates.content.new_ones(num_heads)

    def mix(self, S: Tensor, G: Tensor, C: Tensor) -> Tensor:
        """Return A = shift · S + gaussian · G + content · C, (…, H, N, M), for heads with all maps (`expand_heads`)."""
        shift = self.shift
        A = self.gates.gaussian[:, None, None] * G + self.gates.content[:, None, None] * C
        return A if shift is None else A + shift[:, None, None] * S

    def convolve(self, values: Tensor) -> Tensor:
        """Return the shift part, the convolution of V with the kernel scaled by `shift`, and the bias: (B, O, I, J).

        Without other maps the kernel keeps its own bits.
        """
        kernel, shift = self.weight, self.shift
        if shift is not None and (self.gaussian_heads or self.content_heads):
            kernel = kernel * shift.view(kernel.shape[2:]).to(kernel.dtype)
        return self.geometry.convolve(values, kernel, self.bias, self.groups)


class BiasedWeights(NamedTuple):
    """The tensors and settings of a C-MHSA layer: as `Weights`, with the same width of all heads."""

    weight: Tensor
    bias: Tensor | None
    value: Tensor | None
    query: Tensor
    key: Tensor
    relative_bias: Tensor
    """(H, R, S): a logit for every offset of the input, in the order of `relative_bias.offset_ranges`."""
    geometry: Geometry
    groups: int = 1


# --- gates and positions from the parameters --------------------------------------------------------------------------


def linear_gates(
    gamma: Tensor, s: Tensor, gaussian_heads: tuple[int, ...], content_heads: tuple[int, ...], num_heads: int
) -> Gates:
    """Return the gates of A = (1−γ)·[(1−s)·S + s·G] + γ·C: at γ = s = 0 the convolution, with live gradients.

    γ is (H_c,) and s (H_g,), of the heads that have such a map; a missing one counts as 0.
    """
    if gaussian_heads and content_heads:
        of_gaussians = take_heads(scatter_heads(gamma, content_heads, num_heads), gaussian_heads, num_heads)
        s = torch.addcmul(s, of_gaussians, s, value=-1)
    return Gates(s, gamma)


def sigmoid_gates(lam: Tensor) -> Gates:
    """Return the gates of A = σ(λ)·G + (1−σ(λ))·C (d'Ascoli et al. 2021, Eq. 7)."""
    return Gates(torch.sigmoid(lam), torch.sigmoid(-lam), has_shift=False)


def softplus(raw: Tensor) -> Tensor:
    """Return α = log(1 + exp(β α̃)) / β, β = 5, at least fp32."""
    return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)), beta=SOFTPLUS_BETA)


def inverse_softplus(alpha: float) -> float:
    """Return α̃ with softplus(α̃) = α; α = 1 ↔ 0.99865. Stable for any α > 0."""
    return alpha + math.log(-math.expm1(-SOFTPLUS_BETA * alpha)) / SOFTPLUS_BETA


# --- projections ------------------------------------------------------------------------------------------------------


def project_values(x: Tensor, value: Tensor | None, groups: int) -> Tensor:
    """Return V = X W_val, (B, C, ·, ·); an identity W_val returns the bits of x."""
    return x if value is None else F.conv2d(x, value[:, :, None, None], groups=groups)


def project_out(gathered: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Sum the gathers (B, C, H, I, J) times W_out^h over the heads, `weight` (O, C/g, H): (B, O, I, J)."""
    return F.conv2d(gathered.flatten(1, 2), weight.flatten(1)[:, :, None, None], bias, groups=groups)


def fold_value(weight: Tensor, value: Tensor | None, groups: int) -> Tensor:
    """Multiply W_val (C, C/g) into W_out (O, C/g, …); returns the kernel (O, C/g, …)."""
    if value is None:
        return weight
    per_group = weight.flatten(2).unflatten(0, (groups, -1))
    folded = torch.einsum("gojh,gji->goih", per_group, value.unflatten(0, (groups, -1)))
    return folded.flatten(0, 1).view_as(weight)


def block_diagonal(matrix: Tensor, groups: int) -> Tensor:
    """Put the g blocks of (g·a, b) on the diagonal of (g·a, g·b)."""
    return torch.block_diag(*matrix.chunk(groups))


def is_recorded() -> bool:
    """Return True where an exporter records (sizes are symbols then), inside torch.func, or in forward-mode AD."""
    is_exported = torch.compiler.is_exporting() or torch.jit.is_tracing()
    if is_exported or torch.compiler.is_compiling():
        return is_exported
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


_kept = lru_cache(64)(torch.inference_mode(mode=False)(lambda make, *sizes: make(*sizes)))


def constant(make: Callable[..., Any], *sizes: Any) -> Any:
    """Return make(*sizes), tensors that follow from sizes and, last, a device; made once, unless code is recorded."""
    if torch.compiler.is_compiling() or is_recorded() or torch._guards.detect_fake_mode():
        return make(*sizes)
    captures = sizes[-1].type == "cuda" and torch.cuda.is_current_stream_capturing()
    return make(*sizes) if captures else _kept(make, *sizes)


def in_autocast(x: Tensor) -> bool:
    """Return True if autocast chooses the dtype of products of `x`. Meta tensors have no autocast."""
    # `torch.amp.is_autocast_available` would end the tracing of torch 2.11's compiler
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def on_accelerator(x: Tensor) -> bool:
    """Return False on a CPU, and for meta tensors, which stand for a CPU's in plans."""
    return x.device.type not in ("cpu", "meta")


def finite_half(x: Tensor) -> Tensor:
    """Clamp the overflow of half precision (±65,504); other dtypes are returned unchanged.

    An infinite logit makes softmax NaN, and NaN times a closed gate is NaN.
    """
    return x.nan_to_num() if isinstance(x, Tensor) and x.dtype == torch.float16 else x  # else a torch.fx.Proxy


# --- choices of heads -------------------------------------------------------------------------------------------------


# By slices: an index would be copied to the device in every forward pass, which then waits.


def scatter_heads(values: Tensor, heads: tuple[int, ...], num_heads: int, fill: Any = 0.0) -> Tensor:
    """Put the entries of some heads (h, …), ascending, among `fill`, one number or (H, …), for the others: (H, …)."""
    if len(heads) == num_heads:
        return values
    if isinstance(fill, float):
        others = values.new_full((num_heads, *values.shape[1:]), fill)
    else:
        others = torch.tensor(fill, dtype=values.dtype, device=values.device)
    pieces, first = [] if heads else [values], 0  # an output without any head stays in the graph of its parameters
    for is_given, run in groupby(range(num_heads), key=heads.__contains__):
        start, *rest = run
        count = 1 + len(rest)
        pieces.append(values[first : first + count] if is_given else others[start : start + count])
        first += count * is_given
    return torch.cat(pieces)


def take_heads(values: Tensor, heads: Sequence[int], num_heads: int) -> Tensor:
    """Select the entries of some heads, ascending: (H, …) → (h, …)."""
    if len(heads) == num_heads:
        return values
    starts, ends = [h for h in heads if h - 1 not in heads], [h + 1 for h in heads if h + 1 not in heads]
    pieces = [values[start:end] for start, end in zip(starts, ends, strict=True)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0] if pieces else values[:0]


def expand_heads(w: Weights) -> Weights:
    """Return the same layer with all maps present; missing ones get the coefficient zero."""
    num_heads, gaussian, content = w.geometry.num_heads, w.gaussian_heads, w.content_heads
    if len(gaussian) == len(content) == num_heads:
        return w
    query, key = (
        scatter_heads(matrix.view(len(content), w.head_dim, matrix.shape[1]), content, num_heads).flatten(0, 1)
        for matrix in (w.query, w.key)
    )
    center = scatter_heads(w.center, gaussian, num_heads, w.geometry.offsets())
    alpha = scatter_heads(w.alpha, gaussian, num_heads, 1.0)
    shares = scatter_heads(w.gates.gaussian, gaussian, num_heads), scatter_heads(w.gates.content, content, num_heads)
    gates, heads = Gates(*shares, w.gates.has_shift), tuple(range(num_heads))
    return w._replace(
        query=query, key=key, center=center, alpha=alpha, gates=gates, gaussian_heads=heads, content_heads=heads
    )


def select_heads(w: Weights, gaussian: tuple[int, ...], content: tuple[int, ...]) -> Weights:
    """Return the same layer with the maps of the heads `gaussian` and `content` only."""
    if (gaussian, content) == (w.gaussian_heads, w.content_heads):
        return w
    at, present = [w.gaussian_heads.index(h) for h in gaussian], len(w.gaussian_heads)
    among, with_content = [w.content_heads.index(h) for h in content], len(w.content_heads)
    shares = take_heads(w.gates.gaussian, at, present), take_heads(w.gates.content, among, with_content)
    query, key = (
        take_heads(matrix.unflatten(0, (with_content, w.head_dim)), among, with_content).flatten(0, 1)
        for matrix in (w.query, w.key)
    )
    center, alpha = take_heads(w.center, at, present), take_heads(w.alpha, at, present)
    gates = Gates(*shares, w.gates.has_shift)
    return w._replace(
        query=query, key=key, center=center, alpha=alpha, gates=gates, gaussian_heads=gaussian, content_heads=content
    )


def nonzero(mask: Tensor) -> tuple[int, ...]:
    """Return the indices where a mask holds, as Python numbers."""
    return tuple(mask.nonzero().flatten().tolist())
