"""Distance, non-locality and entropy of heads: against loops over queries and keys, sampling, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recast.analysis import queries
from recast.analysis.head_statistics import Head, head_statistics, tabulate_heads
from recast.analysis.queries import content_of, pieces
from recast.errors import RecastError
from recast.io import load, save
from recast.layers.cmhsa import CMHSA
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.run.config import RecastConfig
from recast.surgery.apply import recast_
from recast.surgery.planning import plan

PLAIN = Geometry((3, 3), padding=(1, 1, 1, 1))
STRIDED = Geometry((2, 3), (2, 1), (1, 0, 2, 1), dilation=(1, 2))
TRANSPOSED = Geometry.of(nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1))


def gpsa(geometry: Geometry, open_gates: Callable[..., GPSA], **config: object) -> GPSA:
    torch.manual_seed(0)
    return open_gates(GPSA(4, 3, geometry, config=RecastConfig(**config))).eval()  # type: ignore[arg-type]


def cmhsa(bias_init: float = 3.0) -> CMHSA:
    torch.manual_seed(0)
    layer = CMHSA(4, 3, PLAIN, config=RecastConfig(gate="bias", bias_init=bias_init))
    layer.set_size_(5, 6)
    with torch.no_grad():
        layer.key.normal_()
        layer.relative_bias.add_(torch.randn(layer.relative_bias.shape))
    return layer.eval()


def measured_by_loops(layer: GPSA | CMHSA, x: Tensor) -> list[list[float]]:
    """Distance, non-locality, entropy and share of the tap, head by head, pixel by pixel."""
    mix = layer.maps(x).mix if isinstance(layer, CMHSA) else layer.attention(x).mix
    height, width = x.shape[-2:]
    geometry = layer.geometry
    rows, columns = geometry.padded_size(height, width)
    keys = [(i, j) for i in range(rows) for j in range(columns)]
    rows_at, columns_at = geometry.query_positions(height, width)
    queries = [(i, j) for i in rows_at for j in columns_at]
    found = []
    for head, (dr, dc) in enumerate(geometry.offsets()):
        sums = [0.0] * 4
        for image in mix.expand(len(x), -1, -1, -1):
            for q, (i, j) in enumerate(queries):
                row = image[head, q].tolist()
                mass = sum(map(abs, row))
                for weight, (r, c) in zip(row, keys, strict=True):
                    away = math.hypot((r - i) / geometry.upsample[0], (c - j) / geometry.upsample[1])
                    share = abs(weight) / mass
                    sums[0] += share * away
                    sums[1] += weight * away
                    sums[2] -= share * math.log(share) if share else 0.0
                    sums[3] += share if (r, c) == (i + dr, j + dc) else 0.0
        found.append([value / (len(x) * len(queries)) for value in sums])
    return found


def numbers(head: Head) -> list[float]:
    return [head.distance, head.nonlocality, head.entropy, head.tap_share]


@pytest.mark.parametrize("geometry", [PLAIN, STRIDED, TRANSPOSED], ids=str)
@pytest.mark.parametrize("config", [{}, {"gate": "sigmoid"}, {"content": "linear"}, {"attend_padding": True}], ids=str)
def test_gated_heads_against_loops(
    geometry: Geometry, config: dict[str, object], open_gates: Callable[..., GPSA]
) -> None:
    layer = gpsa(geometry, open_gates, **config)
    x = torch.randn(2, 4, 4, 3)
    heads = head_statistics(layer, x)
    assert [head.tap for head in heads] == geometry.offsets()
    for head, expected in zip(heads, measured_by_loops(layer, x), strict=True):
        assert numbers(head) == pytest.approx(expected, rel=2e-5, abs=2e-6)
    if "gate" in config:  # convex maps: both are one number, and the gate is the share of content
        assert all(head.distance == pytest.approx(head.nonlocality, rel=1e-5) for head in heads)
        assert [head.gate for head in heads] == pytest.approx((1 - torch.sigmoid(layer.lam)).tolist(), abs=1e-6)
    else:
        assert any(abs(head.distance - head.nonlocality) > 0.01 for head in heads)
        assert [head.gate for head in heads] == pytest.approx(layer.gamma.tolist())
    assert [head.span for head in heads] == pytest.approx((1 / layer.alpha).tolist())


def test_biased_heads_against_loops() -> None:
    layer = cmhsa()
    x = torch.randn(2, 4, 4, 6)  # smaller than its table
    heads = head_statistics(layer, x)
    for head, expected in zip(heads, measured_by_loops(layer, x), strict=True):
        assert numbers(head) == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert {(head.gate, head.span) for head in heads} == {(None, None)}


@pytest.mark.parametrize("budget", [1, 500, 5000])
def test_maps_in_pieces_are_the_maps(
    budget: int, open_gates: Callable[..., GPSA], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MAX_NUMBERS", budget)
    x = torch.randn(3, 4, 5, 6)
    for layer in (gpsa(PLAIN, open_gates), gpsa(PLAIN, open_gates, gate="sigmoid"), cmhsa()):
        mix = layer.maps(x).mix if isinstance(layer, CMHSA) else layer.attention(x).mix
        chosen = torch.tensor([0, 3, 17, 29])
        parts = list(pieces(layer, x, chosen))
        assert sum(maps.shape[0] * maps.shape[2] for _, maps in parts) == 3 * 4
        image = 0
        for at, maps in parts:
            assert maps.numel() <= max(budget, 9 * 56)
            assert torch.allclose(maps, mix[image : image + len(maps), :, at], atol=1e-6)
            if int(at[-1]) == 29:
                image += len(maps)


@pytest.mark.parametrize("config", [{}, {"content": "linear"}, {"attend_padding": True}], ids=str)
def test_content_alone(config: dict[str, object], open_gates: Callable[..., GPSA]) -> None:
    layer, x = gpsa(STRIDED, open_gates, **config), torch.randn(2, 4, 5, 6)
    with torch.no_grad():
        layer.gamma.zero_()
    at = torch.tensor([1, 5])
    assert torch.allclose(content_of(layer, x)(at), layer.attention(x).content[:, :, at], atol=1e-6)


def test_maps_without_content_are_given_once(open_gates: Callable[..., GPSA], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_NUMBERS", 9 * 25 * 49)
    layer, x = gpsa(PLAIN, open_gates), torch.randn(4, 4, 5, 5)
    with torch.no_grad():
        layer.gamma.zero_()
    ((_, maps),) = pieces(layer, x, torch.arange(25))
    assert maps.shape == (1, 9, 25, 49)
    assert torch.allclose(maps, layer.attention(x).mix[2:3], atol=1e-6)


def test_a_layer_at_its_start_is_a_convolution() -> None:
    layer = GPSA(4, 3, PLAIN).eval()
    for head in head_statistics(layer, torch.randn(5, 4, 6, 6)):
        assert head.is_convolution
        assert head.images == 5
        assert head.queries == 36
        assert (head.gate, head.entropy, head.tap_share) == (0, 0, 1)
        assert head.distance == head.nonlocality == pytest.approx(math.hypot(*head.tap))
        assert head.span == pytest.approx(1)


def test_which_heads_stayed_convolutional(open_gates: Callable[..., GPSA]) -> None:
    layer = GPSA(4, 3, PLAIN).eval()
    with torch.no_grad():
        layer.gamma[3], layer.gamma[5], layer.gamma[7] = 0.2, -0.2, 2e-4
        layer.spread[8] = 0.3
    stayed = [head.head for head in head_statistics(layer, torch.randn(2, 4, 6, 6)) if head.is_convolution]
    assert stayed == [0, 1, 2, 4, 6, 7]
    soft = GPSA(4, 3, PLAIN, config=RecastConfig(gate="sigmoid")).eval()
    exact = GPSA(4, 3, PLAIN, config=RecastConfig(gate="sigmoid", alpha=20, lambda_init=14)).eval()
    assert not any(head.is_convolution for head in head_statistics(soft, torch.randn(2, 4, 6, 6)))
    assert all(head.is_convolution for head in head_statistics(exact, torch.randn(2, 4, 6, 6)))


def test_pruned_maps_have_no_gate_and_no_span(open_gates: Callable[..., GPSA]) -> None:
    layer = gpsa(PLAIN, open_gates)
    layer.prune_([0, 1], [2])
    heads = head_statistics(layer, torch.randn(1, 4, 5, 5))
    assert [head.head for head in heads if head.span is not None] == [0, 1]
    assert [head.head for head in heads if head.gate != 0] == [2]
    assert all(head.is_convolution for head in heads[3:])


def test_long_layers_are_sampled_and_say_so(open_gates: Callable[..., GPSA]) -> None:
    layer = gpsa(PLAIN, open_gates, gate="sigmoid")
    x = torch.randn(2, 4, 12, 12)
    every, some = head_statistics(layer, x, queries=144), head_statistics(layer, x, queries=40)
    again, other = head_statistics(layer, x, queries=40), head_statistics(layer, x, queries=40, seed=1)
    assert (every[0].queries, some[0].queries) == (144, 40)
    assert some == again != other
    for one, all_ in zip(some, every, strict=True):
        assert one.distance == pytest.approx(all_.distance, rel=0.2)


def test_batches_and_uneven_ones(open_gates: Callable[..., GPSA]) -> None:
    layer = gpsa(PLAIN, open_gates)
    x = torch.randn(5, 4, 5, 5)
    whole = head_statistics(layer, x)
    parts = head_statistics(layer, [(x[:1], 0), (x[1:], 0)])  # type: ignore[list-item]
    for one, other in zip(whole, parts, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-5)
        assert other.images == 5


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x - 0.5)


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def test_the_table_with_checkpoints(tmp_path: Path) -> None:
    x = torch.rand(3, 3, 6, 6)
    parent = small()
    recast = recast_(small(), plan(parent, x, where="all"))
    folder = tmp_path / "checkpoints"
    for epoch in (0, 2):
        with torch.no_grad():
            recast[0].gamma.fill_(0.1 * epoch)
        save(recast, folder / f"epoch-{epoch:04}.safetensors")
    loads = [
        ("recast", epoch, lambda epoch=epoch: Wrapped(load(folder / f"epoch-{epoch:04}.safetensors", parent=parent)))
        for epoch in (0, 2)
    ]
    loads.insert(0, ("recast", -1, small))  # before its layers were recast
    table = tabulate_heads({"parent": Wrapped(parent), "recast": Wrapped(recast)}, lambda: [(x, torch.zeros(3))], loads)
    assert table.columns[:3] == ("model", "epoch", "layer")
    assert table.columns[-2:] == ("is_convolution", "n")
    assert len(table.rows) == 3 * (9 + 4)
    assert set(table.column("model")) == {"recast"}
    assert set(table.column("layer")) == {"0", "2"}
    by_epoch = {epoch: [row for row in table.rows if row[1] == epoch and row[2] == "0"] for epoch in (0, 2, None)}
    gate, stayed = table.columns.index("gate"), table.columns.index("is_convolution")
    assert {(row[gate], row[stayed]) for row in by_epoch[0]} == {(0.0, True)}
    assert all(row[gate] == pytest.approx(0.2) and not row[stayed] for row in by_epoch[2])
    assert [row[2:] for row in by_epoch[2]] == [row[2:] for row in by_epoch[None]]


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(RecastError, match="no heads"):
        head_statistics(small(), torch.rand(1, 3, 6, 6))
    with pytest.raises(RecastError, match="none of parent"):
        tabulate_heads({"parent": small()}, lambda: [(torch.rand(1, 3, 6, 6), torch.zeros(1))])
    with pytest.raises(RecastError, match="at least one query"):
        head_statistics(GPSA(2, 2, PLAIN), torch.rand(1, 2, 4, 4), queries=0)


def test_the_model_is_left_as_it_was() -> None:
    network = recast_(small(), plan(small(), torch.rand(1, 3, 6, 6), where="all")).train()
    head_statistics(network, torch.rand(2, 3, 6, 6))
    assert network.training
    assert network[0].training
    assert not any(module._forward_pre_hooks for module in network.modules())
