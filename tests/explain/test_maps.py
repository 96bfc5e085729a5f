"""What a page stores of a layer, against the layer's own maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recast.explain import maps as module
from recast.explain.maps import record_maps, stored_maps
from recast.layers.gpsa import GPSA
from recast.run.config import RecastConfig
from recast.surgery.apply import recast_, recast_layers
from recast.surgery.planning import plan

QUANTISED = 0.0041
"""Half a step of the coarsest quantisation, as a share of a map's largest value."""


def recast_conv(conv: nn.Module, x: Tensor, **config: Any) -> Any:
    model = recast_(
        nn.Sequential(conv), plan(nn.Sequential(conv), x, RecastConfig(**config), where=["0"], budget="tokens=none")
    )
    return model[0]


def content_of(layer: GPSA, x: Tensor) -> Tensor:
    """(H, I, J, Y, X) over the real pixels, from the layer's own maps."""
    return on_pixels(layer, layer.attention(x).content, x)


def on_pixels(layer: Any, maps: Tensor, x: Tensor) -> Tensor:
    size = x.shape[-2:]
    at_rows, at_columns = layer.geometry.pixels(*size)
    queries = [len(at) for at in layer.geometry.query_positions(*size)]
    grid = maps[0].unflatten(-1, layer.geometry.padded_size(*size))[..., at_rows, at_columns]
    return grid.unflatten(1, queries).detach()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("content", ["softmax", "linear"])
def test_the_content_of_a_layer_is_stored(
    seed: int, content: str, random_case: Callable[..., Any], open_gates: Callable[..., GPSA]
) -> None:
    conv, x, text = random_case(seed, torch.float32)
    layer = open_gates(recast_conv(conv, x[:1], content=content), seed)
    maps = stored_maps(layer, x[:1])
    wanted = content_of(layer, x[:1]).numpy()
    assert maps.values.shape == wanted.shape, text
    assert np.all(np.abs(maps.values - wanted) <= QUANTISED * wanted.max((-2, -1), keepdims=True) + 1e-7), text


def test_attended_padding_is_left_out_of_what_is_stored(open_gates: Callable[..., GPSA]) -> None:
    x = torch.rand(1, 4, 5, 6)
    layer = open_gates(recast_conv(nn.Conv2d(4, 4, 3, padding=1), x, attend_padding=True))
    assert stored_maps(layer, x).values.sum((-2, -1)).max() < 0.99
    assert np.allclose(stored_maps(layer, x).values, content_of(layer, x).numpy(), atol=1e-3)


@pytest.mark.parametrize("conv", [nn.Conv2d(4, 6, 3, padding=1, stride=2), nn.Conv2d(4, 4, (2, 3), padding=(1, 0))])
def test_the_whole_map_of_cmhsa_is_stored(conv: nn.Conv2d) -> None:
    x = torch.rand(1, 4, 6, 7)
    layer = recast_conv(conv, x, gate="bias", bias_init=3.0)
    with torch.no_grad():
        for parameter in (layer.query, layer.key, layer.relative_bias):
            parameter.add_(torch.randn_like(parameter))
    wanted = on_pixels(layer, layer.maps(x).mix, x).numpy()
    maps = stored_maps(layer, x)
    assert np.all(np.abs(maps.values - wanted) <= QUANTISED * wanted.max((-2, -1), keepdims=True))
    smaller = x[..., :5, :6].contiguous()
    assert np.allclose(
        stored_maps(layer, smaller).values, on_pixels(layer, layer.maps(smaller).mix, smaller), atol=4e-3
    )


def test_large_layers_keep_some_queries_over_blocks_of_keys(
    open_gates: Callable[..., GPSA], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(1, 4, 10, 7)
    layer = open_gates(recast_conv(nn.Conv2d(4, 4, 3, padding=1), x))
    monkeypatch.setattr(module, "MAX_QUERIES", 20)
    monkeypatch.setattr(module, "MAX_KEYS", 20)
    maps = stored_maps(layer, x)
    assert (maps.rows, maps.columns, maps.pool) == ((1, 3, 5, 7, 9), (1, 3, 5), 2)
    every = content_of(layer, x)[:, maps.rows][:, :, maps.columns]
    blocks = nn.functional.avg_pool2d(every.flatten(0, 2)[:, None], 2, ceil_mode=True, divisor_override=1)
    assert maps.values.shape[-2:] == (5, 4)
    assert np.allclose(maps.values.reshape(-1, 5, 4), blocks[:, 0], atol=4e-3)


def test_layers_come_in_the_order_of_their_calls_and_the_model_is_left_alone() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(input=self.early(x)).mean((2, 3))

    model, x = Turned(), torch.rand(1, 3, 6, 6)
    recast_(model, plan(model, x, where="all"))
    model.train()
    output, layers, maps, notes = record_maps(model, x)
    assert [layer.name for layer in layers] == ["early", "late"] == list(maps)
    assert (output.shape, notes) == ((1, 4), ())
    assert not output.requires_grad
    assert all(m.training for m in model.modules())
    assert not any(layer._forward_pre_hooks for layer in recast_layers(model).values())


def test_pruned_heads_have_closed_gates_and_maps_all_the_same() -> None:
    x = torch.rand(1, 4, 6, 6)
    layer = recast_conv(nn.Conv2d(4, 4, 3, padding=1), x)
    with torch.no_grad():
        layer.gamma[2], layer.spread[5] = 0.3, 0.2
    layer.prune_([5], [2])
    described = module.describe("conv", layer, 6, 6)
    assert described.content is not None
    assert described.gaussian is not None
    assert np.flatnonzero(described.content).tolist() == [2]
    assert np.flatnonzero(described.gaussian).tolist() == [5]
    assert stored_maps(layer, x).values.shape == (9, 6, 6, 6, 6)
    assert dict(described.gates)["γ"][2] == pytest.approx(0.3)
