"""Distance, non-locality and entropy of heads: against loops over queries and keys, sampling, checkpoints."""

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast import CMHSA, GPSA, Geometry, RecastConfig, RecastError, load, plan, recast_, save
from recast.lab.analysis import queries
from recast.lab.analysis.head_statistics import head_statistics, tabulate_heads
from recast.lab.analysis.queries import pieces, telling_query
from recast.lab.analysis.records import HeadLine
from recast.layers.config import PAPERS_LAYER

PAPERS = RecastConfig(**PAPERS_LAYER)


PLAIN = Geometry((3, 3), padding=(1, 1, 1, 1))
STRIDED = Geometry((2, 3), (2, 1), (1, 0, 2, 1), dilation=(1, 2))
TRANSPOSED = Geometry.of(nn.ConvTranspose2d(1, 1, 3, stride=2, padding=1))
SIGMOID = RecastConfig(gate="sigmoid")


@pytest.fixture
def gpsa(open_gates: Callable[..., GPSA]) -> Callable[..., GPSA]:
    def made(geometry: Geometry = PLAIN, **config: Any) -> GPSA:
        torch.manual_seed(0)
        return open_gates(GPSA(4, 3, geometry, config=RecastConfig(**PAPERS_LAYER | config))).eval()

    return made


def cmhsa() -> CMHSA:
    torch.manual_seed(0)
    layer = CMHSA(4, 3, PLAIN, config=RecastConfig(gate="bias", bias_init=3.0))
    layer.set_size_(5, 6)
    with torch.no_grad():
        layer.key.normal_()
        layer.relative_bias.add_(torch.randn(layer.relative_bias.shape))
    return layer.eval()


def mix_of(layer: GPSA | CMHSA, x: Tensor) -> Tensor:
    return layer.attention(x).mix if isinstance(layer, GPSA) else layer.attention(x)


def assert_as_by_loops(heads: list[HeadLine], layer: GPSA | CMHSA, x: Tensor) -> None:
    """Distance, non-locality, entropy and share of the tap, head by head, pixel by pixel."""
    mix, geometry = mix_of(layer, x), layer.geometry
    rows, columns = geometry.padded_size(*x.shape[-2:])
    keys = [(i, j) for i in range(rows) for j in range(columns)]
    rows_at, columns_at = geometry.query_positions(*x.shape[-2:])
    queries_at = [(i, j) for i in rows_at for j in columns_at]
    assert [(head.tap_row, head.tap_column) for head in heads] == geometry.offsets()
    for number, (head, tap) in enumerate(zip(heads, geometry.offsets(), strict=True)):
        sums = [0.0] * 4
        for image in mix.expand(len(x), -1, -1, -1):
            for q, (i, j) in enumerate(queries_at):
                row = image[number, q].tolist()
                mass = sum(map(abs, row))
                for weight, (r, c) in zip(row, keys, strict=True):
                    away = math.hypot((r - i) / geometry.upsample[0], (c - j) / geometry.upsample[1])
                    share = abs(weight) / mass
                    sums[0] += share * away
                    sums[1] += weight * away
                    sums[2] -= share * math.log(share) if share else 0.0
                    sums[3] += share if (r, c) == (i + tap[0], j + tap[1]) else 0.0
        *means, on_tap = (value / (len(x) * len(queries_at)) for value in sums)
        assert [head.distance, head.nonlocality, head.entropy] == pytest.approx(means, rel=2e-5, abs=2e-6)
        assert head.is_convolution == (on_tap >= 0.999)


@pytest.mark.parametrize("geometry", [PLAIN, STRIDED, TRANSPOSED], ids=str)
@pytest.mark.parametrize("config", [{}, {"gate": "sigmoid"}, {"content": "linear"}, {"attend_padding": True}], ids=str)
def test_gated_heads_against_loops(geometry: Geometry, config: dict[str, Any], gpsa: Callable[..., GPSA]) -> None:
    layer, x = gpsa(geometry, **config), torch.randn(2, 4, 4, 3)
    heads = head_statistics(layer, x)
    assert_as_by_loops(heads, layer, x)
    if "gate" in config:  # convex maps: both are one number, and the gate is the share of content
        assert all(head.distance == pytest.approx(head.nonlocality, rel=1e-5) for head in heads)
        assert [head.gate for head in heads] == pytest.approx((1 - torch.sigmoid(layer.lam)).tolist(), abs=1e-6)
    else:
        assert any(abs(head.distance - head.nonlocality) > 0.01 for head in heads)
        assert [head.gate for head in heads] == pytest.approx(layer.gamma.tolist())
    assert [head.span for head in heads] == pytest.approx((1 / layer.alpha).tolist())


def test_biased_heads_against_loops() -> None:
    layer, x = cmhsa(), torch.randn(2, 4, 4, 6)  # smaller than its table
    heads = head_statistics(layer, x)
    assert_as_by_loops(heads, layer, x)
    assert {(head.gate, head.span) for head in heads} == {(None, None)}


@pytest.mark.parametrize("budget", [1, 500, 5000])
def test_maps_in_pieces_are_the_maps(budget: int, gpsa: Callable[..., GPSA], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_NUMBERS", budget)
    x = torch.randn(3, 4, 5, 6)
    for layer in (gpsa(), gpsa(gate="sigmoid"), cmhsa()):
        mix, image = mix_of(layer, x), 0
        chosen = torch.tensor([0, 3, 17, 29])
        parts = list(pieces(layer, x, chosen))
        assert sum(maps.shape[0] * maps.shape[2] for _, maps in parts) == 3 * 4
        for at, maps in parts:
            assert maps.numel() <= max(budget, 9 * 56)
            assert torch.allclose(maps, mix[image : image + len(maps), :, at], atol=1e-6)
            image += len(maps) if int(at[-1]) == 29 else 0


def test_which_heads_stayed_convolutional(gpsa: Callable[..., GPSA]) -> None:
    x, layer = torch.randn(2, 4, 6, 6), GPSA(4, 3, PLAIN, config=PAPERS).eval()
    with torch.no_grad():
        layer.gamma[3], layer.gamma[5], layer.gamma[7] = 0.2, -0.2, 2e-4
        layer.spread[8] = 0.3
    assert [head.head for head in head_statistics(layer, x) if head.is_convolution] == [0, 1, 2, 4, 6, 7]
    sharp = RecastConfig(gate="sigmoid", alpha=20, lambda_init=14)
    soft, exact = (GPSA(4, 3, PLAIN, config=config).eval() for config in (SIGMOID, sharp))
    assert not any(head.is_convolution for head in head_statistics(soft, x))
    assert all(head.is_convolution for head in head_statistics(exact, x))
    pruned = gpsa()
    pruned.prune_([0, 1], [2])
    heads = head_statistics(pruned, x)
    assert [head.head for head in heads if head.span is not None] == [0, 1]
    assert [head.head for head in heads if head.gate != 0] == [2]
    assert all(head.is_convolution for head in heads[3:])


def test_long_layers_are_sampled(gpsa: Callable[..., GPSA]) -> None:
    layer, x = gpsa(gate="sigmoid"), torch.randn(2, 4, 12, 12)
    whole, sample = head_statistics(layer, x, queries=144), head_statistics(layer, x, queries=40)
    assert sample == head_statistics(layer, x, queries=40) != head_statistics(layer, x, queries=40, seed=1)
    assert [head.distance for head in sample] == pytest.approx([head.distance for head in whole], rel=0.2)


def wrapped(model: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(model=model))


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def test_the_table_with_checkpoints(tmp_path: Path) -> None:
    x, parent = torch.rand(3, 3, 6, 6), small()
    recast: Any = recast_(small(), plan(parent, x, PAPERS, where="all")).train()
    loads: list[Any] = [("recast", -1, small)]  # before its layers were recast
    for epoch in (0, 2):
        with torch.no_grad():
            recast[0].gamma.fill_(0.1 * epoch)
        path = tmp_path / f"epoch-{epoch:04}.safetensors"
        save(recast, path)
        loads.append(("recast", epoch, lambda path=path: wrapped(load(path, parent=parent))))
    table = tabulate_heads({"parent": wrapped(parent), "recast": wrapped(recast)}, lambda: [(x, torch.zeros(3))], loads)
    assert all(module.training for module in recast.modules())
    assert not any(module._forward_pre_hooks for module in recast.modules())
    assert len(table.rows) == 3 * (9 + 4)
    assert {(row[0], row[2]) for row in table.rows} == {("recast", "0"), ("recast", "2")}
    by_epoch = {epoch: [row for row in table.rows if row[1] == epoch and row[2] == "0"] for epoch in (0, 2, None)}
    gate, stayed = table.columns.index("gate"), table.columns.index("is_convolution")
    assert {(row[gate], row[stayed]) for row in by_epoch[0]} == {(0.0, True)}
    assert all(row[gate] == pytest.approx(0.2) and not row[stayed] for row in by_epoch[2])
    assert [row[2:] for row in by_epoch[2]] == [row[2:] for row in by_epoch[None]]


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(RecastError, match="no heads"):
        head_statistics(small(), torch.rand(1, 3, 6, 6))
    with pytest.raises(RecastError, match="queries"):
        head_statistics(GPSA(2, 2, PLAIN, config=PAPERS), torch.rand(1, 2, 4, 4), queries=0)


def test_the_telling_query_is_the_one_whose_maps_differ_most(gpsa: Callable[..., GPSA]) -> None:
    layer, x = gpsa(), torch.randn(3, 4, 7, 6)
    mix = mix_of(layer, x)
    at = int((mix - mix.mean(0)).abs().sum((0, 1, 3)).argmax())
    maps, query = telling_query(layer, x)
    assert query == divmod(at, 6)
    assert telling_query(GPSA(2, 2, PLAIN, config=PAPERS), torch.randn(2, 2, 7, 9))[1] == (3, 4)  # none differ: middle
    assert torch.allclose(maps, mix[:, :, at].unflatten(-1, (9, 8))[..., 1:-1, 1:-1])
