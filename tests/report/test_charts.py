from dataclasses import replace
from typing import Any

import pytest
from on_reports import rows_where, series_of, set_recipe, set_values

from recast.lab.folder.records import ARMS, FrontierLine
from recast.lab.folder.tables import Table, write_table
from recast.lab.pages import charts
from recast.lab.pages.charts import Point, Series, series_chart, styled
from recast.lab.report import costs, curves, layers
from recast.lab.report.load import Run, read_run


@pytest.fixture
def full(make_measured: Any) -> Run:
    return read_run(make_measured())


def test_robustness_against_every_cost(full: Run) -> None:
    charts_by_cost = costs.cost_charts([full])
    assert list(charts_by_cost) == ["macs", "parameters", "images_per_second", "peak_memory"]
    titles = ["Clean images", "FGSM, ε = 1/255", "PGD, ε = 1/255", "ImageNet-C", "ImageNet-V2"]
    assert [chart.title for chart in charts_by_cost["macs"]] == titles
    (point,) = rows_where(charts_by_cost["images_per_second"][0], series="Recast")
    assert point["x"] == pytest.approx(974.4)
    assert (point["value"], point["low"], point["high"]) == pytest.approx((76.3, 75.1, 77.5))
    assert {row["x"] for row in rows_where(charts_by_cost["parameters"][0])} == {152026, 191438}  # of the plan


def test_the_legend_names_the_arms_of_every_run(make_run: Any, make_plain: Any) -> None:
    for runs in ([make_plain("a"), make_run("b")], [make_run("c"), make_plain("d")]):
        chart = costs.cost_charts([read_run(path) for path in runs])["macs"][0]
        assert [key.role for key in chart.keys] == ["parent", "finetuned", "recast"]


def test_relative_improvement(full: Run) -> None:
    drawn = {chart.name: chart for chart in curves.relative(full)}
    assert set(drawn) == {"relative_imagenet-c_category", "relative_imagenet-c_severity", "relative_basic_severity"}
    against = "Recast against parent, fine-tuned"
    (weather,) = rows_where(drawn["relative_imagenet-c_category"], series=against)
    recast, control = (full.value(arm, "imagenet-c", "top1/weather") for arm in ("recast", "finetuned"))
    assert (weather["x"], weather["value"]) == ("weather", pytest.approx(100 * (recast - control) / control))
    paired: Any = full.difference("finetuned", "imagenet-c", "top1/weather")
    assert (weather["low"], weather["high"]) == pytest.approx((100 * paired.low / control, 100 * paired.high / control))
    assert [row["x"] for row in rows_where(drawn["relative_basic_severity"], series=against)] == ["1", "5"]


def test_sizes_and_attacks(full: Run) -> None:
    drawn = {chart.name: chart for chart in (*curves.resolutions(full), *curves.attacks(full))}
    assert set(drawn) == {"resolution", "adversarial_fgsm", "adversarial_pgd"}
    assert [row["x"] for row in rows_where(drawn["resolution"], series="Recast")] == [128, 224]  # squares
    first, *_ = rows_where(drawn["adversarial_fgsm"], series="Recast")
    assert (first["x"], first["value"]) == ("0", full.value("recast", "clean", "top1"))


def test_a_users_matplotlib_settings_do_not_reach_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    series = [Series("a", [Point(0, 1), Point(1, 2)], "recast"), Series("b", [Point(0, 1), Point(1, 2)], "finetuned")]
    before = series_chart("name", "d", series, xlabel="x").svg
    monkeypatch.setitem(charts.mpl.rcParams, "lines.linewidth", 9.0)
    monkeypatch.setitem(charts.mpl.rcParams, "axes.facecolor", "#ff0000")
    assert series_chart("name", "d", series, xlabel="x").svg == before
    assert charts.mpl.rcParams["lines.linewidth"] == 9.0


def test_a_dollar_in_a_name_is_a_dollar() -> None:
    name = r"$\frac{1}$ and $\nothing$"
    series = [Series(name, [Point(x, float(x)) for x in (1, 2)], end=name)]
    assert r"$\nothing$" in series_chart("a", name, series, xlabel=name).svg


def test_gates_are_drawn_of_heads_that_have_them(make_run: Any) -> None:
    run = read_run(make_run())
    (layer, panels), *_ = layers.head_charts(run).items()
    assert layer == "layer3.0.conv1"
    assert [chart.name for chart in panels] == [f"{name}_{layer}" for name in ("gamma", "s", "span")]
    assert len(panels[0].panel.keywords["series"]) == 9 + 1  # and their mean
    assert layers.has_mean(panels[0])
    content_head = {"entropy": [None] * 4 + [1.0] + [None] * 4, "s": [0.0] * 9, "span": [0.0] * 9}
    metrics = [
        replace(row, layers={name: {**values, **content_head} for name, values in row.layers.items()})
        for row in run.metrics
    ]
    ((title, (chart, *_)),) = layers.head_charts(replace(run, metrics=metrics)).items()
    assert (title, chart.title) == ("γ, gate of the content map", layer)
    (series,) = chart.panel.keywords["series"]
    assert not layers.has_mean(chart)
    assert series.end == "•"
    assert [point.y for point in series.points] == [row.layers[layer]["gamma"][4] for row in run.metrics]


def test_markers_at_zero_are_drawn_whole(make_measured: Any) -> None:
    path = make_measured()
    for suite in ("fgsm", "pgd"):
        set_values(path, suite, "top1@4", dict.fromkeys(ARMS, 0.0), 5000)
    for chart in curves.attacks(read_run(path)):
        with styled("salt"):
            figure = chart.draw()
        (axes,) = figure.axes
        points = {line.get_markersize() for line in axes.lines if 0 in line.get_ydata()}
        room = (axes.transData.transform((1, 0))[1] - axes.bbox.y0) * 72 / figure.dpi
        assert points
        assert room >= max(points) / 2


def test_the_curve_of_closed_heads(make_run: Any) -> None:
    path = make_run()
    points = [(3, 90.0, 80.0, 4.0), (2, 91.0, 79.0, 3.0), (1, 85.0, 70.0, 3.5), (0, 60.0, 50.0, 1.0)]
    lines = [FrontierLine("recast", heads, "", None, None, top1, noise, ms, 8, 50) for heads, top1, noise, ms in points]
    lines.append(FrontierLine("parent", 0, "", None, None, 61.0, 55.0, 1.0, 8, 50))
    write_table(path / "analysis", Table.of("frontier", FrontierLine, lines))
    clean, noise = costs.frontier(read_run(path))
    best = costs._best(clean.panel.keywords["series"][-2].points)
    assert [(point.x, point.y) for point in best] == [(1.0, 60.0), (3.0, 91.0)]
    assert [chart.name for chart in (clean, noise)] == ["frontier_top1", "frontier_noise"]
    run = read_run(path)
    assert costs.joint_frontier([run]) == []
    joint = costs.joint_frontier([run, replace(run, name="another")])
    assert series_of(joint[0]) == {run.name, "another"}
    assert [(row["x"], row["y"]) for row in rows_where(joint[1], series="another")] == [(ms, n) for *_, n, ms in points]


def test_accuracy_by_the_length_of_the_training(make_run: Any) -> None:
    """Two drop rates, two lengths, two seeds of one point; an unfinished run is not drawn."""
    runs = []
    for rate, epochs, seed, top1 in ((0.1, 2, 0, 70.0), (0.1, 2, 1, 72.0), (0.1, 3, 0, 75.0), (0.3, 3, 0, 60.0)):
        recipe = {"regularization.drop_path": rate, "epochs": epochs, "seed": seed}
        name = f"{rate}-{epochs}-{seed}"
        runs.append(read_run(make_run(name, top1=dict.fromkeys(ARMS, top1), recipe=recipe, epochs=epochs)))
    begun = make_run("begun", recipe={"regularization.drop_path": 0.1, "epochs": 9}, without=("rows.csv",))
    drawn = {chart.name: chart for chart in curves.of_runs([*runs, read_run(begun)])}
    points = [(row["series"], row["x"], row["y"]) for row in rows_where(drawn["length_runs"])]
    assert points == [("drop_path 0.1", 2, 71.0), ("drop_path 0.1", 3, 75.0), ("drop_path 0.3", 3, 60.0)]
    assert "length_runs" not in {chart.name for chart in curves.of_runs(runs[:2])}


def test_training_time_counts_that_of_known_parents(make_run: Any, make_plain: Any) -> None:
    """Weights of nothing, of a run on random weights, of the control arm of a run on those; then of elsewhere."""
    grandparent = make_plain("grandparent")
    set_recipe(grandparent, {"model.checkpoint": None, "model.pretrained": False})
    parent = make_run("parent", recipe={"model.checkpoint": str(grandparent / "weights.safetensors")})
    child = make_run("child", recipe={"model.checkpoint": str(parent / "finetuned" / "weights.safetensors")})
    times = [costs.parent_seconds(path, read_run(path).recipe) for path in (grandparent, parent, child)]
    each = sum(row.seconds or 0 for row in read_run(grandparent).metrics)
    assert times == [0, each, 2 * each]
    charts = costs.cost_charts([read_run(child)])
    assert "seconds" not in charts
    xs = {row["series"]: row["x"] for row in rows_where(charts["total_seconds"][0])}
    assert xs["Parent"] == 2 * each < xs["Recast"]
    stray = read_run(make_run("stray", recipe={"model.checkpoint": "elsewhere.safetensors"}))
    assert "total_seconds" not in costs.cost_charts([read_run(child), stray])
