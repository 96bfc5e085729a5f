"""The heads of a GPSA layer: where they look, how open their gates are, which of their maps exist and which run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError
from recast.layers import functional
from recast.layers.functional import Gates
from recast.layers.taps import TapLayer
from recast.run.config import RecastConfig

SOFTPLUS_BETA = 5.0
LAMBDA_WITHOUT_CONTENT = 40.0
"""λ of a sigmoid head whose content map was pruned: σ(40) is 1 in single precision."""


def inverse_softplus(alpha: float) -> float:
    """α̃ with softplus(α̃) = log(1 + exp(β α̃)) / β = α, β = 5; α = 1 ↔ 0.99865. Stable for any α > 0."""
    return alpha + math.log(-math.expm1(-SOFTPLUS_BETA * alpha)) / SOFTPLUS_BETA


def _where(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())


class _Noted:
    """Which tensors these are and how often they were written to."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.versions = tensors, tuple(map(_version, tensors))

    def still(self, *tensors: Tensor) -> bool:
        """Whether these are the very tensors, and nobody wrote to them since."""
        same = len(tensors) == len(self.tensors) and all(a is b for a, b in zip(tensors, self.tensors, strict=True))
        return same and self.versions == tuple(map(_version, tensors))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _ClampInward(torch.autograd.Function):
    """Clamp to [low, high]; outside and on the border only gradients that push inward pass.

    A plain clamp would have no gradient outside, so a gate that an optimiser's momentum carried across the border
    could never come back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.high = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (x,) = grads, ctx.saved_tensors
        outward = ((x <= ctx.low) & (grad > 0)) | ((x >= ctx.high) & (grad < 0))
        return grad.masked_fill(outward, 0.0), None, None


class Heads(TapLayer):
    """Gates and positions of a layer's heads; `GPSA` is the layer."""

    config: RecastConfig
    gaussian_heads: tuple[int, ...]
    """Heads that have a Gaussian map; the others' was pruned (`prune_`)."""
    content_heads: tuple[int, ...]
    """Heads that have a content map; the others' was pruned."""
    open_maps: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Heads whose Gaussian and whose content map eval computes; None: all that exist."""
    _noted: _Noted | None
    """The gates that `open_maps` was read from."""
    _closed: _Noted | None
    """Gates that were all closed when somebody looked."""
    # parameters, made by the layer
    raw_alpha: nn.Parameter
    gamma: nn.Parameter
    spread: nn.Parameter
    lam: nn.Parameter

    @property
    def alpha(self) -> Tensor:
        """Locality strength α > 0 of the heads that have a Gaussian, (H_g,), at least fp32."""
        raw = self.raw_alpha
        return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)), beta=SOFTPLUS_BETA)

    def spans(self) -> Tensor:
        """Attention span 1/α of every head, (H,); 0 for one whose Gaussian was pruned."""
        return self._spread_out(1 / self.alpha, self.gaussian_heads)

    def gates(self) -> dict[str, Tensor]:
        """Gate values of every head, (H,) each: γ and s as "gamma" and "s", or λ and σ(λ) as "lambda" and "sigma".

        Those of pruned maps are 0; a sigmoid head without content has σ(λ) = 1.
        """
        if self.config.gate == "sigmoid":
            lam = self._spread_out(self.lam, self.content_heads, LAMBDA_WITHOUT_CONTENT)
            return {"lambda": lam, "sigma": torch.sigmoid(lam)}
        gamma, s = self.gamma, self.spread
        if self.config.gate_range is not None:
            gamma, s = (_ClampInward.apply(gate, *self.config.gate_range) for gate in (gamma, s))
        return {
            "gamma": self._spread_out(gamma, self.content_heads),
            "s": self._spread_out(s, self.gaussian_heads),
        }

    def _spread_out(self, values: Tensor, heads: tuple[int, ...], fill: float = 0.0) -> Tensor:
        """Values of some heads, `fill` for those whose map was pruned, (H,)."""
        return functional.scatter_heads(values, None if len(heads) == self.num_heads else heads, self.num_heads, fill)

    def coefficients(self) -> Gates:
        """Shares of the shift (H,), Gaussian (H_g,) and content (H_c,) maps; those of a head sum to one."""
        gates = self.gates()
        if self.config.gate == "sigmoid":
            every = functional.sigmoid_gates(gates["lambda"])
        else:
            every = functional.linear_gates(gates["gamma"], gates["s"])
        gaussian, content = every.gaussian, every.content
        if len(self.gaussian_heads) < self.num_heads:
            gaussian = gaussian[list(self.gaussian_heads)]
        if len(self.content_heads) < self.num_heads:
            content = content[list(self.content_heads)]
        return Gates(every.shift, gaussian, content)

    @property
    def open_heads(self) -> tuple[int, ...] | None:
        """Heads that eval computes beyond the shift, None: all of them."""
        return None if self.open_maps is None else tuple(sorted({*self.open_maps[0], *self.open_maps[1]}))

    def _maps_to_run(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Heads whose Gaussian and whose content map is open where the others may be skipped, None where all run.

        Closed heads still need their maps for their gate's gradient: they are skipped only where none is asked for. A
        tensor's version is a Python number that every in-place write raises, so no value is read here.
        """
        if self.training or torch.is_grad_enabled() or self.open_maps is None:
            return None
        if torch.compiler.is_compiling() or (self._noted is not None and self._noted.still(self.gamma, self.spread)):
            return self.open_maps
        return None

    def _is_known_closed(self) -> bool:
        """Whether all heads were closed when last noted, and no gate was written to since; never in training.

        A step of training must not depend on what was noted: a resumed run takes the same steps bit for bit.
        """
        if self.training or torch.compiler.is_compiling() or self._closed is None:
            return False
        return self._closed.still(self.gamma, self.spread)

    def note_closed(self) -> None:
        """The gates were just set to 0: until somebody writes to them, eval need not look."""
        self._closed = _Noted(self.gamma, self.spread)

    @torch.no_grad()
    def refresh_gates(self) -> tuple[int, ...] | None:
        """Note which heads are open, γ ≠ 0 or s ≠ 0, so that eval can skip the others; returns them.

        The one place where gate values are read as Python numbers. None means that every head runs.
        """
        if self.config.gate != "linear":
            return None
        gates = self.gates()
        self.open_maps = _where(gates["s"] != 0), _where(gates["gamma"] != 0)
        self._noted = _Noted(self.gamma, self.spread)
        self._closed = None if self.open_heads else self._noted
        return self.open_heads

    @torch.no_grad()
    def gate_sizes(self) -> Tensor:
        """How open the maps are that can be removed: |s| of Gaussian and |γ| of content heads, or 1 − σ(λ); one row."""
        gates = self.gates()
        if self.config.gate == "sigmoid":
            return self.coefficients().content.abs()
        gaussian, content = gates["s"][list(self.gaussian_heads)], gates["gamma"][list(self.content_heads)]
        return torch.cat([gaussian.abs(), content.abs()])

    @torch.no_grad()
    def close_maps_(self, tol: float) -> None:
        """Remove the maps whose gate is within `tol`: |s| of a Gaussian, |γ| of a content map, 1 − σ(λ) (`prune_`).

        Raises `RecastError` where `gate_range` does not hold 0.
        """
        gaussian, content = self.gaussian_heads, self.content_heads
        if self.config.gate == "linear":
            low, high = self.config.gate_range or (0.0, 0.0)
            if tol > 0 and not low <= 0 <= high:
                raise RecastError(f"gate_range {self.config.gate_range} does not hold 0: its heads never close")
            gates = self.gates()
            # what is not within the tolerance is open, NaN among it
            gaussian = _where(~(gates["s"].abs() <= tol))
            content = _where(~(gates["gamma"].abs() <= tol))
        else:
            open_content = _where(~(self.coefficients().content.abs() <= tol))
            content = tuple(self.content_heads[i] for i in open_content)
        if (gaussian, content) != (self.gaussian_heads, self.content_heads):
            self.prune_(gaussian, content)
        self.refresh_gates()

    @torch.no_grad()
    def prune_(self, gaussian_heads: Iterable[int], content_heads: Iterable[int]) -> None:
        """Remove the Gaussian and content maps of all heads but these, with their parameters; their share stays 0.

        What remains is trained as before; what is gone costs nothing, in training neither. A sigmoid head keeps its
        Gaussian. Raises `RecastError` for heads that have no such map.
        """
        gaussian, content = tuple(sorted(set(gaussian_heads))), tuple(sorted(set(content_heads)))
        if not (set(gaussian) <= set(self.gaussian_heads) and set(content) <= set(self.content_heads)):
            raise RecastError(
                f"prune_ keeps maps that are there: Gaussian heads {self.gaussian_heads}, content heads "
                f"{self.content_heads}, got {gaussian} and {content}"
            )
        if self.config.gate == "sigmoid" and len(gaussian) < self.num_heads:
            raise RecastError("a head with a sigmoid gate is its Gaussian and its content map: only content is pruned")
        among_content = [self.content_heads.index(h) for h in content]
        among_gaussian = [self.gaussian_heads.index(h) for h in gaussian]
        width = [h * self.head_dim + d for h in among_content for d in range(self.head_dim)]
        rows = {"query": width, "key": width, "center": among_gaussian, "raw_alpha": among_gaussian}
        if self.config.gate == "sigmoid":
            rows["lam"] = among_content
        else:
            rows |= {"gamma": among_content, "spread": among_gaussian}
        for name, index in rows.items():
            old: nn.Parameter = getattr(self, name)
            setattr(self, name, nn.Parameter(old[index].clone(), old.requires_grad))
        self.gaussian_heads, self.content_heads, self.open_maps = gaussian, content, None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles know nothing of what was noted of the original's gates."""
        return self.__dict__ | {"open_maps": None, "_noted": None, "_closed": None}
