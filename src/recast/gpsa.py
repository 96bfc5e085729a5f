"""GPSA: gated positional self-attention as a drop-in for a convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from recast import functional
from recast.config import RecastConfig
from recast.errors import RecastError
from recast.functional import AttentionMaps, Gates, Weights
from recast.geometry import Geometry, flip_transpose

SOFTPLUS_BETA = 5.0
QUERY_STD = 0.02
GROUPED_HEAD_DIM = 8


def _versions(*tensors: Tensor) -> tuple[tuple[int, int], ...]:
    """Which tensors these are and how often they were written to: a copy counts from zero, so its identity matters."""
    return tuple((id(t), -1 if t.is_inference() else t._version) for t in tensors)


def inverse_softplus(alpha: float) -> float:
    """α̃ with softplus(α̃) = log(1 + exp(β α̃)) / β = α, β = 5; α = 1 ↔ 0.99865. Stable for any α > 0."""
    return alpha + math.log(-math.expm1(-SOFTPLUS_BETA * alpha)) / SOFTPLUS_BETA


def default_head_dim(in_channels: int, groups: int, num_heads: int) -> int:
    """Width D of a head's queries and keys: the paper's ⌊C/H⌋, at least 1; in a grouped layer ⌊C/(g·H)⌋, at least 8.

    A grouped kernel has C/g input channels a head: queries and keys over all C would outweigh it many times.
    """
    dense = max(1, in_channels // num_heads)
    if groups == 1:
        return dense
    narrow = max(GROUPED_HEAD_DIM, in_channels // groups // num_heads)
    return narrow if groups == in_channels else min(dense, narrow)


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


class GPSA(nn.Module):
    """Gated positional self-attention over the pixels, one head per tap of the convolution it stands for.

        y = b + Σ_h A_h X W_val W_out^h

        gate="linear":   A = (1−γ)·[(1−s)·S + s·G] + γ·C     γ = s = 0 at the start: exactly the convolution
        gate="sigmoid":  A = σ(λ)·G + (1−σ(λ))·C             d'Ascoli et al. 2021 (Transformed CNNs), Eq. 7

    S is the one-hot shift to the head's tap, G a Gaussian of locality strength α around Δ, C content attention
    (`recast.functional`). NCHW in, NCHW out, any height and width: nothing in `state_dict` depends on the input's size.

    Parameters: `weight` (O, C/g, rows, columns) is W_out in a kernel's own layout, `bias` (O,), `value` W_val (C, C/g;
    none for depthwise), `query` and `key` (H·D, C), `center` Δ (H, 2), `raw_alpha` (H,) with α = softplus(raw_alpha;
    β = 5), and the gates: `gamma` γ and `spread` s (linear) or `lam` λ (sigmoid), (H,) each.

    In training every head is computed. In eval without gradients, heads that `refresh_gates` found closed are left out:
    call `recast.refresh_gates_(model)` after the weights changed, as `load` and `fit` do. Gates that an optimiser, an
    EMA or `load_state_dict` wrote to since then are noticed, and every head runs again; writes through `.data`, and
    writes under a compiled layer, are not.
    """

    open_heads: tuple[int, ...] | None
    _gate_versions: tuple[tuple[int, int], ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        geometry: Geometry,
        *,
        groups: int = 1,
        bias: bool = True,
        config: RecastConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = RecastConfig() if config is None else config
        if in_channels % groups or out_channels % groups:
            raise RecastError(f"{in_channels} and {out_channels} channels do not divide into {groups} groups")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.geometry, self.config = geometry, config
        self.num_heads = heads = geometry.num_heads
        depthwise = groups == in_channels and groups > 1
        self.head_dim = config.head_dim or default_head_dim(in_channels, groups, heads)
        self.backend = config.backend
        self.open_heads, self._gate_versions = None, ()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight = parameter(out_channels, in_channels // groups, *geometry.kernel)
        self.bias = parameter(out_channels) if bias else None
        self.value = None if depthwise else parameter(in_channels, in_channels // groups)
        self.query = parameter(heads * self.head_dim, in_channels)
        self.key = parameter(heads * self.head_dim, in_channels)
        self.center = parameter(heads, 2)
        self.raw_alpha = parameter(heads)
        if config.gate == "linear":
            self.gamma, self.spread = parameter(heads), parameter(heads)
        else:
            self.lam = parameter(heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A convolution's usual random kernel, W_val = I, W_key = 0 and W_qry random.

        Queries and keys must not both start at zero: neither would ever get a gradient.
        """
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.value is not None:
            eye = torch.eye(self.in_channels // self.groups, device=self.value.device, dtype=self.value.dtype)
            self.value.copy_(eye.repeat(self.groups, 1))
        nn.init.trunc_normal_(self.query, std=QUERY_STD)
        nn.init.zeros_(self.key)
        self.center.copy_(torch.tensor(self.geometry.offsets(), dtype=torch.float32))
        nn.init.constant_(self.raw_alpha, inverse_softplus(self.config.alpha))
        if self.config.gate == "linear":
            nn.init.constant_(self.gamma, self.config.gamma_init)
            nn.init.constant_(self.spread, self.config.s_init)
        else:
            nn.init.constant_(self.lam, self.config.lambda_init)

    # a convolution's own words, for networks that read them (to pad their input, say)

    @property
    def kernel_size(self) -> tuple[int, int]:
        """Rows and columns of the kernel."""
        return self.geometry.kernel

    @property
    def stride(self) -> tuple[int, int]:
        """Stride of the convolution, or of the transposed one."""
        return self.geometry.upsample if self.geometry.is_transposed else self.geometry.stride

    @property
    def dilation(self) -> tuple[int, int]:
        """Distance of the taps."""
        return self.geometry.dilation

    @property
    def padding(self) -> tuple[int, int]:
        """Pixels added above and on the left."""
        return self.geometry.padding[0], self.geometry.padding[2]

    @property
    def alpha(self) -> Tensor:
        """Locality strength α > 0, (H,), at least fp32."""
        raw = self.raw_alpha
        return F.softplus(raw.to(torch.promote_types(raw.dtype, torch.float32)), beta=SOFTPLUS_BETA)

    def spans(self) -> Tensor:
        """Attention span 1/α of every head, (H,)."""
        return 1 / self.alpha

    def gates(self) -> dict[str, Tensor]:
        """Gate values of every head, (H,) each: γ and s as "gamma" and "s", or λ and σ(λ) as "lambda" and "sigma"."""
        if self.config.gate == "sigmoid":
            return {"lambda": self.lam, "sigma": torch.sigmoid(self.lam)}
        gamma, s = self.gamma, self.spread
        if self.config.gate_range is not None:
            gamma, s = (_ClampInward.apply(gate, *self.config.gate_range) for gate in (gamma, s))
        return {"gamma": gamma, "s": s}

    def coefficients(self) -> Gates:
        """Shares of the shift, Gaussian and content maps of every head; they sum to one."""
        gates = self.gates()
        if self.config.gate == "sigmoid":
            return functional.sigmoid_gates(gates["lambda"])
        return functional.linear_gates(gates["gamma"], gates["s"])

    def weights(self) -> Weights:
        """The tensors as the pure functions take them."""
        return Weights(
            self.weight, self.bias, self.value, self.query, self.key, self.center, self.alpha, self.coefficients()
        )

    def chosen_backend(self) -> str:
        """Which code runs: `split` unless the configuration names another."""
        return "split" if self.backend == "auto" else self.backend

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        backend, w = self.chosen_backend(), self.weights()
        if backend == "split":
            heads = self._heads_to_run()
            return functional.split(input, w, self.geometry, self.groups, self.config.attend_padding, heads)
        function = functional.dense if backend == "dense" else functional.reference
        return function(input, w, self.geometry, self.groups, self.config.attend_padding)

    def _heads_to_run(self) -> tuple[int, ...] | None:
        """The open heads where the others may be skipped, None where all run.

        Closed heads still need their maps for their gate's gradient: they are skipped only where none is asked for. A
        tensor's version is a Python number that every in-place write raises, so no value is read here.
        """
        if self.training or torch.is_grad_enabled() or self.open_heads is None:
            return None
        if not torch.compiler.is_compiling() and self._gate_versions != _versions(self.gamma, self.spread):
            return None
        return self.open_heads

    def attention(self, x: Tensor) -> AttentionMaps:
        """S, G, C and their mix for an input (B, C, height, width), each (1 or B, H, queries, padded keys)."""
        self._check_input(x)
        return functional.attention_maps(x, self.weights(), self.geometry, self.config.attend_padding)

    @torch.no_grad()
    def refresh_gates(self) -> tuple[int, ...] | None:
        """Note which heads are open, γ ≠ 0 or s ≠ 0, so that eval can skip the others; returns them.

        The one place where gate values are read as Python numbers. None means that every head runs.
        """
        if self.config.gate != "linear":
            return None
        gates = self.gates()
        is_closed = (gates["gamma"] == 0) & (gates["s"] == 0)
        found = tuple((~is_closed).nonzero().flatten().tolist())
        self.open_heads, self._gate_versions = found, _versions(self.gamma, self.spread)
        return found

    @torch.no_grad()
    def close_heads_(self, tol: float) -> tuple[int, ...] | None:
        """Set γ = s = 0 in the heads that are closed within `tol`; returns the open ones (None: a sigmoid gate).

        Raises `RecastError` where `gate_range` does not hold 0.
        """
        if self.config.gate == "linear" and tol > 0:
            low, high = self.config.gate_range or (0.0, 0.0)
            if not low <= 0 <= high:
                raise RecastError(f"gate_range {self.config.gate_range} does not hold 0: its heads never close")
            gates = self.gates()
            closed = (gates["gamma"].abs() <= tol) & (gates["s"].abs() <= tol)
            self.gamma.masked_fill_(closed, 0.0)
            self.spread.masked_fill_(closed, 0.0)
        return self.refresh_gates()

    @torch.no_grad()
    def fold(self, tol: float = 0.0) -> nn.Module:
        """The convolution this layer is, if all its heads are closed within `tol`; else the layer, those heads at 0.

        The kernel is W_val · W_out^h per tap. With tol = 0 the function is the same to rounding.
        """
        return self.to_conv() if self.close_heads_(tol) == () else self

    # timm's `reparameterize_model` calls this name on every module that has it
    fuse = fold

    @torch.no_grad()
    def to_conv(self) -> nn.Module:
        """The shift part alone as a convolution, with a padding layer in front where `nn.Conv2d` has no word for it."""
        g, (top, bottom, left, right) = self.geometry, self.geometry.padding
        size: dict[str, Any] = {"in_channels": self.in_channels, "out_channels": self.out_channels}
        size |= {"kernel_size": g.kernel, "dilation": g.dilation, "groups": self.groups, "bias": self.bias is not None}
        size |= {"device": self.query.device, "dtype": self.query.dtype}
        explicit = not g.is_transposed and not g.same and (top, left) != (bottom, right)
        weight, trained = self._kernel()
        kernel = torch.empty_like(weight)  # in the memory format of the layer's own
        kernel.copy_(functional.fold_value(weight, self.value, self.groups))
        conv: nn.Module
        if g.is_transposed:
            cropped = (g.reach[0] - top, g.reach[1] - left)
            conv = nn.ConvTranspose2d(
                **size, stride=g.upsample, padding=cropped, output_padding=(bottom - top, right - left)
            )
            kernel = flip_transpose(kernel, self.groups)
        elif g.same:
            from timm.layers import Conv2dSame

            conv = Conv2dSame(**size, stride=g.stride)
        else:
            mode = "zeros" if explicit else g.padding_mode
            conv = nn.Conv2d(**size, stride=g.stride, padding=0 if explicit else (top, left), padding_mode=mode)
        conv.weight = nn.Parameter(kernel, trained)
        if self.bias is not None and conv.bias is not None:
            conv.bias.copy_(self.bias).requires_grad_(self.bias.requires_grad)
        conv.train(self.training)
        if not explicit:
            return conv
        layers = {
            "zeros": nn.ZeroPad2d,
            "reflect": nn.ReflectionPad2d,
            "replicate": nn.ReplicationPad2d,
            "circular": nn.CircularPad2d,
        }
        return nn.Sequential(layers[g.padding_mode]((left, right, top, bottom)), conv).train(self.training)

    def _kernel(self) -> tuple[Tensor, bool]:
        """W_out as in eval mode, and whether it is trained. Spectral norm takes a step where it is read in training."""
        if not parametrize.is_parametrized(self, "weight"):
            return self.weight, self.weight.requires_grad
        makers: nn.Module = self.parametrizations["weight"]  # type: ignore[index, assignment]
        modes = [(module, module.training) for module in makers.modules()]
        makers.eval()
        weight = self.weight
        for module, training in modes:
            module.training = training
        return weight, any(p.requires_grad for p in makers.parameters())

    @torch.no_grad()
    def set_geometry_(self, geometry: Geometry) -> None:
        """Another stride, dilation or padding for the same kernel; the heads' centres Δ go to its taps."""
        assert geometry.kernel == self.geometry.kernel
        self.geometry = geometry
        self.center.copy_(torch.tensor(geometry.offsets(), dtype=torch.float32))

    def add_bias_(self) -> None:
        """Give a layer without bias a zero one (calibration needs it)."""
        if self.bias is None:
            self.bias = nn.Parameter(self.weight.new_zeros(self.out_channels))

    def train(self, mode: bool = True) -> GPSA:
        if mode:
            self.open_heads = None
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.open_heads = None
        super()._load_from_state_dict(state_dict, *args, **kwargs)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise RecastError(f"GPSA expects (batch, {self.in_channels}, height, width), got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        opened = "all" if self.open_heads is None else len(self.open_heads)
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return (
            f"{self.in_channels} → {self.out_channels}, {self.geometry}{groups}, bias={self.bias is not None}, "
            f"{self.num_heads} heads × {self.head_dim} ({opened} open in eval), gate={self.config.gate}, "
            f"backend={self.chosen_backend()}"
        )
