"""The papers' figures: what is drawn is what was measured, in the page's colours or on paper."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast.lab.report import charts, costs, curves, draw, layers, maps
from recast.lab.report.charts import DEPTHS, Chart
from recast.lab.report.draw import Point, Series, series_chart
from recast.lab.report.load import Run, read_run
from recast.lab.report.maps import Attention, AttentionLayer

MakeRun = Callable[..., Path]


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    return read_run(make_run())


@pytest.fixture
def full(make_measured: MakeRun) -> Run:
    return read_run(make_measured())


def by_name(found: Sequence[Chart]) -> dict[str, Chart]:
    return {chart.name: chart for chart in found}


def rows_where(chart: Chart, **wanted: object) -> list[dict[str, Any]]:
    rows = [dict(zip(chart.columns, row, strict=True)) for row in chart.rows]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


# what is drawn


def test_robustness_against_every_cost(full: Run) -> None:
    found = costs.cost_charts([full])
    assert list(found) == ["macs", "parameters", "images_per_second", "peak_memory"]
    titles = ["Clean images", "FGSM, ε = 1/255", "PGD, ε = 1/255", "ImageNet-C", "ImageNet-V2"]
    assert [chart.title for chart in found["macs"]] == titles
    (point,) = rows_where(found["images_per_second"][0], arm="recast")
    assert point["images_per_second"] == pytest.approx(974.4)
    assert (point["top1"], point["low"], point["high"]) == pytest.approx((76.3, 75.1, 77.5))
    assert {row["parameters"] for row in rows_where(found["parameters"][0])} == {152026, 191438}  # of the plan


def test_accuracy_against_training_time(full: Run) -> None:
    """Of the parent's own training nothing is known."""
    rows = {"metrics": 3.0, "control": 2.0}
    timed = {name: [replace(row, seconds=each) for row in getattr(full, name)] for name, each in rows.items()}
    chart, *_ = costs.cost_charts([replace(full, **timed)])["seconds"]
    expected = {"recast": 3.0 * len(full.metrics), "finetuned": 2.0 * len(full.control)}
    assert {row["arm"]: row["seconds"] for row in rows_where(chart)} == expected


def test_relative_improvement(full: Run) -> None:
    found = by_name(curves.relative(full))
    assert set(found) == {
        f"relative_{name}" for name in ("imagenet-c_category", "imagenet-c_severity", "basic_kind", "basic_severity")
    }
    (weather,) = rows_where(found["relative_imagenet-c_category"], against="finetuned")
    recast, other = (full.value(arm, "imagenet-c", "top1/weather") for arm in ("recast", "finetuned"))
    assert weather["relative_improvement_percent"] == pytest.approx(100 * (recast - other) / other)
    paired = full.difference("finetuned", "imagenet-c", "top1/weather")
    assert paired is not None
    assert (weather["low"], weather["high"]) == pytest.approx((100 * paired.low / other, 100 * paired.high / other))
    (mild,) = rows_where(found["relative_basic_severity"], severity="1", against="parent")
    kinds = ("blur", "contrast")
    recast, other = (sum(full.value(arm, "basic", f"top1/{kind}/1") for kind in kinds) for arm in ("recast", "parent"))
    assert mild["relative_improvement_percent"] == pytest.approx(100 * (recast - other) / other)
    assert mild["low"] is None  # a mean of several that was not measured as one


def test_sweeps(full: Run) -> None:
    found = by_name([*curves.sweeps(full), *curves.attacks(full)])
    assert set(found) == {
        "resolution", "knn", "adversarial_fgsm", "adversarial_pgd",
    }  # fmt: skip
    assert [row["side"] for row in rows_where(found["resolution"], arm="recast")] == [128, 224]  # the square ones
    assert "160×192 (height × width): Parent 67.2 %" in found["resolution"].note
    assert [row["k"] for row in rows_where(found["knn"], arm="parent")] == [1, 5]
    first, *_ = rows_where(found["adversarial_fgsm"], arm="recast")
    assert (first["epsilon_255"], first["top1"]) == (0.0, full.value("recast", "clean", "top1"))
    assert "FGSM: top-1, % by ε in 1/255. Parent from 74.2 % at 0 to 6.2 % at 4" in found["adversarial_fgsm"].story
    assert curves.apart([100, 101, 150, 199, 200]) == [100, 150, 200]
    assert curves.apart([64]) == [64]


def test_fourier_of_several_runs(run: Run, make_run: MakeRun) -> None:
    found = layers.joint_fourier([run, read_run(make_run("other"))])
    for joint, frequency in zip(found, (1 / 3, 2 / 3, 1), strict=True):
        assert {row["run"] for row in rows_where(joint)} == {"run", "other"}
        assert {round(row["frequency"], 6) for row in rows_where(joint)} == {round(frequency, 6)}
    assert ">other</text>" in joint.svg
    assert {"var(--depth0)", f"var(--depth{DEPTHS - 1})"} <= set(re.findall(r"var\(--\w+\)", joint.svg))
    assert layers.joint_fourier([run]) == []
    assert [chart.name for chart in layers.depth_charts(run)] == [
        "fourier_depth_third_pi", "fourier_depth_two_thirds_pi", "fourier_depth",
    ]  # fmt: skip


def test_several_runs_in_one_figure(make_measured: MakeRun) -> None:
    runs = [read_run(make_measured(name, gain=gain)) for name, gain in (("a", 1.0), ("b", 3.0))]
    training, resolution = curves.of_runs(runs)
    assert [row["percent"] for row in rows_where(training, run="b")] == [row.metrics["top1"] for row in runs[1].metrics]
    assert [(row["run"], row["side"]) for row in rows_where(resolution)] == [
        (name, s) for name in "ab" for s in (128, 224)
    ]
    assert ">b</text>" in training.svg
    assert curves.of_runs(runs[:1]) == []


def test_every_head_is_drawn(run: Run, make_run: MakeRun) -> None:
    found, hidden = layers.head_charts(run, 10**7)
    assert hidden == 0
    assert [[panel.symbol for panel in panels] for panels in found.values()] == [["γ", "s", "1/α"]] * 4
    chart = found["layer3.0.conv1"][0].chart
    assert chart is not None
    assert len(re.findall(r">[↖↑↗←•→↙↓↘]<", chart.svg)) == 9
    assert layers.head_charts(run, 1)[1] == 3
    during, _ = layers.head_charts(read_run(make_run("during", "during")), 10**7)
    ticks = [re.findall(r">(\d)</text>", panels[0].chart.svg) for panels in during.values() if panels[0].chart]
    assert ticks[0] == ticks[-1]  # one axis, although the layers became attention at different times


def test_pointing_at_a_value_hits_its_point(full: Run) -> None:
    """The invisible circles lie where matplotlib drew the markers."""
    svg = by_name(curves.attacks(full))["adversarial_fgsm"].svg
    marks = [tuple(map(float, place)) for place in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', svg)]
    hits = [tuple(map(float, place)) for place in re.findall(r'class="hit" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert len(hits) == 12
    for x, y in hits:
        assert min(abs(x - across) + abs(y - up) for across, up in marks) < 0.15


@pytest.mark.parametrize("positions", [[0.5] * 5, [0.0, 0.01, 0.99, 1.0], [0.1, 0.5, 0.9], [0.97] * 4, []])
def test_labels_are_moved_apart(positions: list[float]) -> None:
    found = draw.spread(positions, 0.06)
    assert all(high - low >= 0.06 - 1e-9 for low, high in pairwise(found))
    assert all(-1e-9 <= position <= 1 + 1e-9 for position in found)
    if positions == [0.1, 0.5, 0.9]:
        assert found == pytest.approx(positions)


@pytest.mark.parametrize("count", [1, 4, 12, 40])
def test_names_of_layers_do_not_run_together(count: int) -> None:
    ticks = draw.layer_ticks([f"layer{place // 6}.{place}.conv1" for place in range(count)])
    widest = max(len(part) for name in ticks.values() for part in name.split("\n"))
    assert len(ticks) * (widest + 1) <= draw.LETTERS + widest + 1
    assert len(ticks) == count or len(ticks) > 3
    names = ["1.0", "features.10", "stem", "layer1.conv2"]  # a number stays in the line of what it counts
    assert list(draw.layer_ticks(names).values()) == ["1.0", "features.10", "stem", "layer1\nconv2"]


# colours


def drawn(story: str, up: float = 2) -> str:
    pair = [Series("a", [Point(0, 1), Point(1, up)], "recast"), Series("b", [Point(0, 1), Point(1, 2)], "finetuned")]
    return series_chart("name", "title", pair, "x", subject=story, xlabel="x").svg


def test_charts_have_the_page_s_colours_and_ids_of_their_own() -> None:
    found = [drawn("a < b", up) for up in (2, 3)]
    ids = [set(re.findall(r'\bid="([^"]+)"', chart)) for chart in found]
    assert ids[0]
    assert not ids[0] & ids[1]
    for chart, own in zip(found, ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', chart)) <= own
        assert set(re.findall(r"var\(--\w+\)", chart)) >= {"var(--recast)", "var(--finetuned)"}
        assert not re.search(r"#(?!000000)[0-9a-f]{6}\b", chart)
        assert 'aria-label="a &lt; b. a from' in chart


def test_a_users_matplotlib_settings_do_not_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn("d")
    monkeypatch.setitem(charts.mpl.rcParams, "lines.linewidth", 9.0)
    monkeypatch.setitem(charts.mpl.rcParams, "axes.facecolor", "#ff0000")
    assert drawn("d") == before
    assert charts.mpl.rcParams["lines.linewidth"] == 9.0


# attention maps


def image_layer(mix: np.ndarray, kernel: tuple[int, int] = (1, 1)) -> tuple[dict[str, Any], np.ndarray]:
    """The only layer of the first image on the page, and the picture of its last head."""
    layer = AttentionLayer("conv", mix.astype(np.float32), (1, 2), np.full(mix.shape[1], 0.25), kernel)
    attention = Attention(np.zeros((len(mix), 8, 8, 3), np.uint8), ["a"] * len(mix), ["b"] * len(mix), [layer])
    (image,) = maps.image_maps(attention, "γ", 1)  # the budget leaves images out, but never all
    (found,) = image["layers"]
    header, _, data = found["heads"][-1]["picture"].partition(",")
    assert header == "data:image/png;base64"
    return found, np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(int)


def test_nothing_is_seen_of_weights_of_0() -> None:
    mix = np.zeros((5, 1, 4, 4))
    mix[:, 0, 0, :3] = 1.0, 0.01, -0.01
    layer, picture = image_layer(mix)
    assert (layer["low"], layer["high"]) == ("≤ −0.01", "≥ 0.01")  # the 1.0 saturates, the rest can be seen
    zero, plus, minus = (picture[row, column] for row, column in ((3, 3), (0, 1), (0, 2)))
    assert (zero[3], plus[3], minus[3]) == (0, 255, 255)
    assert plus[0] > plus[2] + 60  # orange
    assert minus[2] > minus[1] + 60  # purple


def test_other_maps() -> None:
    mix = np.zeros((1, 1, 4, 4))
    mix[0, 0, 2, 2] = 1.0
    assert image_layer(mix)[0]["high"] == "≥ 1"  # a closed head is drawn at its own scale
    large = np.random.default_rng(0).normal(size=(1, 2, 40, 30))
    large[0, 0, 0, 0] = np.nan
    assert image_layer(large)[1].shape == (40, 30, 4)
    layer, _ = image_layer(np.ones((1, 6, 4, 8)), kernel=(2, 3))
    assert (layer["query"], layer["columns"]) == ("left:25.0%;top:25.0%;width:12.5%;height:25.0%", 3)
    assert layer["heads"][5]["alt"].startswith("Head ↘: γ = 0.25; largest weight 1.00 at row 0, column 0")
    assert maps.head_labels(5, (2, 3)) == ["0", "1", "2", "3", "4"]


def test_layers_whose_maps_differ_most_are_shown() -> None:
    layers = []
    for share in (0.3, 0.0, 0.5, 0.1, 0.2):
        mix = np.zeros((2, 1, 2, 2), np.float32)
        mix[:, 0, 0, 0] = 1 - share
        mix[0, 0, 0, 1] = mix[1, 0, 1, 0] = share
        layers.append(AttentionLayer(str(share), mix, (0, 0), np.zeros(1), (1, 1)))
    attention = Attention(np.zeros((2, 8, 8, 3), np.uint8), ["a"] * 2, ["b"] * 2, layers)
    assert [layer.name for layer in attention.shown] == ["0.3", "0.5", "0.1", "0.2"]
    assert "0.5, by 50\u00a0%" in attention.reading
    assert "0.00\u00a0%" in replace(attention, layers=layers[1:2]).reading


def test_a_dollar_in_a_name_is_a_dollar() -> None:
    name = r"$\frac{1}$ and $\nothing$"
    series = [Series(name, [Point(x, float(x)) for x in (1, 2)], end=name)]
    assert r"$\nothing$" in series_chart("a", name, series, "x", xlabel=name).svg
