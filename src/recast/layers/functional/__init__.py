"""Gated positional self-attention as pure functions: `reference` reads like the paper, the others are fast.

    y = b + Σ_h A_h X W_val W_out^h                A_h = shift_h · S_h + gaussian_h · G_h + content_h · C_h

    S_h   the shift to tap h: query i attends to the one token at its anchor + tap offset (a convolution)
    G_h   softmax over tokens of −α_h ‖δ − Δ_h‖²   (d'Ascoli et al. 2021, Eq. 4)
    C_h   softmax over tokens of Q_h K_hᵀ / √D_h   (Eq. 1); padding tokens are masked out, never out of S_h and G_h

The three coefficients of a head sum to one (`linear_gates`, `sigmoid_gates`).

Shapes: B batch, C input channels, O output channels, g groups, H heads, D head width, N queries (output pixels,
row-major), M keys (pixels of the padded input, row-major), I×J the query grid, Y×X the key grid. All functions agree to
rounding.

weights     the tensors of a layer, its gates, choices of heads
maps        S, G and C written out, and G as a Kronecker product
written_out `reference`, the definition head by head, and `dense`, merged maps and two products
fast        `split` and `merged`: the convolution and what its heads add to it, or everything in one
streaming   the operator both rest on: no map is ever held whole, forward or backward
choose      which of them is cheapest for a layer
biased      another layer: position as a bias in the content's softmax (C-MHSA), written out and fast
"""

from recast.layers.functional.biased import (
    BiasedMaps,
    BiasedWeights,
    bias_map,
    biased,
    biased_maps,
    biased_reference,
    offset_ranges,
)
from recast.layers.functional.choose import choose_backend
from recast.layers.functional.fast import merged, split
from recast.layers.functional.maps import (
    AttentionMaps,
    attention_maps,
    content_map,
    gaussian_factors,
    gaussian_map,
    linear_content_map,
    shift_map,
)
from recast.layers.functional.weights import (
    Gates,
    Weights,
    expand_heads,
    fold_value,
    linear_gates,
    project_out,
    project_values,
    scatter_heads,
    select_heads,
    sigmoid_gates,
)
from recast.layers.functional.written_out import dense, gather, reference

__all__ = [
    "AttentionMaps",
    "BiasedMaps",
    "BiasedWeights",
    "Gates",
    "Weights",
    "attention_maps",
    "bias_map",
    "biased",
    "biased_maps",
    "biased_reference",
    "choose_backend",
    "content_map",
    "dense",
    "expand_heads",
    "fold_value",
    "gather",
    "gaussian_factors",
    "gaussian_map",
    "linear_content_map",
    "linear_gates",
    "merged",
    "offset_ranges",
    "project_out",
    "project_values",
    "reference",
    "scatter_heads",
    "select_heads",
    "shift_map",
    "sigmoid_gates",
    "split",
]
