"""How a convolution becomes attention, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recast.errors import RecastError
from recast.run.fields import Count, Finite, Positive, check_fields

Gate = Literal["linear", "sigmoid", "bias"]
Backend = Literal["auto", "reference", "dense", "split", "merged"]
Content = Literal["softmax", "linear"]
StrideMode = Literal["keep", "remove", "dilate"]


@dataclass(frozen=True)
class RecastConfig:
    """How a convolution becomes gated positional self-attention (GPSA)."""

    gate: Gate = "linear"
    """linear: starts as exactly the convolution. sigmoid: the gate of the T-CNN paper (Eq. 7). bias: no gate, position
    is a learned bias in the content's own softmax (C-MHSA, PRS)."""
    alpha: Positive = 1.0
    """Locality strength α > 0 of the Gaussian heads at the start; 1/α is the attention span."""
    lambda_init: Finite = 1.0
    """Sigmoid gate only: λ at the start; σ(λ) is the share of positional attention."""
    gamma_init: Finite = 0.0
    """Linear gate only: share γ of content attention at the start; 0 is exact."""
    s_init: Finite = 0.0
    """Linear gate only: spread s (one-hot shift to Gaussian) at the start; 0 is exact."""
    bias_init: Positive = 20.0
    """bias only: relative bias M of a head's tap at the start; other pixels have 0, so e^-M of its weight. 20: exact to
    7e-7, but its attention hardly learns. 10 to 15 is for training."""
    gate_range: tuple[float, float] | None = None
    """Linear gate only: clamp γ and s, e.g. (0, 1) keeps every map a convex mix. None: free reals."""
    head_dim: Count | None = None
    """Width D_h of a head's queries and keys. None: max(1, C_in // heads); about 8 in grouped and depthwise layers."""
    content: Content = "softmax"
    """softmax: the paper's. linear: cost linear in the tokens, for early stages (efficient attention, rank D_h)."""
    keep_parametrization: bool = False
    """Keep what makes the kernel (weight standardisation, weight or spectral norm) over W_out. Off: take its result."""
    stride: StrideMode = "keep"
    """keep: exact. remove: the paper's stride 1. dilate: as remove, with the layers after it dilated to match."""
    attend_padding: bool = False
    """Let content attention see the padding tokens (the paper's literal reading)."""
    backend: Backend = "auto"
    """Which code computes the layer: they agree to rounding."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gate == "sigmoid" and (self.gamma_init, self.s_init, self.gate_range) != (0.0, 0.0, None):
            raise RecastError(
                "gamma_init, s_init and gate_range belong to gate='linear'; gate='sigmoid' takes lambda_init"
            )
        if self.gate == "bias":
            self._check_bias()
        elif self.bias_init != 20.0:
            raise RecastError(f"bias_init belongs to gate='bias', got it with gate={self.gate!r}")
        if self.gate == "linear" and self.lambda_init != 1.0:
            raise RecastError("lambda_init belongs to gate='sigmoid'; gate='linear' takes gamma_init and s_init")
        if self.gate_range is not None:
            low, high = self.gate_range
            if not low < high:
                raise RecastError(f"gate_range must be (low, high) with low < high, got {self.gate_range}")
            if not (low <= self.gamma_init <= high and low <= self.s_init <= high):
                raise RecastError(f"gamma_init and s_init must lie in gate_range {self.gate_range}")

    def _check_bias(self) -> None:
        """Raise for a positional part that C-MHSA does not have: its maps are one softmax of content and bias."""
        plain = RecastConfig()
        others = ("alpha", "lambda_init", "gamma_init", "s_init", "gate_range", "content", "attend_padding", "backend")
        if wrong := [name for name in others if getattr(self, name) != getattr(plain, name)]:
            raise RecastError(
                f"{wrong[0]} does not belong to gate='bias', got {wrong[0]}={getattr(self, wrong[0])!r}; it "
                "takes bias_init and head_dim"
            )
