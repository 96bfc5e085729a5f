"""Recorded attention: maps of a pass, and the file that the report draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from recast.analysis.record import centre_query, record, write_attention
from recast.errors import RecastError
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.surgery.apply import gpsa_layers, recast_
from recast.surgery.planning import plan


@pytest.fixture
def model(open_gates: Callable[..., GPSA]) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 6, (3, 5), padding=(1, 2)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    recast_(network, plan(network, torch.randn(1, 3, 8, 10), where="all"))
    for layer in gpsa_layers(network).values():
        open_gates(layer)
    return network


def test_the_maps_of_a_pass_make_its_output(model: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 10)
    seen = []
    model[2].register_forward_hook(lambda _m, inputs, output: seen.append((inputs[0], output)))
    with record(model) as maps:
        model(x)
    assert list(maps) == ["0", "2"]
    (inner, output) = seen[0]
    layer = model[2]
    values = layer.geometry.pad(inner) if layer.value is None else None
    padded = layer.geometry.pad(torch.nn.functional.conv2d(inner, layer.value[:, :, None, None])).flatten(2)
    assert values is None
    gathered = torch.einsum("bhnm,bcm->bhnc", maps["2"].mix, padded)
    again = torch.einsum("bhnc,och->bon", gathered, layer.weight.flatten(2)) + layer.bias[:, None]
    assert torch.allclose(again, output.flatten(2), atol=1e-5)
    assert not maps["2"].mix.requires_grad
    assert not model[0]._forward_hooks
    for part in maps["2"][:3]:
        assert torch.allclose(part.sum(-1), torch.ones(()), atol=1e-5)


def test_hooks_go_when_the_pass_fails(model: nn.Module) -> None:
    with pytest.raises(RecastError), record(model):
        model(torch.randn(2, 5, 8, 8))
    assert not any(m._forward_hooks for m in model.modules())


def test_long_maps_warn() -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 2))
    recast_(network, plan(network, torch.randn(1, 1, 33, 33), budget=2000))
    with pytest.warns(UserWarning, match="1089 tokens"), record(network):
        network(torch.randn(1, 1, 33, 33))


@pytest.mark.parametrize("stride", [1, 2])
def test_the_centre_query_at_the_start_is_its_tap(stride: int) -> None:
    """With closed gates head h looks at one pixel: the query moved by the tap's offset."""
    geometry = Geometry((3, 3), (stride, stride), (1, 1, 1, 1))
    layer = GPSA(2, 2, geometry)
    maps, (row, column) = centre_query(layer, layer.attention(torch.randn(1, 2, 7, 9)).mix, 7, 9)
    assert maps.shape == (1, 9, 7, 9)
    assert (row, column) == ((3, 4) if stride == 1 else (4, 4))
    for h, (dr, dc) in enumerate(geometry.offsets()):
        expected = torch.zeros(7, 9)
        expected[row + dr, column + dc] = 1
        assert torch.equal(maps[0, h], expected)


def test_the_file_for_the_report(model: nn.Module, tmp_path: Path) -> None:
    pixels = torch.rand(3, 3, 8, 10)
    path = write_attention(tmp_path / "attention.npz", model, pixels, [0, 1, 2], list("abcdef"), lambda x: 2 * x - 1)
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["layers"].tolist() == ["0", "2"]
        assert arrays["images"].shape == (3, 8, 10, 3)
        assert np.abs(arrays["images"] / 255 - pixels.permute(0, 2, 3, 1).numpy()).max() <= 0.5 / 255 + 1e-6
        assert arrays["mix_0"].shape == (3, 9, 8, 10)
        assert arrays["mix_1"].shape == (3, 15, 4, 5)
        assert arrays["kernel_1"].tolist() == [3, 5]
        assert np.allclose(arrays["gate_0"], model[0].gamma.detach().numpy())
        with torch.no_grad():
            assert arrays["predictions"].tolist() == model(2 * pixels - 1).argmax(1).tolist()


def test_a_model_without_attention_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match="no GPSA layer"):
        write_attention(tmp_path / "a.npz", nn.Conv2d(3, 4, 3), torch.rand(1, 3, 8, 8), [0], ["a"])
    assert not (tmp_path / "a.npz").exists()
