"""GPSA: gated positional self-attention as a drop-in for a convolution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recast import functional
from recast.config import RecastConfig
from recast.convolution import convolution
from recast.errors import RecastError
from recast.functional import AttentionMaps, Weights
from recast.geometry import Geometry
from recast.heads import Heads, inverse_softplus

QUERY_STD = 0.02
GROUPED_HEAD_DIM = 8


def default_head_dim(in_channels: int, groups: int, num_heads: int) -> int:
    """Width D of a head's queries and keys: the paper's ⌊C/H⌋, at least 1; in a grouped layer ⌊C/(g·H)⌋, at least 8.

    A grouped kernel has C/g input channels a head: queries and keys over all C would outweigh it many times.
    """
    dense = max(1, in_channels // num_heads)
    if groups == 1:
        return dense
    narrow = max(GROUPED_HEAD_DIM, in_channels // groups // num_heads)
    return narrow if groups == in_channels else min(dense, narrow)


class GPSA(Heads):
    """Gated positional self-attention over the pixels, one head per tap of the convolution it stands for.

        y = b + Σ_h A_h X W_val W_out^h

        gate="linear":   A = (1−γ)·[(1−s)·S + s·G] + γ·C     γ = s = 0 at the start: exactly the convolution
        gate="sigmoid":  A = σ(λ)·G + (1−σ(λ))·C             d'Ascoli et al. 2021 (Transformed CNNs), Eq. 7

    S is the one-hot shift to the head's tap, G a Gaussian of locality strength α around Δ, C content attention
    (`recast.functional`). NCHW in, NCHW out, any height and width: nothing in `state_dict` depends on the input's size.

    Parameters: `weight` (O, C/g, rows, columns) is W_out in a kernel's own layout, `bias` (O,), `value` W_val (C, C/g;
    none for depthwise), `query` and `key` (H·D, C), `center` Δ (H, 2), `raw_alpha` (H,) with α = softplus(raw_alpha;
    β = 5), and the gates: `gamma` γ and `spread` s (linear) or `lam` λ (sigmoid), (H,) each.

    In training every map is computed; `fold` and `prune_` remove those that are not needed, with their parameters. In
    eval without gradients, maps that `refresh_gates` found closed are left out: call `recast.refresh_gates_(model)`
    after the weights changed, as `load` and `fit` do. Gates that an optimiser, an EMA or `load_state_dict` wrote to
    since then are noticed, and every map runs again; writes through `.data`, and writes under a compiled layer, are
    not.

    `backend` names the code that runs (`recast.functional`), "auto" the cheapest. All agree to rounding. In eval with
    all heads closed that is the convolution itself, bit for bit.
    """

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
                self.note_closed()
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
        opened = len({*gaussian, *content})
        return functional.choose_backend(self.geometry, self.groups, opened, self.config.gate == "linear")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        w, maps = self.weights(), self._maps_to_run()
        if maps is not None:
            w = functional.select_heads(w, *maps)
        form = getattr(functional, self.chosen_backend())
        return form(input, w, self.geometry, self.groups, self.config.attend_padding, self.config.content)

    def attention(self, x: Tensor) -> AttentionMaps:
        """S, G, C and their mix for an input (B, C, height, width), each (1 or B, H, queries, padded keys)."""
        self._check_input(x)
        return functional.attention_maps(
            x, self.weights(), self.geometry, self.config.attend_padding, self.config.content
        )

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
