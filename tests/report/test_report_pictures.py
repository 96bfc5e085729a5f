"""Charts and attention maps."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recast.report.figures import lines, maps, style
from recast.report.figures.chart import Chart, Data
from recast.report.figures.lines import Curve
from recast.report.read.attention import Attention, AttentionLayer
from recast.report.read.run import read_run


def pixels(uri: str) -> np.ndarray:
    header, _, data = uri.partition(",")
    assert header == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)


def attention(mix: np.ndarray, kernel: tuple[int, int] = (1, 1)) -> Attention:
    count, heads = mix.shape[:2]
    layer = AttentionLayer("conv", mix.astype(np.float32), (1, 2), np.full(heads, 0.25), kernel)
    return Attention(np.zeros((count, 8, 8, 3), np.uint8), ["a"] * count, ["b"] * count, [layer])


def drawn(curves: list[Curve], story: str) -> str:
    return Chart("name", "title", story, lines.line_chart(curves, xlabel="x"), Data((), [])).svg


def test_signed_maps_are_centred_at_white() -> None:
    mix = np.zeros((1, 1, 4, 4))
    mix[0, 0, 0, :3] = 1.0, 0.01, -0.01
    (image,) = maps.image_maps(attention(mix), "γ", 10**6)
    layer = image.layers[0]
    assert layer.signed
    assert layer.limit == "0.01"  # the 1.0 saturates, the rest can be seen
    zero, plus, minus = (pixels(layer.heads[0].picture)[row, column] for row, column in ((3, 3), (0, 1), (0, 2)))
    assert zero.min() > 240
    assert plus[0] > plus[2] + 60  # orange
    assert minus[2] > minus[1] + 60  # purple
    assert (pixels(layer.heads[0].picture)[0, 0] == plus).all()


def test_non_negative_maps_are_sequential() -> None:
    mix = np.zeros((1, 1, 4, 4))
    mix[0, 0, 0, :2] = 1.0, 0.5
    layer = maps.image_maps(attention(mix), "γ", 10**6)[0].layers[0]
    assert not layer.signed
    picture = pixels(layer.heads[0].picture)
    assert picture[3, 3].sum() < picture[0, 1].sum()  # 0 is the dark end


def test_a_closed_head_is_drawn_at_its_own_scale() -> None:
    mix = np.zeros((1, 1, 4, 4))
    mix[0, 0, 2, 2] = 1.0
    assert maps.image_maps(attention(mix), "γ", 10**6)[0].layers[0].limit == "1"


def test_large_and_non_finite_maps() -> None:
    mix = np.random.default_rng(0).normal(size=(1, 2, 40, 30))
    mix[0, 0, 0, 0] = np.nan
    layer = maps.image_maps(attention(mix), "γ", 10**6)[0].layers[0]
    assert pixels(layer.heads[1].picture).shape == (40, 30, 3)
    assert layer.aspect == "30 / 40"


def test_query_and_labels() -> None:
    (image,) = maps.image_maps(attention(np.ones((1, 6, 4, 8)), kernel=(2, 3)), "γ", 10**6)
    layer = image.layers[0]
    assert (layer.query.left, layer.query.top, layer.query.width, layer.query.height) == (25, 25, 12.5, 25)
    assert layer.columns == 3
    assert [head.tap for head in layer.heads] == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    assert layer.heads[5].alt.startswith("Head of tap 1,2: γ = 0.25; largest weight 1.00 at row 0, column 0")
    assert maps.head_labels(5, (2, 3)) == ["0", "1", "2", "3", "4"]


def test_the_budget_leaves_images_out_but_never_all() -> None:
    several = attention(np.random.default_rng(0).normal(size=(5, 9, 20, 20)), (3, 3))
    assert len(maps.image_maps(several, "γ", 10**7)) == 5
    assert len(maps.image_maps(several, "γ", 1)) == 1


def test_charts_use_the_page_colours_and_their_own_ids() -> None:
    charts = [drawn([Curve([0, 1], [1, up], "recast"), Curve([0, 1], [1, 2], "finetuned")], "a < b") for up in (2, 3)]
    ids = [set(re.findall(r'\bid="([^"]+)"', chart)) for chart in charts]
    assert ids[0]
    assert not ids[0] & ids[1]
    for chart, own in zip(charts, ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', chart)) <= own
        assert "var(--recast)" in chart
        assert "var(--finetuned)" in chart
        assert not re.search("|".join(style.VARIABLES), chart)
        assert not re.search(r"#(?!000000)[0-9a-f]{6}\b", chart)
        assert 'aria-label="a &lt; b"' in chart
        assert "<metadata" not in chart


def test_a_users_matplotlib_settings_do_not_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = [Curve([0, 1], [1, 2], "recast")]
    before = drawn(curve, "d")
    monkeypatch.setitem(style.mpl.rcParams, "lines.linewidth", 9.0)
    monkeypatch.setitem(style.mpl.rcParams, "axes.facecolor", "#ff0000")
    assert drawn(curve, "d") == before
    assert style.mpl.rcParams["lines.linewidth"] == 9.0


def test_long_curves_are_thinned_but_keep_their_ends() -> None:
    x, y = lines.thin(range(1001), range(1001))
    assert len(x) == lines.POINTS
    assert (x[0], x[-1], y[-1]) == (0, 1000, 1000)


@pytest.mark.parametrize("positions", [[0.5] * 5, [0.0, 0.01, 0.99, 1.0], [0.1, 0.5, 0.9], [0.97] * 4, []])
def test_labels_are_moved_apart(positions: list[float]) -> None:
    moved = lines.spread(positions, 0.06)
    assert all(high - low >= 0.06 - 1e-9 for low, high in pairwise(moved))
    assert all(-1e-9 <= position <= 1 + 1e-9 for position in moved)
    if positions == [0.1, 0.5, 0.9]:
        assert moved == pytest.approx(positions)
    if positions == [0.5] * 5:
        assert np.mean(moved) == pytest.approx(0.5)


def test_every_head_is_drawn(make_run: Callable[..., Path]) -> None:
    from recast.report.figures.heads import head_charts

    layers, hidden = head_charts(read_run(make_run()), 10**7)
    assert hidden == 0
    assert [[panel.symbol for panel in layer.panels] for layer in layers] == [["γ", "s", "1/α"]] * 2
    assert len(re.findall(r">[0-2],[0-2]<", layers[0].panels[0].chart.svg)) == 9
    assert "(head " in layers[0].panels[0].reading
    assert head_charts(read_run(make_run("again")), 1)[1] == 1
