"""GPSA: gated positional self-attention as a drop-in for a convolution."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recast.errors import RecastError
from recast.layers import functional
from recast.layers.attention_conv import AttentionConv2d
from recast.layers.config import BiasGate, LinearGate, SigmoidGate
from recast.layers.forms import Tuned
from recast.layers.functional import operands
from recast.layers.functional.maps import AttentionMaps
from recast.layers.functional.operands import Gates, Weights, nonzero, scatter_heads, take_heads
from recast.layers.geometry import Geometry
from recast.modes import computes_as

LAMBDA_WITHOUT_CONTENT = 40.0
"""λ of a sigmoid head whose content map was pruned: σ(40) is 1 in single precision."""


class GPSA(Tuned, AttentionConv2d):
    """Gated positional self-attention over the pixels, one head for each kernel position of a convolution.

        y = b + Σ_h A_h X W_val W_out^h

        gate="linear":   A = (1−γ)·[(1−s)·S + s·G] + γ·C     γ = s = 0 at the start: exactly the convolution
        gate="sigmoid":  A = σ(λ)·G + (1−σ(λ))·C             d'Ascoli et al. 2021 (Transformed CNNs), Eq. 7

    S is the one-hot shift to the head's kernel position, G a Gaussian of locality strength α around Δ, C content
    attention (`layers.functional`). NCHW in, NCHW out, any height and width: nothing in `state_dict` depends on the
    input's size.

    Every head has a shift. H_g heads have a Gaussian and H_c a content map: those of the configuration, minus those
    that `prune_` removed. A map that a head does not have costs nothing and has the share 0.

    Parameters: those of `AttentionConv2d`, `center` Δ (H_g, 2), `raw_alpha` (H_g,) with α = softplus(raw_alpha; β = 5),
    and the gates: `gamma` γ (H_c,) and `spread` s (H_g,) (linear) or `lam` λ (H_c,) (sigmoid).

    In training every map is computed; `fold` and `prune_` remove those that are not needed, with their parameters. In
    eval without gradients, a CPU skips maps with closed gates, which it reads in microseconds. A GPU would have to wait
    for them, and compilers and exporters have no values: there all maps run.

    `backend` selects the implementation (`layers.functional`); "auto" is the fastest that `recast.tune_` measured, else
    the cheapest by a rule. All agree up to rounding. With all heads closed, eval on a CPU is bitwise the convolution.

    Args:
        in_channels, out_channels: C and O, divisible by `groups`.
        geometry: kernel, stride, padding and dilation.
        groups: groups of the convolution.
        bias: add a bias (O,).
        config: a `RecastConfig` with gate="linear" or gate="sigmoid".

    Raises:
        RecastError: for gate="bias", and for channels that `groups` does not divide.

    Example:
        >>> layer = recast.GPSA(4, 8, recast.Geometry((3, 3), padding=(1, 1, 1, 1)))
        >>> x = torch.randn(2, 4, 6, 6)
        >>> layer(x).shape
        torch.Size([2, 8, 6, 6])
        >>> torch.allclose(layer(x), layer.to_conv()(x), atol=1e-5)  # gates are closed at the start
        True
    """

    config: LinearGate | SigmoidGate
    gaussian_heads: tuple[int, ...]
    """Heads that have a Gaussian map: those of `config.gaussian_heads`, minus pruned ones."""
    center: nn.Parameter
    raw_alpha: nn.Parameter
    gamma: nn.Parameter
    spread: nn.Parameter
    lam: nn.Parameter

    def _build(self) -> None:
        if isinstance(self.config, BiasGate):
            raise RecastError("GPSA requires gate='linear' or gate='sigmoid', got gate='bias': use CMHSA")
        self.backend = self.config.backend
        self.gaussian_heads = self.geometry.heads(self.config.gaussian_heads)
        self.center = self._parameter(len(self.gaussian_heads), 2)
        self.raw_alpha = self._parameter(len(self.gaussian_heads))
        if self.config.gate == "linear":
            self.gamma = self._parameter(len(self.content_heads))
            self.spread = self._parameter(len(self.gaussian_heads))
        else:
            self.lam = self._parameter(len(self.content_heads))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the kernel of a convolution and W_qry; set W_val = I, W_key = 0 and Δ to the kernel's positions."""
        super().reset_parameters()
        first = {"gamma": "gamma_init", "spread": "s_init", "lam": "lambda_init"}
        for name, value in first.items():
            if (gate := self._parameters.get(name)) is not None:
                nn.init.constant_(gate, getattr(self.config, value))
        if self.gaussian_heads:
            self.center.copy_(self._positions())
            nn.init.constant_(self.raw_alpha, operands.inverse_softplus(self.config.alpha))

    # --- positions and gates ------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> Tensor:
        """Locality strength α > 0 of the heads that have a Gaussian, (H_g,), at least fp32."""
        return operands.softplus(self._entries("raw_alpha", 0))

    def spans(self) -> Tensor:
        """Return the attention span 1/α of every head, (H,); 0 for pruned Gaussians."""
        return scatter_heads(1 / self.alpha, self.gaussian_heads, self.num_heads)

    def gates(self) -> dict[str, Tensor]:
        """Return the gates of every head, (H,) each: γ and s as "gamma" and "s", or λ and σ(λ) as "lambda" and "sigma".

        Gates of pruned maps are 0; a sigmoid head without content has σ(λ) = 1.
        """
        if self.config.gate == "sigmoid":
            lam = self._of_heads("lam", self.content_heads, LAMBDA_WITHOUT_CONTENT)
            return {"lambda": lam, "sigma": torch.sigmoid(lam)}
        return {
            "gamma": self._of_heads("gamma", self.content_heads),
            "s": self._of_heads("spread", self.gaussian_heads),
        }

    def _of_heads(self, name: str, heads: tuple[int, ...], fill: float = 0.0) -> Tensor:
        """Return the gate of every head, (H,), from those of `heads`."""
        return scatter_heads(self._entries(name, 0), heads, self.num_heads, fill)

    def coefficients(self) -> Gates:
        """Return the coefficients of the Gaussian (H_g,) and content (H_c,) maps; the shift has what is left of 1."""
        if self.config.gate == "linear":
            heads = self.gaussian_heads, self.content_heads, self.num_heads
            return functional.linear_gates(self._entries("gamma", 0), self._entries("spread", 0), *heads)
        every = functional.sigmoid_gates(self._of_heads("lam", self.content_heads, LAMBDA_WITHOUT_CONTENT))
        return every._replace(content=take_heads(every.content, self.content_heads, self.num_heads))

    def open_maps(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the heads with an open Gaussian and those with an open content map, γ ≠ 0 and s ≠ 0; reads values."""
        if self.config.gate == "sigmoid":
            return self.gaussian_heads, self.content_heads

        def opened(name: str, heads: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(head for head, gate in zip(heads, self._entries(name, 0).tolist(), strict=True) if gate)

        return opened("spread", self.gaussian_heads), opened("gamma", self.content_heads)

    def _can_skip(self) -> bool:
        """Return True in eval if gate values can be read without waiting.

        False in training: a resumed run must take the same steps bit for bit.
        """
        if self.training or torch.compiler.is_compiling() or operands.is_recorded():
            return False
        gates = self._linear_gates()
        return all(type(gate) in (Tensor, nn.Parameter) and gate.device.type == "cpu" for gate in gates)

    def _maps_to_run(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the heads whose Gaussian and whose content map must run: of closed heads only for gates' gradients."""
        if self._can_skip() and not (torch.is_grad_enabled() and any(g.requires_grad for g in self._linear_gates())):
            return self.open_maps()
        return self.gaussian_heads, self.content_heads

    def _linear_gates(self) -> list[nn.Parameter]:
        """Return the parameters γ and s, those that the layer has."""
        return [gate for name in ("gamma", "spread") if (gate := self._parameters.get(name)) is not None]

    # --- forward ------------------------------------------------------------------------------------------------------

    def weights(self) -> Weights:
        """Return the tensors for the pure functions."""
        return Weights(
            self._w_out(), self.bias, self.value, self._entries("query", 0, self.in_channels),
            self._entries("key", 0, self.in_channels), self._entries("center", 0, 2), self.alpha, self.coefficients(),
            self.gaussian_heads, self.content_heads, self.geometry, self.head_dim, self.groups,
            self.config.attend_padding, self.config.content,
        )  # fmt: skip

    def chosen_backend(self, size: tuple[int, int] | None = None) -> str:
        """Return the backend that runs now for inputs of this height and width; without `size`, of the size tuned last.

        It is the configured one, the one that `recast.tune_` chose, or the cheapest (`functional.choose_backend`).
        """
        if self.backend != "auto":
            return self.backend
        if self._can_skip() and not any(self.open_maps()):
            return "split"  # bitwise the convolution, even if gradients make all maps run
        device, has_shift = self._w_out().device.type, self.config.gate == "linear"
        if form := self.tuned_form(device, size):
            return form
        opened = len(set().union(*self._maps_to_run()))
        keys = None if size is None or self.config.content == "linear" else size[0] * size[1]
        return functional.choose_backend(self.geometry, self.groups, opened, has_shift, device, keys)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        size = input.shape[2], input.shape[3]
        return self.computed_by("plain" if operands.is_recorded() else self.chosen_backend(size), input)

    def computed_by(self, backend: str, x: Tensor) -> Tensor:
        """Return the output for x (B, C, H, W), computed by a function of `layers.functional`."""
        w = functional.select_heads(self.weights(), *self._maps_to_run())
        output: Tensor = getattr(functional, backend)(x, w)
        return output

    def attention(self, x: Tensor) -> AttentionMaps:
        """Return S, G, C and their mix for an input (B, C, H, W), each (1 or B, heads, queries, padded keys)."""
        self._check_input(x)
        return functional.attention_maps(x, self.weights())

    @torch.no_grad()
    def _is_closed(self) -> bool:
        gates = self.coefficients()
        return gates.has_shift and not (gates.gaussian.any() or gates.content.any())

    # --- smaller forms ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gate_sizes(self) -> Tensor:
        """Return |s| of the Gaussian and |γ| of the content heads, or 1 − σ(λ), concatenated."""
        if self.config.gate == "sigmoid":
            return self.coefficients().content.abs()
        gates = self.gates()
        maps = ("s", self.gaussian_heads), ("gamma", self.content_heads)
        return torch.cat([take_heads(gates[name], heads, self.num_heads).abs() for name, heads in maps])

    @torch.no_grad()
    def close_maps_(self, tol: float) -> None:
        """Remove the maps whose gate is within `tol`: |s| of a Gaussian, |γ| of a content map, 1 − σ(λ) (`prune_`)."""
        # not >: NaN counts as open
        opened = nonzero(~(self.gate_sizes() <= tol))
        gaussian, first = self.gaussian_heads, 0
        if self.config.gate == "linear":
            first = len(gaussian)
            gaussian = tuple(gaussian[i] for i in opened if i < first)
        content = tuple(self.content_heads[i - first] for i in opened if i >= first)
        if (gaussian, content) != (self.gaussian_heads, self.content_heads):
            self.prune_(gaussian, content)

    @torch.no_grad()
    def prune_(self, gaussian_heads: Iterable[int], content_heads: Iterable[int]) -> None:
        """Remove the Gaussian and content maps of all other heads, with their parameters; their share stays 0.

        Removed maps cost nothing, not even in training. A sigmoid head keeps its Gaussian. Raises `RecastError` for
        heads without such a map.
        """
        gaussian, content = tuple(sorted(set(gaussian_heads))), tuple(sorted(set(content_heads)))
        if not (set(gaussian) <= set(self.gaussian_heads) and set(content) <= set(self.content_heads)):
            raise RecastError(
                f"prune_ got Gaussian heads {gaussian} and content heads {content}, but the layer has "
                f"{self.gaussian_heads} and {self.content_heads}"
            )
        if self.config.gate == "sigmoid" and len(gaussian) < self.num_heads:
            raise RecastError("gate='sigmoid' requires the Gaussian of every head: prune content heads only")
        of_gaussian = [self.gaussian_heads.index(h) for h in gaussian]
        of_content = [self.content_heads.index(h) for h in content]
        width = [h * self.head_dim + d for h in of_content for d in range(self.head_dim)]
        rows = {"center": of_gaussian, "raw_alpha": of_gaussian, "spread": of_gaussian, "query": width, "key": width}
        rows |= {"gamma": of_content, "lam": of_content}
        for name, index in rows.items():
            if (old := self._parameters.get(name)) is not None:
                setattr(self, name, nn.Parameter(old[index].clone(), old.requires_grad) if index else None)
        self.gaussian_heads, self.content_heads = gaussian, content
        self.tuned = ()

    def fold(self, tol: float = 0.0) -> nn.Module:
        """Return a convolution if all maps are closed within `tol`, else the layer in its smallest form.

        The smallest form has no closed maps, and W_val is multiplied into W_out.

        With tol = 0 the function is the same to rounding. `recast.fold_` folds all layers of a model, and reports.
        """
        self.close_maps_(tol)
        closed = self.config.gate == "linear" and not self.gaussian_heads and not self.content_heads
        if closed and computes_as(self, GPSA):  # a convolution would not have its hooks
            conv = self.to_conv()
            if self.weight_is_kernel() and parametrize.is_parametrized(self, "weight"):
                parametrize.transfer_parametrizations_and_params(self, [*conv.modules()][-1], "weight")
            return conv
        self.fold_value_()
        return self

    # timm's `reparameterize_model` calls this name on every module that has it
    fuse = fold

    @torch.no_grad()
    def set_geometry_(self, geometry: Geometry) -> None:
        """Set another stride, dilation or padding for the same kernel, and the centres Δ to its positions."""
        super().set_geometry_(geometry)
        if self.gaussian_heads:
            self.center.copy_(self._positions())

    def _positions(self) -> Tensor:
        """Return the kernel positions of the heads that have a Gaussian, (H_g, 2)."""
        offsets = self.geometry.offsets()
        return torch.tensor([offsets[h] for h in self.gaussian_heads], dtype=torch.float32).view(-1, 2)

    def extra_repr(self) -> str:
        maps = [len(self.gaussian_heads), len(self.content_heads)]
        gaussian, content = ("all" if count == self.num_heads else count for count in maps)
        opened = len(set().union(*self._maps_to_run()))
        kind = "" if self.config.content == "softmax" else f", content={self.config.content}"
        return self._repr(
            f" ({gaussian} Gaussian, {content} content; {opened} open in eval)",
            f"{kind}, value={self.value is not None}, backend={self.chosen_backend()}",
        )
