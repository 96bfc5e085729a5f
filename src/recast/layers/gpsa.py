"""GPSA: gated positional self-attention as a drop-in for a convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recast.errors import RecastError
from recast.layers import functional
from recast.layers.functional import AttentionMaps, Weights
from recast.layers.geometry import Geometry
from recast.layers.heads import Heads, inverse_softplus
from recast.run.config import RecastConfig


class GPSA(Heads):
    """Gated positional self-attention over the pixels, one head per tap of the convolution it stands for.

        y = b + Σ_h A_h X W_val W_out^h

        gate="linear":   A = (1−γ)·[(1−s)·S + s·G] + γ·C     γ = s = 0 at the start: exactly the convolution
        gate="sigmoid":  A = σ(λ)·G + (1−σ(λ))·C             d'Ascoli et al. 2021 (Transformed CNNs), Eq. 7

    S is the one-hot shift to the head's tap, G a Gaussian of locality strength α around Δ, C content attention
    (`layers.functional`). NCHW in, NCHW out, any height and width: nothing in `state_dict` depends on the input's size.

    Parameters: `weight` (O, C/g, rows, columns) is W_out in a kernel's own layout, `bias` (O,), `value` W_val (C, C/g;
    none for depthwise), `query` and `key` (H·D, C), `center` Δ (H, 2), `raw_alpha` (H,) with α = softplus(raw_alpha;
    β = 5), and the gates: `gamma` γ and `spread` s (linear) or `lam` λ (sigmoid), (H,) each.

    In training every map is computed; `fold` and `prune_` remove those that are not needed, with their parameters. In
    eval without gradients, maps that `refresh_gates` found closed are left out: call `recast.refresh_gates_(model)`
    after the weights changed, as `load` and `fit` do. Gates that an optimiser, an EMA or `load_state_dict` wrote to
    since then are noticed, and every map runs again; writes through `.data`, and writes under a compiled layer, are
    not.

    `backend` names the code that runs (`layers.functional`), "auto" the cheapest. All agree to rounding. In eval with
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
        config = RecastConfig() if config is None else config
        if config.gate == "bias":
            raise RecastError("GPSA has gate='linear' or gate='sigmoid': the layer of gate='bias' is CMHSA")
        super().__init__(in_channels, out_channels, geometry, groups, bias, config, device, dtype)
        self.backend = config.backend
        self.gaussian_heads = self.content_heads = tuple(range(self.num_heads))
        self.open_maps = self._noted = self._closed = None
        self.center = self._parameter(self.num_heads, 2)
        self.raw_alpha = self._parameter(self.num_heads)
        if config.gate == "linear":
            self.gamma, self.spread = self._parameter(self.num_heads), self._parameter(self.num_heads)
        else:
            self.lam = self._parameter(self.num_heads)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A convolution's usual random kernel, W_val = I, W_key = 0 and W_qry random; positions at the taps."""
        super().reset_parameters()
        self.center.copy_(torch.tensor(self.geometry.offsets(), dtype=torch.float32))
        nn.init.constant_(self.raw_alpha, inverse_softplus(self.config.alpha))
        if self.config.gate == "linear":
            nn.init.constant_(self.gamma, self.config.gamma_init)
            nn.init.constant_(self.spread, self.config.s_init)
            if self.config.gamma_init == self.config.s_init == 0:  # no value is read: they are closed
                self.note_closed()
        else:
            nn.init.constant_(self.lam, self.config.lambda_init)

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
    def set_geometry_(self, geometry: Geometry) -> None:
        """Another stride, dilation or padding for the same kernel; the heads' centres Δ go to its taps."""
        assert geometry.kernel == self.geometry.kernel
        self.geometry = geometry
        offsets = [geometry.offsets()[h] for h in self.gaussian_heads]
        self.center.copy_(torch.tensor(offsets, dtype=torch.float32).view(-1, 2))

    def train(self, mode: bool = True) -> GPSA:
        if mode:
            self.open_maps = None
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.open_maps = None
        super()._load_from_state_dict(state_dict, *args, **kwargs)

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
