"""The papers' figures: what is drawn is what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from recast.report.figures import arms, sweeps
from recast.report.figures.chart import Chart, joined
from recast.report.figures.cost import cost_axes
from recast.report.figures.distance import distance_charts
from recast.report.figures.fourier import fourier_charts, fourier_note, joint_fourier
from recast.report.figures.relative import relative_charts
from recast.report.figures.similarity import similarity_charts
from recast.report.figures.style import DEPTHS, PAGE, PAPER, VARIABLES, styled
from recast.report.read.run import Run, read_run

MakeRun = Callable[..., Path]


@pytest.fixture
def run(make_measured: MakeRun) -> Run:
    return read_run(make_measured())


def by_name(charts: list[Chart]) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts}


def rows_where(chart: Chart, **wanted: object) -> list[dict[str, object]]:
    rows = [dict(zip(chart.data.columns, row, strict=True)) for row in chart.data.rows]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def test_robustness_against_every_cost(run: Run) -> None:
    axes = cost_axes([run])
    assert [axis.cost for axis in axes] == ["macs", "parameters", "images_per_second", "peak_memory"]
    assert [chart.title for chart in axes[0].charts] == [
        "Clean images",
        "FGSM, ε = 1/255",
        "PGD, ε = 1/255",
        "AutoAttack, ε = 1/255",
        "ImageNet-C",
        "Corruptions (basic)",
        "ImageNet-A",
        "ImageNet-R",
        "ImageNet-V2",
        "ImageNet-Sketch",
        "ImageNet-ReaL",
    ]
    (point,) = rows_where(axes[2].charts[0], arm="recast")
    assert point["images_per_second"] == 640.0
    assert (point["top1"], point["low"], point["high"]) == pytest.approx((76.3, 75.1, 77.5))
    (point,) = rows_where(axes[0].charts[1], arm="parent")
    assert point["top1"] == run.value("parent", "fgsm", "top1@1")


def test_costs_of_the_plan_serve_where_none_was_measured(make_run: MakeRun) -> None:
    path = make_run()
    text = "\n".join(
        line for line in (path / "rows.csv").read_text(encoding="utf-8").splitlines() if ",cost," not in line
    )
    (path / "rows.csv").write_text(text + "\n", encoding="utf-8")
    axes = cost_axes([read_run(path)])
    assert [axis.cost for axis in axes] == ["macs", "parameters"]
    assert {row["macs"] for row in rows_where(axes[0].charts[0])} == {17_432_576.0, 26_545_121.0}


def test_relative_improvement(run: Run) -> None:
    charts = by_name(relative_charts(run))
    assert set(charts) == {
        "relative_imagenet-c_category",
        "relative_imagenet-c_severity",
        "relative_basic_kind",
        "relative_basic_severity",
    }
    (noise,) = rows_where(charts["relative_imagenet-c_category"], category="noise", against="finetuned")
    recast, other = (run.value(arm, "imagenet-c", "top1/noise") for arm in ("recast", "finetuned"))
    assert noise["relative_improvement_percent"] == pytest.approx(100 * (recast - other) / other)
    paired = run.difference("recast", "finetuned", "imagenet-c", "top1/noise")
    assert paired is not None
    assert (noise["low"], noise["high"]) == pytest.approx((100 * paired.low / other, 100 * paired.high / other))
    (mild,) = rows_where(charts["relative_basic_severity"], severity="1", against="parent")
    kinds = ("blur", "contrast", "occlusion")
    recast, other = (sum(run.value(arm, "basic", f"top1/{kind}/1") for kind in kinds) for arm in ("recast", "parent"))
    assert mild["relative_improvement_percent"] == pytest.approx(100 * (recast - other) / other)
    assert mild["low"] is None  # a mean of several that was not measured as one
    assert rows_where(charts["relative_imagenet-c_severity"], severity="5")[0]["low"] is not None


def test_sweeps(run: Run) -> None:
    charts = by_name(sweeps.sweeps(run))
    assert set(charts) == {"resolution", "frequency_low", "frequency_high", "knn"}
    sides = [row["side"] for row in rows_where(charts["resolution"], arm="recast")]
    assert sides == [128, 160, 192, 224, 256]  # what is not square is no point of the line
    assert "160×192 (height × width): Parent " in charts["resolution"].note
    assert "best at 256" in charts["resolution"].story
    assert [row["k"] for row in rows_where(charts["knn"], arm="parent")] == [1, 5, 10, 20]


def test_names_of_sizes_do_not_collide() -> None:
    assert sweeps._apart([100, 101, 150, 199, 200]) == [100, 150, 200]
    assert sweeps._apart([64]) == [64]


def test_attacks_begin_at_the_clean_images(run: Run) -> None:
    charts = by_name(arms.adversarial(run))
    assert set(charts) == {"adversarial_fgsm", "adversarial_pgd", "adversarial_autoattack"}
    first, *_ = rows_where(charts["adversarial_autoattack"], arm="recast")
    assert (first["epsilon_255"], first["top1"]) == (0.0, run.value("recast", "clean", "top1"))


def test_fourier_curves(run: Run) -> None:
    charts = by_name(fourier_charts(run))
    assert set(charts) == {"fourier_parent", "fourier_finetuned", "fourier_recast", "fourier_depth"}
    svg = charts["fourier_recast"].svg
    assert {"var(--depth0)", f"var(--depth{DEPTHS - 1})"} <= set(re.findall(r"var\(--\w+\)", svg))
    deepest = rows_where(charts["fourier_depth"], arm="recast")[-1]
    found = [p for p in run.analysis.fourier if (p.model, p.index, p.frequency) == ("recast", 8, 1.0)]
    assert deepest["delta_log_amplitude"] == found[0].delta
    assert "True frequencies" in fourier_note(run)
    assert "200 images" in fourier_note(run)


def test_notebook_frequencies_are_drawn_only_where_there_are_no_true_ones(make_measured: MakeRun) -> None:
    path = make_measured()
    file = path / "analysis" / "fourier.csv"
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    file.write_text(text + "\n".join(line.replace(",true,", ",notebook,") for line in lines[1:]), encoding="utf-8")
    assert {row["mode"] for row in rows_where(fourier_charts(read_run(path))[0])} == {"true"}
    file.write_text(text.replace(",true,", ",notebook,"), encoding="utf-8")
    assert "notebook" in fourier_note(read_run(path))


def test_runs_with_different_dates_in_one_figure(make_measured: MakeRun) -> None:
    runs = [read_run(make_measured(name, seed=seed)) for seed, name in enumerate("ab")]
    chart = joint_fourier(runs)
    assert chart is not None
    assert {row["run"] for row in rows_where(chart)} == {"a", "b"}
    assert ">a</text>" in chart.svg
    assert joint_fourier(runs[:1]) is None


def test_distances(run: Run) -> None:
    depth, epochs = distance_charts(run)
    assert {row["epoch"] for row in rows_where(depth)} == {None}
    assert {row["epoch"] for row in rows_where(epochs)} == {0, 5, None}  # None: as trained
    assert "stage3.0.conv1, head 4: 1.00 pixels, still its convolution" in depth.svg


def test_similarity(run: Run) -> None:
    (chart,) = similarity_charts(run)
    assert chart.note == "Of the same layer in both: at least 0.92, in stage3.2."
    assert len(re.findall('class="hit"', chart.svg)) == 81
    assert "stage1.0 and stage1.1: 0.910" in chart.svg


def test_pointing_at_a_value_hits_its_point(run: Run) -> None:
    """The invisible circles lie where matplotlib drew the markers."""
    chart = by_name(arms.adversarial(run))["adversarial_fgsm"]
    marks = [tuple(map(float, place)) for place in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', chart.svg)]
    hits = [tuple(map(float, place)) for place in re.findall(r'class="hit" cx="([\d.]+)" cy="([\d.]+)"', chart.svg)]
    assert len(hits) == 15
    for x, y in hits:
        assert min(abs(x - across) + abs(y - up) for across, up in marks) < 0.15


def test_small_charts_are_joined_for_paper(run: Run) -> None:
    charts = arms.corruptions(run)
    chart = joined("severity", "Title", charts)
    assert chart.data.columns[0] == "panel"
    assert len(chart.data.rows) == sum(len(single.data.rows) for single in charts)
    with styled(PAPER):
        figure = chart.draw(PAPER).figure
    assert [axes.get_title(loc="left") for axes in figure.axes] == [single.title for single in charts]


def test_paper_has_real_colours() -> None:
    places = {PAGE.ink, PAGE.muted, PAGE.rule, *PAGE.arms.values(), *PAGE.depths}
    assert places == set(VARIABLES)
    assert not places & {PAPER.ink, PAPER.muted, PAPER.rule, *PAPER.arms.values(), *PAPER.depths}
    assert PAPER.depth(0) == PAPER.depths[0]
    assert PAPER.depth(1.0) == PAPER.depths[-1]


@pytest.mark.parametrize("ground", ["#ffffff", "#1b1e23"], ids=["light", "dark"])
def test_colours_can_be_told_from_the_ground(ground: str) -> None:
    """WCAG's contrast of graphical objects, 3 : 1, for the arms; the ordered colours of the page follow the mode."""

    def luminance(color: str) -> float:
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    css = (Path(arms.__file__).parents[1] / "templates" / "page.css").read_text(encoding="utf-8")
    light, dark = css.partition("@media (prefers-color-scheme: dark)")[::2]
    part = light if ground == "#ffffff" else dark
    for arm in ("parent", "finetuned", "recast"):
        found = re.search(rf"--{arm}: (#[0-9a-f]{{6}})", part)
        assert found is not None
        pair = sorted((luminance(found[1]), luminance(ground)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 3
