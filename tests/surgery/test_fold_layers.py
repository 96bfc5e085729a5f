"""One layer: what folding removes changes nothing but rounding, and what it approximates is as near as it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.surgery.rules import convert

PAPERS = RecastConfig(**PAPERS_LAYER)

# torch says this about its own 'same' padding of even kernels
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")

PAD_1 = Geometry((3, 3), padding=(1, 1, 1, 1))


def partly_closed(layer: GPSA, seed: int) -> GPSA:
    """Every third Gaussian and every second content map closed."""
    with torch.no_grad():
        if layer.config.gate == "linear":
            layer.spread[seed % 3 :: 3] = 0
            layer.gamma[seed % 2 :: 2] = 0
        else:
            layer.lam[seed % 2 :: 2] = 800  # 1 − σ(800) is 0 in fp64
    return layer


def gradients(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y = (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).cos().view_as(y)).sum()
    y.backward()
    return {"input": x.grad} | {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
@pytest.mark.parametrize("start", range(0, 40, 20))
def test_what_is_closed_goes_and_the_function_stays(
    gate: Any, start: int, random_case: Any, open_gates: Any, error_of: Any
) -> None:
    """Random geometries, all four forms, outputs and the gradients of what is left."""
    for seed in range(start, start + 20):
        conv, x, text = random_case(seed)
        layer = partly_closed(open_gates(convert(conv, RecastConfig(gate=gate, **PAPERS_LAYER)), seed), seed)
        expected = layer(x).detach()
        whole = gradients(copy.deepcopy(layer), x)
        folded = copy.deepcopy(layer).fold()
        if not isinstance(folded, GPSA):
            assert layer.num_heads <= 2, text
            continue
        assert folded.value is None, text
        content = [h for h in range(layer.num_heads) if h % 2 != seed % 2]
        assert folded.content_heads == tuple(content), text
        assert folded.query.shape == (len(content) * layer.head_dim, layer.in_channels), text
        for form in ("reference", "dense", "split", "merged"):
            folded.backend = form
            assert error_of(folded(x), expected) <= 1e-10, f"{form}, {text}"
            folded.zero_grad()
            measured = gradients(folded, x)
            # W_val was multiplied into W_out, and a rule of the chain between them is not the point here
            for name in ("input", "bias", "raw_alpha", "center"):
                if name not in measured:
                    continue
                value = whole[name]
                if name in ("raw_alpha", "center"):
                    value = value[list(folded.gaussian_heads)]
                scale = max(float(value.abs().max()), 1e-5 * max(float(g.abs().max()) for g in whole.values()))
                assert float((measured[name] - value).abs().max()) <= 1e-9 * scale, f"{form} {name}, {text}"


def test_pruned_maps_keep_their_heads_and_stay_closed_in_training(open_gates: Any) -> None:
    layer = open_gates(GPSA(4, 4, PAD_1, config=PAPERS))
    with torch.no_grad():
        layer.gamma[[0, 8]], layer.spread[4] = 0, 0
    before, x = {name: value.detach().clone() for name, value in layer.gates().items()}, torch.randn(2, 4, 6, 6)
    shapes = [maps.shape for maps in layer.attention(x)]
    assert layer.fold() is layer
    assert (layer.content_heads, len(layer.gaussian_heads)) == (tuple(range(1, 8)), 8)
    assert all(torch.equal(value, before[name]) for name, value in layer.gates().items())
    assert [maps.shape for maps in layer.attention(x)] == shapes
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        assert all(p.grad is not None for p in layer.parameters())  # nothing unused, as DDP asks
        optimizer.step()
    for name, value in layer.gates().items():
        assert torch.equal(value == 0, before[name] == 0)
