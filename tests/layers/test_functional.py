"""Facts that the attention functions rest on; `surgery/rules/test_loops.py` has them against loops in NumPy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recast.layers import functional
from recast.layers.functional import linear_gates, sigmoid_gates
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA


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
