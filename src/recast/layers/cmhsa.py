"""C-MHSA: self-attention with a relative bias, as a drop-in for a convolution."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recast.errors import RecastError, SizeError
from recast.layers.attention_conv import AttentionConv2d
from recast.layers.beside import AttentionBeside
from recast.layers.config import BiasGate
from recast.layers.functional.relative_bias import BiasedMaps, BiasedWeights, biased, biased_maps, offset_ranges
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.names import modules_by_name


class CMHSA(AttentionConv2d):
    """Self-attention over the pixels with a relative bias, one head for each kernel position of a convolution.

        y = b + Σ_h softmax(Q_h K_hᵀ / √D_h + B_h) X W_val W_out^h      B_h(δ) = M at δ = Δ_h, else 0, at the start

    (Lee et al. 2022, Progressive Reparameterization Scheduling, Eq. 3-5, after Li et al. 2021, Can Vision Transformers
    Perform Convolution?; Eq. 3 divides by the root of the token's width, Eq. 5 has a W_val for every head). δ is the
    offset of a key from the query, Δ_h the head's kernel position, M = `config.bias_init`.
    There is no gate: position and content share one softmax. At the start a head gives its pixel 1 / (1 + (L−1)·e^−M)
    of its attention, with L keys: the convolution, except for a share of about (L−1)·e^−M on other pixels.

    X are the pixels of the explicitly padded input. Padding is attended to like any token: a head at a padded position
    reads a zero there, as the convolution does.

    NCHW in, NCHW out. `relative_bias` has an entry for every offset, so its size depends on the input's:
    `set_size_(height, width)` sets the largest input (`recast_` does so from the plan's example). A smaller input uses
    the middle of the table. A larger one raises `RecastError`.

    Parameters: those of `AttentionConv2d`, and `relative_bias` (H, offsets of rows, of columns).

    Args:
        in_channels, out_channels: C and O, divisible by `groups`.
        geometry: kernel, stride, padding and dilation.
        groups: groups of the convolution.
        bias: add a bias (O,).
        config: a `RecastConfig` with gate="bias".

    Raises:
        RecastError: for another gate, and for a transposed geometry.

    Example:
        >>> layer = recast.CMHSA(4, 8, recast.Geometry((3, 3), padding=(1, 1, 1, 1)))
        >>> layer.set_size_(6, 6)
        >>> layer(torch.randn(2, 4, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    config: BiasGate
    relative_bias: nn.Parameter
    _default_config = BiasGate

    def _build(self) -> None:
        if self.config.gate != "bias":
            raise RecastError(f"CMHSA requires gate='bias', got gate={self.config.gate!r}: use GPSA")
        if self.geometry.is_transposed:
            raise RecastError("gate='bias' does not support transposed convolutions: skip them, or use gate='linear'")
        self.size: tuple[int, int] | None = None
        self.register_parameter("relative_bias", None)  # until `set_size_`

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the kernel of a convolution and W_qry; set W_val = I, W_key = 0, the bias M at Δ and 0 elsewhere."""
        super().reset_parameters()
        if self.size is not None:
            self.relative_bias.copy_(self._new_table(*self.size))

    def _new_table(self, height: int, width: int) -> Tensor:
        """Return the initial B_h(δ) for every offset of an input of `height` × `width` pixels."""
        rows, columns = offset_ranges(self.geometry, height, width)
        table = self._w_out().new_zeros(self.num_heads, rows.stop - rows.start, columns.stop - columns.start)
        for head, (row, column) in enumerate(self.geometry.offsets()):
            table[head, row - rows.start, column - columns.start] = self.config.bias_init
        return table

    @torch.no_grad()
    def set_size_(self, height: int, width: int) -> None:
        """Resize `relative_bias` for inputs of up to `height` × `width` pixels, in place.

        Offsets of the old table keep their biases. The parameter is replaced: call this before you create an optimiser.
        """
        table, old = self._new_table(height, width), self._parameters["relative_bias"]
        if old is not None and self.size is not None:
            here, there = self._shared((height, width), self.size)
            table[here] = old[there]
        self.relative_bias = nn.Parameter(table, (self.query if old is None else old).requires_grad)
        self.size = (height, width)

    def _shared(self, size_a: tuple[int, int], size_b: tuple[int, int]) -> list[tuple[slice, ...]]:
        """Return the indices of the offsets that both sizes have, in the tables for `size_a` and `size_b`."""
        ranges = [offset_ranges(self.geometry, *size) for size in (size_a, size_b)]
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(*ranges, strict=True)]
        return [self._at(both, axes) for axes in ranges]

    @staticmethod
    def _at(offsets: Iterable[slice], axes: Iterable[slice]) -> tuple[slice, ...]:
        """Return the index of `offsets` in a table of the offsets `axes`."""
        return (slice(None), *(slice(b.start - a.start, b.stop - a.start) for a, b in zip(axes, offsets, strict=True)))

    def set_geometry_(self, geometry: Geometry) -> None:
        """Set another stride, dilation or padding for the same kernel; `set_size_` must follow."""
        super().set_geometry_(geometry)
        self.size = None

    def weights(self, height: int, width: int) -> BiasedWeights:
        """Return the tensors for the pure functions, for an input of `height` × `width` pixels."""
        if self.size is None:
            raise RecastError("this CMHSA layer has no relative_bias yet: call set_size_(height, width) first")
        if not torch.jit.is_tracing() and (height > self.size[0] or width > self.size[1]):
            raise SizeError(
                f"this CMHSA layer takes inputs up to {self.size[0]}×{self.size[1]} pixels, got {height}×{width}: "
                f"plan with larger images, or call set_size_({height}, {width}) before training"
            )
        needed, stored = (offset_ranges(self.geometry, *size) for size in ((height, width), self.size))
        at = self._at(needed, stored)
        if type(height) is int:
            table = self.relative_bias[at]
        else:  # in an exported program a slice asks whether it is the whole table
            rows, columns = (torch.arange(s.start, s.stop, device=self.relative_bias.device) for s in at[1:])
            table = self.relative_bias[:, rows[:, None], columns]
        return BiasedWeights(
            self._w_out(), self.bias, self.value, self.query, self.key, table, self.geometry, self.groups
        )

    def chosen_backend(self) -> str:
        """Return the name of the only backend."""
        return "biased"

    def forward(self, input: Tensor) -> Tensor:
        self._check_input(input)
        return biased(input, self.weights(*input.shape[-2:]))

    def attention(self, x: Tensor) -> Tensor:
        """Return the attention maps for an input (B, C, H, W): (B, heads, queries, padded keys)."""
        return self.maps(x).mix

    def maps(self, x: Tensor) -> BiasedMaps:
        """Return the maps, and those of bias and content alone, each (1 or B, heads, queries, padded keys)."""
        self._check_input(x)
        return biased_maps(x, self.weights(*x.shape[-2:]))

    def extra_repr(self) -> str:
        size = "none yet" if self.size is None else f"up to {self.size[0]}×{self.size[1]}"
        return self._repr("", f", value={self.value is not None}, inputs {size}")


RecastLayer = GPSA | CMHSA | AttentionBeside
"""A convolution that became attention, or has attention beside it."""
GatedLayer = GPSA | AttentionBeside
"""A recast layer whose heads have gates: it can be closed and folded."""


def recast_layers(model: nn.Module) -> dict[str, RecastLayer]:
    """Return the recast layers of a model by `plain_name`, each once, in the order of `named_modules`."""
    return {name: module for name, module in modules_by_name(model).items() if isinstance(module, RecastLayer)}


def gated_layers(model: nn.Module) -> dict[str, GatedLayer]:
    """Return the recast layers that have gates, by name as `recast_layers`."""
    return {name: module for name, module in modules_by_name(model).items() if isinstance(module, GatedLayer)}
