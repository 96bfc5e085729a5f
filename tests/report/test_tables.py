import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_reports import rows_where, series_of, set_values
from sklearn.metrics import confusion_matrix

from recast.lab.cli import evaluate
from recast.lab.cli.evaluate import _suites_of
from recast.lab.evaluation.image_values import ImageValues, write_images
from recast.lab.folder.records import Difference, Row, write_records
from recast.lab.pages import formats
from recast.lab.pages.charts import styled
from recast.lab.report.heat_maps import confusion, confusion_charts
from recast.lab.report.load import Run, read_run
from recast.lab.report.page import joint_part, render_page, run_part
from recast.lab.report.switches import switch_part
from recast.lab.report.tables import ARM_TABLES, Cell, arms_table, seeds_table, steps_table
from recast.lab.report.verdict import why_no_mean

TOP1 = {"parent": 95.6, "finetuned": 96.8, "recast": 96.0}


def lines(run: Run) -> dict[str, list[Cell]]:
    """`suite, metric` → label, parent, finetuned, recast, to parent, to finetuned, images."""
    return {
        f"{title.partition(':')[0]}, {row[0].text}".replace("\u00a0", " "): row
        for table in (arms_table(run, which) for which in ARM_TABLES)
        for title, rows in table.groups.items()
        for row in rows
    }


def seed_rows(paths: list[Path]) -> dict[str, list[Cell]]:
    table = seeds_table([read_run(path) for path in paths])
    return {row[0].text.replace("\u00a0", " "): row for row in table.groups[""]} if table else {}


def test_differences_of_every_suite(make_run: Any) -> None:
    path = make_run(top1=TOP1)
    (path / "differences.csv").unlink()
    write_records(path / "differences.csv", Difference, [])
    set_values(path, "clean", "loss", {"parent": 1.0, "finetuned": 0.9, "recast": 1.1})
    table = lines(read_run(path))
    top1 = table["Clean images, Top-1, %"]
    assert [cell.text for cell in top1[1:]] == ["95.6", "96.8", "96.0", "+0.4", "−0.8", "360"]
    assert [cell.kind for cell in top1[4:6]] == ["by-recast", "by-finetuned"]
    assert top1[4].bar is top1[5].bar is None  # without a paired interval
    loss = table["Clean images, Loss"][5]
    assert (loss.text[0], loss.kind, loss.bar) == ("+", "by-finetuned", None)  # a higher loss is worse
    cost = table["Cost, Parameters"][4]
    assert (cost.text, cost.kind) == ("+25.9\u00a0%", "by-parent")
    assert "Corrupted images, five kinds, Top-1, %, mean of all" in table


def test_intervals_decide_who_is_better(make_measured: Any) -> None:
    table = lines(read_run(make_measured(gain=1.2)))
    top1 = table["Clean images, Top-1, %"]
    assert (top1[3].text, top1[3].small) == ("76.30", ("75.10 to 77.50",))
    assert (top1[5].text, top1[5].small, top1[5].kind) == ("+1.20", ("0.48 to 1.92",), "by-recast")
    bar: Any = top1[5].bar
    assert (bar.value, bar.low, bar.high) == pytest.approx((1.2, 0.48, 1.92))
    assert table["ImageNet-C, mCE, %"][5].kind == "by-recast"  # lower
    assert table["Cost, Peak memory"][1].text == "2.9\u00a0GiB"
    assert {
        "Other test sets, ImageNet-V2",
        "PGD, iterated in an L∞ ball, Top-1, %, ε = 4/255",
        "Test resolution, Top-1, %, 160x192",
        "Nearest neighbours of the features, Top-1, %, k = 5",
    } <= set(table)
    top1 = lines(read_run(make_measured("open", gain=0.5)))["Clean images, Top-1, %"]
    assert [cell.kind for cell in top1[4:6]] == ["by-recast", "by-"]


@pytest.mark.parametrize(
    ("high", "expected"),
    [(-0.04, ("−1.6 to 0.0", "by-")), (-0.06, ("−1.6 to −0.1", "by-finetuned")), (math.nan, (None, "by-finetuned"))],
)
def test_an_interval_that_is_written_as_ending_at_zero_decides_nothing(
    make_run: Any, high: float, expected: tuple[str | None, str]
) -> None:
    path = make_run(top1=TOP1)
    paired = Difference("run", "recast", "finetuned", "clean", "digits", "top1", -0.8, -1.6, high, 360)
    write_records(path / "differences.csv", Difference, [paired])
    cell = lines(read_run(path))["Clean images, Top-1, %"][5]
    assert (cell.small[0] if cell.small else None, cell.kind) == expected


def test_no_mean_is_decided_by_one_either(make_run: Any) -> None:
    tops = [{"parent": 70.0, "finetuned": 75.0, "recast": 75.0 + gain} for gain in (0.3706, 0.6, 0.8294)]
    paths = [make_run(f"s{seed}", top1=top1, recipe={"seed": seed}) for seed, top1 in enumerate(tops)]
    for path, top1 in zip(paths, tops, strict=True):
        values = {("clean", "top1", arm): ImageValues(np.full(360, value), False) for arm, value in top1.items()}
        write_images(path / "scores" / "images.npz", values, {"clean"})
    cell = seed_rows(paths)["Clean images: Top-1, %"][-1]
    assert (cell.text, cell.small, cell.kind) == ("+0.6", ("0.0 to 1.2",), "")


def test_what_is_unknown_and_what_is_masked(make_run: Any) -> None:
    path = make_run()
    assert not any("gradient," in label for label in lines(read_run(path)))
    with (path / "rows.csv").open("a", encoding="utf-8") as file:
        file.write("r,recast,imagenet_x,digits,top1,nan,50,,\nr,parent,imagenet_x,digits,top1,31.5,50,,\n")
        file.write("r,recast,pgd,digits,no_gradient,12.5,50,,\n")
    table = lines(read_run(path))
    assert [cell.text for cell in table["imagenet_x, Top-1, %"][1:6]] == ["31.5", "–", "–", "–", "–"]
    assert table["PGD, iterated in an L∞ ball, Images without a gradient, %"][3].text == "12.5"


def test_steps(make_run: Any) -> None:
    steps: Any = steps_table(read_run(make_run()))
    first = steps.groups[""][0]
    assert [cell.text for cell in first[:4]] == ["layer3.0.conv1", "9", "16 × 100", "18.4\u00a0k → 21.2\u00a0k"]
    assert (first[0].small[0], steps.foot[3].small[0]) == ("3×3, 32×8×8 → 64×4×4", "+26\u00a0%")


def test_when_layers_became_attention(make_run: Any) -> None:
    part = switch_part(read_run(make_run(source="during")))
    assert all(f">{word}</text>" in part["chart"].svg for word in ("layer3.1.conv2", "epoch 3"))


def test_the_same_recipe_carried_out_otherwise_is_the_same(make_run: Any) -> None:
    own = {"data.name": "folder"}
    recipes = [
        {"seed": 0, "model.checkpoint": "parent/weights.safetensors", "data.data_dir": "/data/mine", "control": False},
        {"seed": 1, "model.checkpoint": "/elsewhere/weights.safetensors", "data.data_dir": "../mine", "save_steps": 9},
        {"seed": 2, "model.checkpoint": "weights.safetensors", "data.data_dir": "mine", "data.workers": 4},
    ]
    rows = seed_rows([make_run(f"s{place}", recipe=changes | own) for place, changes in enumerate(recipes)])
    assert [cell.text for cell in rows["Clean images: Top-1, %"][1:]] == ["58.0", "56.0", "32.0", "−26.0", "−24.0"]
    assert not any("contrast" in label for label in rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"optim.lr": 3e-4}, "(optim.lr)"),
        ({"model.checkpoint": "other.safetensors"}, "(model.checkpoint)"),
        ({"seed": 0}, "same seed"),
    ],
)
def test_why_there_is_no_mean(make_run: Any, changes: dict[str, object], reason: str) -> None:
    paths = [make_run("a"), make_run("b", recipe={"seed": 1} | changes)]
    assert reason in why_no_mean([read_run(path) for path in paths])
    assert not seed_rows(paths)


def test_runs_together(make_run: Any) -> None:
    part = joint_part([read_run(make_run(f"r{seed}", recipe={"seed": seed})) for seed in (0, 1)])
    assert [row[0].link for row in part["table"].groups[""]] == ["#run1", "#run2"]
    assert part["table"].foot[1].text == "58.0"
    assert series_of(part["costs"]["macs"][0]) >= {"r0, Parent", "r1, Recast"}


def test_confusion_matrix(make_run: Any) -> None:
    run = read_run(make_run())
    table = np.random.default_rng(0).integers(len(run.classes), size=(40, 3))
    columns = ("label", "finetuned", "recast")
    run = replace(
        run, agreement=[{name: run.classes[k] for name, k in zip(columns, row, strict=True)} for row in table]
    )
    for column, arm in ((1, "finetuned"), (2, "recast")):
        assert (confusion(run, arm) == confusion_matrix(table[:, 0], table[:, column])).all()
    first, second = confusion_charts(run)
    assert first.panel.keywords["counts"].sum() == 40
    assert "<svg" in second.svg
    assert not confusion_charts(replace(run, classes=tuple(map(str, range(51)))))


def test_long_class_names_keep_their_beginning_inside_the_picture(make_run: Any) -> None:
    run = read_run(make_run())
    names = [f"{start} WWWWWWWWWWWW, a name too long {end}" for start in ("Abyssinian", "Egyptian") for end in "xy"]
    images = [{"index": str(n), "image": f"{n}.png", "label": name, "recast": name} for n, name in enumerate(names)]
    run = replace(run, classes=tuple(names), agreement=images)
    (chart,) = confusion_charts(run)
    with styled("salt"):
        figure = chart.draw()
        figure.draw_without_rendering()
        axes, *_ = figure.axes
        labels = [label.get_text() for label in axes.get_xticklabels()]
        texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
        boxes = [text.get_window_extent() for text in texts]
    assert len(set(labels)) == len(names)
    assert all(label[:8] == name[:8] for label, name in zip(labels, names, strict=True))
    assert min(min(box.x0, box.y0) for box in boxes) >= 0
    assert axes.get_position().width > 0.3


def test_numbers() -> None:
    assert [formats.decimal(-0.04), formats.signed(0.04), formats.share(3.0, 0.0)] == ["0.0", "0.0", ""]
    assert [formats.significant(value) for value in (-0.000138, 9.13e-6)] == ["−0.00014", "9.1e−6"]
    assert [formats.compact(value) for value in (999_960, 9_996, 512)] == ["1.00\u00a0M", "10.0\u00a0k", "512"]
    assert [formats.three_digits(value) for value in (9.123, 502.4, 1070.0)] == ["9.12", "502", "1,070"]
    assert [formats.error(value) for value in (0.0, 3.4e-7, math.inf)] == ["0", "3e−7", "not finite"]
    assert formats.percent(math.nan) == "–"


def test_classes_have_a_table_of_their_own(make_run: Any) -> None:
    path = make_run(recipe={"data.name": "scene_objects"})
    (path / "rows.csv").unlink()
    metrics = ("ap", "ap@local", "ap/disc", "ap/red/blue ring", "mask_ap", "mask_ap/disc")
    both = [(name, arm) for name in metrics for arm in ("finetuned", "recast")]
    rows = [Row("r", arm, "detection", "s", name, 5.0, 9, 3.0, 8.0) for name, arm in both]
    write_records(path / "rows.csv", Row, rows)
    run = read_run(path)
    (first,) = arms_table(run).groups.values()
    labels = ["Box AP,\u00a0%", "Box AP,\u00a0%, local\u00a0classes", "Mask AP,\u00a0%"]
    assert [row[0].text for row in first] == labels
    (classes,) = arms_table(run, "classes").groups.values()
    assert [row[0].text.rpartition("\u00a0%, ")[2] for row in classes] == ["disc", "red/blue ring", "disc"]
    text = evaluate.format_arms(run.rows)
    assert "detection ap@local" in text
    assert not any(name in text for name in ("disc", "ring"))
    part = run_part(run, "run1", 1)
    assert 'id="run1-classes"' in render_page([part], None)
    assert tuple(rows_where(part["costs"]["macs"][0])[0][key] for key in ("value", "low", "high")) == (5.0, 3.0, 8.0)
    assert _suites_of(path)[0] == "detection"
    assert "fourier" not in _suites_of(path), "only where it is asked for"
