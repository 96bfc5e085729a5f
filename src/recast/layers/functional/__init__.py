"""Gated positional self-attention as pure functions: `reference` reads like the paper, the others are fast.

    y = b + Σ_h A_h X W_val W_out^h                A_h = shift_h · S_h + gaussian_h · G_h + content_h · C_h

    S_h   the shift to kernel position h: query i attends to the one token at its anchor + offset (a convolution)
    G_h   softmax over tokens of −α_h ‖δ − Δ_h‖²   (d'Ascoli et al. 2021, Eq. 4)
    C_h   softmax over tokens of Q_h K_hᵀ / √D_h   (Eq. 1); padding tokens are masked out, never out of S_h and G_h

The three coefficients of a head sum to one (`linear_gates`, `sigmoid_gates`).

Shapes: B batch, C input channels, O output channels, g groups, H heads, D head width, N queries (output pixels,
row-major), M keys (pixels of the padded input, row-major), I×J the query grid, Y×X the key grid. All backends agree to
rounding.

operands       the tensors of a layer, its gates and their mix, choices of heads
maps           S, G and C written out; the backends `reference`, the definition, and `dense`
backends       the fast backends: `split`, `merged`, `sdpa` and `plain`, for exporters; and the choice of one
long_maps      content attention of long maps on a CPU: no map is held whole, forward or backward
relative_bias  another layer: position as a bias in the content's softmax (C-MHSA), written out and fast
"""

from recast.layers.functional.backends import choose_backend, merged, plain, sdpa, split
from recast.layers.functional.maps import AttentionMaps, attention_maps, dense, gather, gaussian_factors, reference
from recast.layers.functional.operands import Gates, Weights, expand_heads, linear_gates, select_heads, sigmoid_gates

__all__ = [
    "AttentionMaps", "Gates", "Weights", "attention_maps", "choose_backend", "dense", "expand_heads",
    "gather", "gaussian_factors", "linear_gates", "merged", "plain", "reference", "sdpa", "select_heads",
    "sigmoid_gates", "split",
]  # fmt: skip
