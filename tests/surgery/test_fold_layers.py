"""One layer: what folding removes changes nothing but rounding, and what it approximates is as near as it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.layers.config import RecastConfig
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.surgery.folding.forms import fold_layer, larger_geometry, larger_kernel
from recast.surgery.rules import convert

# torch says this about its own 'same' padding of even kernels
pytestmark = [
    pytest.mark.usefixtures("papers_layer"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
]

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
        layer = partly_closed(open_gates(convert(conv, RecastConfig(gate=gate)), seed), seed)
        expected = layer(x).detach()
        whole = gradients(copy.deepcopy(layer), x)
        folded = fold_layer(copy.deepcopy(layer))
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
    layer = open_gates(GPSA(4, 4, PAD_1))
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


def positional(alpha: float, channels: int = 4, **geometry: Any) -> GPSA:
    torch.manual_seed(0)
    layer = GPSA(channels, channels, Geometry((3, 3), **geometry), config=RecastConfig(alpha=alpha)).double()
    with torch.no_grad():
        layer.spread.normal_(0.5, 0.2)
        layer.center.add_(0.2 * torch.randn(9, 2))
    return layer


def test_a_larger_kernel_is_the_sum_over_heads_written_out() -> None:
    """Against loops over heads and taps: shares of the Gaussian over the window, times the heads' kernels."""
    layer = positional(1.0)
    wider = larger_geometry(layer.geometry, 5)
    kernel = larger_kernel(layer, layer.weight, wider)
    gates, alpha = layer.gates(), layer.alpha
    taps = [(a, c) for a in range(-2, 3) for c in range(-2, 3)]
    expected = torch.zeros_like(kernel)
    for h, (row, column) in enumerate(layer.geometry.offsets()):
        weights = torch.stack(
            [torch.exp(-alpha[h] * ((torch.tensor(tap) - layer.center[h]) ** 2).sum()) for tap in taps]
        )
        weights = gates["s"][h] * weights / weights.sum()
        weights[taps.index((row, column))] += 1 - gates["s"][h]
        expected += layer.weight[:, :, row + 1, column + 1, None, None] * weights.view(5, 5)
    assert layer.value is not None
    torch.testing.assert_close(kernel, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "geometry", [{"padding": (1, 1, 1, 1)}, {"stride": (2, 2)}, {"dilation": (2, 2)}, {"padding": (0, 2, 1, 0)}]
)
def test_a_sharp_gaussian_fits_into_a_larger_kernel(geometry: dict[str, Any], error_of: Any) -> None:
    """exp(−4·9) of the mass is outside 7×7; borders, where zeros are tokens of the convolution alone, left out."""
    layer = positional(4.0, **geometry)
    layer.prune_(range(9), ())
    x = torch.randn(2, 4, 16, 15, dtype=torch.float64)
    expected = layer(x)
    errors = []
    for kernel in (5, 7, 9):
        folded = fold_layer(copy.deepcopy(layer), kernel=kernel)
        assert not isinstance(folded, GPSA)
        y = folded(x)
        assert y.shape == expected.shape
        edge = 4 if min(y.shape[2:]) > 9 else 2
        inside = (..., slice(edge, -edge), slice(edge, -edge))
        errors.append(error_of(y[inside], expected[inside]))
    assert errors[1] < 1e-6
    assert errors[0] > errors[1]  # the error is the mass that is lost, not something else


@pytest.mark.parametrize(
    "geometry",
    [{"padding": (1, 1, 1, 1), "padding_mode": "reflect"}, {"same": True}, {"upsample": (2, 2), "is_transposed": True}],
)
def test_what_has_no_larger_kernel_stays(geometry: dict[str, Any]) -> None:
    layer = positional(1.0, **geometry)
    layer.prune_(range(9), ())
    assert larger_geometry(layer.geometry, 5) is None
    assert fold_layer(layer, kernel=5) is layer
    assert larger_geometry(PAD_1, 4) is None
    assert larger_geometry(Geometry((7, 7)), 5) is None
