"""GPSA: gated positional self-attention as a drop-in for a convolution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from recast import functional
from recast.config import RecastConfig
from recast.convolution import convolution
from recast.errors import RecastError
from recast.functional import AttentionMaps, Gates, Weights
from recast.geometry import Geometry

SOFTPLUS_BETA = 5.0
QUERY_STD = 0.02
GROUPED_HEAD_DIM = 8
LAMBDA_WITHOUT_CONTENT = 40.0
"""λ of a sigmoid head whose content map was pruned: σ(40) is 1 in single precision."""


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
        self.gaussian_heads = self.content_heads = tuple(range(heads))
        self.open_maps = self._noted = self._closed = None

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
            if self.config.gamma_init == self.config.s_init == 0:  # no value is read: they are closed
                self._closed = _Noted(self.gamma, self.spread)
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

    def weights(self) -> Weights:
        """The tensors as the pure functions take them."""
        pruned = len(self.gaussian_heads) + len(self.content_heads) < 2 * self.num_heads
        return Weights(
            self.weight,
            self.bias,
            self.value,
            self.query,
            self.key,
            self.center,
            self.alpha,
            self.coefficients(),
            self.gaussian_heads if pruned else None,
            self.content_heads if pruned else None,
        )

    def chosen_backend(self) -> str:
        """Which code runs now: the configuration's, or what `functional.choose_backend` finds cheapest."""
        if self.backend != "auto":
            return self.backend
        if self._is_known_closed():
            return "split"  # bitwise the convolution, also where all maps run because gradients are asked for
        gaussian, content = self._maps_to_run() or (self.gaussian_heads, self.content_heads)
        linear = self.config.content == "linear"
        opened = set(gaussian) if linear else {*gaussian, *content}
        return functional.choose_backend(self.geometry, self.groups, len(opened), self.config.gate == "linear")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        w, maps = self.weights(), self._maps_to_run()
        if maps is not None:
            w = functional.select_heads(w, *maps)
        form = getattr(functional, self.chosen_backend())
        return form(input, w, self.geometry, self.groups, self.config.attend_padding, self.config.content)

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

    def attention(self, x: Tensor) -> AttentionMaps:
        """S, G, C and their mix for an input (B, C, height, width), each (1 or B, H, queries, padded keys)."""
        self._check_input(x)
        return functional.attention_maps(
            x, self.weights(), self.geometry, self.config.attend_padding, self.config.content
        )

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

    @torch.no_grad()
    def fold_value_(self) -> None:
        """Multiply W_val into W_out; X itself is the value from now on. Raises `RecastError` if W_out is computed."""
        if self.value is None:
            return
        if parametrize.is_parametrized(self, "weight"):
            raise RecastError("W_val cannot be multiplied into a kernel that is computed (keep_parametrization)")
        self.weight.copy_(functional.fold_value(self.weight, self.value, self.groups))
        self.value = None

    def fold(self, tol: float = 0.0) -> nn.Module:
        """The convolution this layer is, if all its maps are closed within `tol`; else the layer in its smallest form:
        closed maps removed, W_val multiplied into W_out.

        With tol = 0 the function is the same to rounding. `recast.fold_` does all layers of a model and reports.
        """
        self.close_maps_(tol)
        if self.config.gate == "linear" and not self.gaussian_heads and not self.content_heads:
            return self.to_conv()
        if not parametrize.is_parametrized(self, "weight"):
            self.fold_value_()
        return self

    # timm's `reparameterize_model` calls this name on every module that has it
    fuse = fold

    @torch.no_grad()
    def to_conv(self) -> nn.Module:
        """The shift part alone as a convolution, with a padding layer in front where `nn.Conv2d` has no word for it."""
        weight, trained = self.kernel_in_eval()
        kernel = torch.empty_like(weight)  # in the memory format of the layer's own
        kernel.copy_(functional.fold_value(weight, self.value, self.groups))
        return convolution(self.geometry, kernel, self.bias, self.groups, trained).train(self.training)

    def kernel_in_eval(self) -> tuple[Tensor, bool]:
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
        offsets = [geometry.offsets()[h] for h in self.gaussian_heads]
        self.center.copy_(torch.tensor(offsets, dtype=torch.float32).view(-1, 2))

    def add_bias_(self) -> None:
        """Give a layer without bias a zero one (calibration needs it)."""
        if self.bias is None:
            self.bias = nn.Parameter(self.weight.new_zeros(self.out_channels))

    def train(self, mode: bool = True) -> GPSA:
        if mode:
            self.open_maps = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles know nothing of what was noted of the original's gates."""
        return self.__dict__ | {"open_maps": None, "_noted": None, "_closed": None}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.open_maps = None
        super()._load_from_state_dict(state_dict, *args, **kwargs)

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise RecastError(f"GPSA expects (batch, {self.in_channels}, height, width), got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        def count(heads: tuple[int, ...]) -> str:
            return "all" if len(heads) == self.num_heads else str(len(heads))

        opened = "all" if self.open_heads is None else str(len(self.open_heads))
        maps = f"{count(self.gaussian_heads)} Gaussian, {count(self.content_heads)} content; {opened} open in eval"
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        content = "" if self.config.content == "softmax" else f", content={self.config.content}"
        return (
            f"{self.in_channels} → {self.out_channels}, {self.geometry}{groups}, bias={self.bias is not None}, "
            f"{self.num_heads} heads × {self.head_dim} ({maps}), gate={self.config.gate}{content}, "
            f"value={self.value is not None}, backend={self.chosen_backend()}"
        )
