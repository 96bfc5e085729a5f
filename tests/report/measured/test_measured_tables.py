"""Intervals, differences and means: what the page says of numbers that were measured with care."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from recast.report.facts import notes
from recast.report.group import read_groups
from recast.report.read.run import Run, read_run
from recast.report.tables.agreement import agreement, mcnemar, net_interval
from recast.report.tables.arms import Line, swept, three_arms
from recast.report.tables.heads import head_lines
from recast.report.tables.heat import heat_tables
from recast.report.tables.made import made_lines, missing
from recast.report.tables.seeds import mean_interval, seeds_apart, t_quantile, why_no_mean
from recast.report.tables.summary import over_seeds, summary
from recast.report.text.verdict import verdict
from recast.run.records import Difference, Row, write_differences, write_rows

MakeRun = Callable[..., Path]


def lines(run: Run) -> dict[str, Line]:
    return {
        f"{group.title.partition(':')[0]}, {line.label}".replace("\u00a0", " "): line
        for group in [*three_arms(run), *swept(run)]
        for line in group.lines
    }


def change(path: Path, **fields: object) -> None:
    recipe = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8"))
    for name, value in fields.items():
        section, _, key = name.partition("__")
        if key:
            recipe[section][key] = value
        else:
            recipe[section] = value
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def test_a_difference_has_its_paired_interval(make_measured: MakeRun) -> None:
    line = lines(read_run(make_measured(gain=1.2)))["Clean images, Top-1, %"]
    assert line.values["recast"] == "76.30"
    assert line.intervals["recast"] == "75.10 to 77.50"
    assert (line.to_finetuned.text, line.to_finetuned.interval) == ("+1.20", "0.48 to 1.92")
    assert line.to_finetuned.better == "recast"
    assert line.bar is not None
    assert line.bar.paired
    # the whisker is as wide as the interval on the scale of the bar: 1.44 against 1.20
    assert line.bar.span_width / line.bar.width == pytest.approx(1.44 / 1.2, abs=0.01)


def test_nobody_is_better_where_the_interval_holds_zero(make_measured: MakeRun) -> None:
    run = read_run(make_measured(gain=0.5))
    line = lines(run)["Clean images, Top-1, %"]
    assert (line.to_finetuned.interval, line.to_finetuned.better) == ("−0.22 to 1.22", "")
    assert (line.to_parent.interval, line.to_parent.better) == ("0.68 to 2.12", "recast")
    loss = lines(run)["Clean images, Loss"]
    assert loss.to_finetuned.better == "recast"  # lower, and its interval leaves out 0
    cells = [cell for table in heat_tables(run) for row in table.lines.values() for cell in row]
    assert all(cell.better == "" and cell.strength == 0 for cell in cells if cell.title.startswith("95 % interval: −"))
    assert any(cell.better == "recast" for cell in cells)


def test_test_sets_stand_together_and_sweeps_apart(make_measured: MakeRun) -> None:
    run = read_run(make_measured())
    found = lines(run)
    assert "Other test sets, ImageNet-Sketch" in found
    assert "AutoAttack, ε = 4/255" in found
    assert "ImageNet-C, mCE, %" in found
    assert found["ImageNet-C, mCE, %"].to_finetuned.better == "recast"  # lower
    assert found["Cost, Peak memory"].values["parent"] == "2.9\u00a0GiB"
    assert {group.title.partition(":")[0] for group in swept(run)} == {
        "Test resolution",
        "Low and high frequencies alone",
        "Nearest neighbours of the features",
    }
    assert "Test resolution, 160 × 192" in found
    assert "Nearest neighbours of the features, k = 5" in found
    assert "Low and high frequencies alone, above 0.35π kept" in found


@pytest.mark.parametrize(("high", "better"), [(-0.04, ""), (-0.06, "finetuned")])
def test_an_interval_that_is_written_as_ending_at_zero_decides_nothing(
    make_run: MakeRun, high: float, better: str
) -> None:
    path = make_run(gain=-0.8)
    paired = Difference("run", "recast", "finetuned", "clean", "digits", "top1", -0.8, -1.6, high, 360)
    write_differences(path / "differences.csv", [paired])
    assert lines(read_run(path))["Clean images, Top-1, %"].to_finetuned.better == better


def test_images_without_a_gradient_are_told_of_where_there_are_some(make_run: MakeRun) -> None:
    path = make_run()
    rows = [Row("run", arm, "fgsm", "digits", "no_gradient", 0.0, 360) for arm in ("parent", "recast")]
    write_rows(path / "rows.csv", rows)
    assert not any("gradient," in label for label in lines(read_run(path)))
    write_rows(path / "rows.csv", [replace(rows[1], value=12.5)])
    assert lines(read_run(path))["FGSM, one gradient step, Images without a gradient, %"].values["recast"] == "12.5"


def test_the_notes_and_the_verdict_name_the_interval(make_measured: MakeRun) -> None:
    run = read_run(make_measured(gain=1.2))
    assert "bootstrapped over the images" in notes(run)[0]
    assert "(95 % interval 0.5 to 1.9, over the images; one seed" in verdict(run).replace("\u00a0", " ")


# seeds


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (10, 2.228), (30, 2.042), (60, 2.000)])
def test_quantiles_of_t(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=1.5e-3)


def test_quantiles_of_t_follow_from_its_density() -> None:
    """P(T ≤ q) = 0.975 with the density of Student's t, integrated by Simpson's rule."""
    for degrees in (2, 5, 17, 30, 45):
        norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
        step = t_quantile(degrees) / 2000
        heights = [norm * (1 + (i * step) ** 2 / degrees) ** (-(degrees + 1) / 2) for i in range(2001)]
        area = step / 3 * sum(h * (1 if i in (0, 2000) else 4 if i % 2 else 2) for i, h in enumerate(heights))
        assert area == pytest.approx(0.475, abs=2e-4)


def test_a_mean_over_seeds() -> None:
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    assert mean_interval([1.0]) == (1.0, -math.inf, math.inf)


def test_the_same_recipe_from_another_place_is_the_same(make_run: MakeRun) -> None:
    paths = [make_run(f"s{seed}", seed=seed) for seed in range(3)]
    change(paths[0], model__checkpoint="parent/weights.safetensors", data__data_dir="/data/mine")
    change(paths[1], model__checkpoint="/elsewhere/weights.safetensors", data__data_dir="../mine", data__workers=4)
    change(paths[2], model__checkpoint="weights.safetensors", data__data_dir="mine", device="cuda", keep=9)
    runs = [read_run(path) for path in paths]
    assert seeds_apart(runs)
    mean = summary(runs)[1]
    assert mean is not None
    assert mean["to_finetuned"] == "+0.4"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"optim__lr": 3e-4}, "No mean is given: these runs differ in more than the seed (optim.lr)."),
        ({"model__checkpoint": "other.safetensors"}, "more than the seed (model.checkpoint)"),
        ({"seed": 0}, "some of these runs have the same seed, so a mean would count one result twice."),
        ({"seed": None}, "not every run has a seed"),
        ({"data__name": "cifar10"}, "these runs are of different data"),
    ],
    ids=["rate", "parent", "seed", "no seed", "data"],
)
def test_why_there_is_no_mean(make_run: MakeRun, fields: dict[str, object], reason: str) -> None:
    runs = [make_run("a", seed=0, rows=False), make_run("b", seed=1, rows=False)]
    change(runs[1], **fields)
    assert reason in why_no_mean([read_run(path) for path in runs])


def test_every_measure_over_the_seeds(make_measured: MakeRun) -> None:
    runs = [read_run(make_measured(f"s{seed}", gain=gain, seed=seed)) for seed, gain in enumerate((1.0, 1.2, 1.4))]
    found = {line.label: line for line in over_seeds(runs)}
    clean = found["Clean images, top1"]
    assert clean.values["finetuned"] == "75.1"
    assert clean.differences["finetuned"] == ("+1.2", "0.7 to 1.7", "recast")
    assert not any("gaussian_noise" in label for label in found)
    assert over_seeds(runs[:1]) == []


def test_runs_of_different_data_share_nothing(make_measured: MakeRun) -> None:
    paths = [make_measured(name, seed=seed) for seed, name in enumerate(("a", "b", "c"))]
    change(paths[2], data__name="cifar100")
    groups = read_groups([read_run(path) for path in paths])
    assert [(group.data, [run.name for run in group.runs]) for group in groups] == [
        ("digits", ["a", "b"]),
        ("cifar100", ["c"]),
    ]
    assert groups[0].anchors == ["run1", "run2"]
    assert groups[1].anchors == ["run3"]
    assert groups[0].mean is not None
    points = {row[0] for axis in groups[0].costs for chart in axis.charts for row in chart.data.rows}
    assert points == {"a", "b"}


# agreement


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (6, 0, 2 / 64), (1, 8, 2 * (1 + 9) / 512), (700, 600, 0.00599)],
)
def test_mcnemar(won: int, lost: int, p: float) -> None:
    assert mcnemar(won, lost) == pytest.approx(p, rel=1e-2)


def test_the_net_gain_has_an_interval() -> None:
    low, high = net_interval(60, 40, 1000)
    assert low == pytest.approx(0.0, abs=0.1)  # 2.0 ± 1.96 · √(100 − 0.4)/1000, in points
    assert high == pytest.approx(4.0, abs=0.1)
    low, high = net_interval(0, 0, 100)
    assert low < 0 < high


def test_won_and_lost(make_measured: MakeRun) -> None:
    path = make_measured()
    (path / "analysis" / "agreement.csv").write_text(
        "index,image,label,parent,recast\n0,a.png,cat,cat,cat\n1,b.png,cat,dog,cat\n2,c.png,dog,dog,cat\n"
        "3,d.png,dog,cat,cat\n4,,dog,owl,dog\n",
        encoding="utf-8",
    )
    (pair,) = agreement(read_run(path))
    assert pair.against == "parent"
    assert [(image.image, image.before, image.after) for image in pair.won] == [
        ("b.png", "dog", "cat"),
        ("4", "owl", "dog"),
    ]
    assert [image.image for image in pair.lost] == ["c.png"]
    assert (pair.both_right, pair.both_wrong, pair.same) == (1, 1, 2)
    assert "2 images won, 1 lost of 5, net +20.00 points" in pair.sentence.replace("\u00a0", " ")
    assert "p = 1.00" in pair.sentence


# heads, provenance


def test_heads_by_layer(make_measured: MakeRun) -> None:
    first, _ = head_lines(read_run(make_measured()))
    assert (first.layer, first.heads, first.stayed) == ("stage3.0.conv1", "9", "1 of 9 (1,1)")
    assert first.distance.endswith(")")
    assert "(1.00 to" in first.distance
    assert first.span == "1.02"


def test_how_it_was_made(make_measured: MakeRun) -> None:
    path = make_measured()
    found = json.loads((path / "evaluation.json").read_text(encoding="utf-8"))
    found["suites"]["pgd"]["command"] = found["suites"]["fgsm"]["command"] = "recast evaluate 'a b'"
    (path / "evaluation.json").write_text(json.dumps(found), encoding="utf-8")
    made = {line.command: line for line in made_lines(read_run(path))}
    both = made["recast evaluate 'a b'"]
    (entry,) = both.entries
    assert entry.suites == "FGSM, one gradient step; PGD, iterated in an L∞ ball"
    assert entry.data == "digits, 5,000 images"
    assert entry.options == "eps 0.5 1 2 4, steps 5, random start no"
    assert both.when == "2026-11-21, 32\u00a0s"  # one pass for both
    assert both.versions == "recast 0.1.0, torch 2.15.0, timm 1.0.31"
    assert both.where == "cuda, Linux-x86_64, 16 CPUs"


def test_what_is_missing_names_its_command(make_run: MakeRun, make_measured: MakeRun) -> None:
    run = read_run(make_run(rows=True))
    absent, command = missing(run)
    assert command == f"recast evaluate {run.path} --suite resolution,knn,frequency,fourier,heads,cka,agreement"
    assert len(absent) == 7
    assert missing(read_run(make_measured("all"))) == ([], "")


def test_a_difference_without_a_finite_interval_is_a_plain_one(make_run: MakeRun) -> None:
    path = make_run(gain=0.4)
    nothing = Difference("run", "recast", "finetuned", "clean", "digits", "top1", 0.4, math.nan, math.nan, 360)
    write_differences(path / "differences.csv", [nothing])
    line = lines(read_run(path))["Clean images, Top-1, %"]
    assert (line.to_finetuned.interval, line.to_finetuned.better) == ("", "recast")
    assert line.bar is not None
    assert not line.bar.paired
