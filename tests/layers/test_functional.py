"""The attention functions: golden values, an independent implementation in NumPy, and agreement of the three ways."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from recast.layers import functional
from recast.layers.functional import Weights, dense, linear_gates, merged, reference, sigmoid_gates, split
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA

FUNCTIONS = {"reference": reference, "dense": dense, "split": split, "merged": merged}


# --- golden values (specs of the layer, NumPy float64, explicit loops; the script is the formula below) -------------


def fill(shape: tuple[int, ...], a: float, b: float) -> Tensor:
    """fill(shape, a, b)[j] = 0.3 · sin(a·j + b), j the flat row-major index."""
    return (0.3 * torch.sin(a * torch.arange(math.prod(shape), dtype=torch.float64) + b)).reshape(shape)


def golden_layer(gate: str, stride: int) -> tuple[Tensor, Weights]:
    geometry = Geometry((3, 3), (stride, stride), (1, 1, 1, 1))
    head = torch.arange(9, dtype=torch.float64)
    if gate == "sigmoid":
        gates = sigmoid_gates(1 + torch.cos(head))
    else:
        gates = linear_gates(0.2 + 0.15 * torch.sin(2 * head), 0.3 + 0.2 * torch.cos(3 * head))
    weights = Weights(
        weight=fill((3, 4, 3, 3), 1.3, 0.5),
        bias=fill((3,), 0.9, 0.2),
        value=(torch.eye(4, dtype=torch.float64) + 0.2 * fill((4, 4), 0.4, 1.0)).T,  # given for X · W_val
        query=(4 * fill((4, 18), 1.1, 0.3)).T,
        key=(4 * fill((4, 18), 0.6, 0.8)).T,
        center=torch.tensor(geometry.offsets(), dtype=torch.float64) + 0.5 * fill((9, 2), 0.5, 0.7),
        alpha=1 + 0.5 * torch.sin(head),
        gates=gates,
        gaussian_heads=tuple(range(9)),
        content_heads=tuple(range(9)),
        geometry=geometry,
    )
    return 3 * fill((1, 4, 5, 6), 0.7, 0.1), weights


GOLDEN = [
    ("sigmoid", 1, (3, 5, 6), 17.821004626899, 0.100388237310, 0.263915353356, 2.212099852557),
    ("linear", 1, (3, 5, 6), 17.672152530468, 0.067556460298, 0.219973621725, 2.799728245646),
    ("sigmoid", 2, (3, 3, 3), 5.454790370582, 0.100388237310, 0.232566171187, 1.199988502878),
    ("linear", 2, (3, 3, 3), 5.579369609090, 0.067556460298, 0.098895609525, 1.442575624562),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("gate", "stride", "shape", "total", "first", "last", "norm"), GOLDEN)
def test_golden_values(
    name: str, gate: str, stride: int, shape: tuple[int, ...], total: float, first: float, last: float, norm: float
) -> None:
    x, weights = golden_layer(gate, stride)
    y = FUNCTIONS[name](x, weights)[0]
    assert y.shape == shape
    measured = [float(v) for v in (y.sum(), y[0, 0, 0], y[2, -1, -1], y.norm())]
    assert measured == pytest.approx([total, first, last, norm], rel=0, abs=1e-10)


def test_golden_attention() -> None:
    """Sigmoid, stride 1, head 4, first query, first three keys: the top row of the padding ring."""
    x, weights = golden_layer("sigmoid", 1)
    mix = functional.attention_maps(x, weights).mix
    assert mix.shape == (1, 9, 30, 56)
    assert mix[0, 4, 0, :3].tolist() == pytest.approx(
        [0.051853327892, 0.081881376719, 0.037297508517], rel=0, abs=1e-10
    )


# --- facts that the fast paths rest on --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_is_masked_out_of_content_alone(mode: Any, open_gates: Any) -> None:
    geometry = Geometry((3, 3), padding=(1, 1, 1, 1), padding_mode=mode)
    layer = open_gates(GPSA(3, 2, geometry, dtype=torch.float64))
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    ring = torch.ones(6, 7, dtype=torch.bool)
    ring[1:5, 1:6] = False
    w = layer.weights()
    shift, gaussian, content, mix = functional.attention_maps(x, w)
    for rows in (shift, gaussian, content, mix):
        torch.testing.assert_close(rows.sum(-1), torch.ones_like(rows.sum(-1)))
    assert not content[..., ring.flatten()].any()
    assert shift[..., ring.flatten()].any()
    assert bool((gaussian[..., ring.flatten()] > 0).any())
    seen = functional.attention_maps(x, w._replace(attend_padding=True)).content
    assert bool((seen[..., ring.flatten()] > 0).all())
    # every head of the shift is one-hot
    assert shift.unique().tolist() == [0, 1]


def test_the_coefficients_of_a_head_sum_to_one() -> None:
    gamma, s = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    shift, gaussian, content = linear_gates(gamma, s)
    assert shift is not None
    torch.testing.assert_close(shift + gaussian + content, torch.ones_like(gamma))
    none, gaussian, content = sigmoid_gates(30 * gamma)
    assert none is None
    torch.testing.assert_close(gaussian + content, torch.ones_like(gamma))
    # 1 − σ(λ) is σ(−λ): not rounded to zero where a subtraction would be
    assert float(sigmoid_gates(torch.tensor([40.0])).content) > 0


def test_half_precision_positions_reach_across_a_long_map() -> None:
    """bf16 holds no odd integer above 256, fp16 none above 2048 and no square above 65504: positions stay fp32."""
    geometry = Geometry((1, 1))
    for dtype in (torch.float16, torch.bfloat16):
        center, alpha = torch.zeros(1, 2, dtype=dtype), torch.full((1,), 4.0, dtype=dtype)
        _, columns = functional.gaussian_factors(center, alpha, geometry, 1, 401)
        _, exact = functional.gaussian_factors(center.double(), alpha.double(), geometry, 1, 401)
        assert columns[0].argmax(-1).tolist() == list(range(401))
        assert float((columns - exact).abs().max()) < 1e-6
