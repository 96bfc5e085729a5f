from pathlib import Path
from typing import Any

import pytest
from on_reports import rewrite, series_of, set_images, set_values

from recast.lab.cli import evaluate
from recast.lab.cli.evaluate import compared_with
from recast.lab.evaluation.suites import METRICS
from recast.lab.folder.records import ARMS
from recast.lab.report import write_report
from recast.lab.report.costs import cost_charts
from recast.lab.report.curves import attacks, relative
from recast.lab.report.labels import PARENT, glossary, words
from recast.lab.report.load import read_run
from recast.lab.report.page import tiles
from recast.lab.report.tables import arms_table, runs_table
from recast.lab.report.verdict import harmed, is_exact, joint_verdict, kept_predictions, verdict, why_no_mean

pytestmark = pytest.mark.usefixtures("charts_drawn_once")

HEADER = "run,model,suite,dataset,metric,value,n,low,high\n"


def headline_of(*paths: Path) -> str:
    return sentences(*paths).partition(".\n")[0]


def sentences(*paths: Path) -> str:
    runs = [read_run(path) for path in paths]
    return "\n".join(verdict(runs[0]) if len(runs) == 1 else joint_verdict(runs)).replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("recast", "numbers"), [(96.8 + 5 / 3.6, ("1.4", "98.2 %", "96.8 %")), (96.0, ("0.8", "−0.8")), (96.8, ("96.8 %",))]
)
def test_better_or_not(make_run: Any, recast: float, numbers: tuple[str, ...]) -> None:
    text = sentences(make_run(top1={"parent": 95.6, "finetuned": 96.8, "recast": recast}))
    assert all(number in text for number in numbers)


@pytest.mark.parametrize(
    ("top1", "numbers", "is_worse"),
    [
        ((58.0, 56.0, 57.0), ("−0.2 to 2.2",), False),
        ((92.0, 85.7, 86.2), ("92.0 % fell to 86.2 %", "--lr (here 0.001)"), True),
        ((92.0, 85.7, 91.8), ("6.1 points above",), False),
        ((92.0, 92.5, 86.0), ("92.0 % fell to 86.0 %",), True),
    ],
)
def test_harm_is_the_headline(make_run: Any, top1: Any, numbers: Any, is_worse: bool) -> None:
    path = make_run(top1=dict.fromkeys(ARMS, 0.0))
    set_values(path, "clean", "top1", dict(zip(ARMS, top1, strict=True)), half=2)
    assert all(number in sentences(path) for number in numbers)
    assert harmed(read_run(path)) == is_worse
    assert headline_of(path, path).startswith("In 2 of 2 runs") == is_worse


@pytest.mark.parametrize(
    ("changes", "exact", "same"),
    [
        ({"max_relative_error": 3.2e-7}, True, 50),
        ({"max_relative_error": 2e-3}, False, 50),
        ({"max_relative_error": float("nan")}, False, 50),
        ({"argmax_agreement": 0.98}, False, 49),
    ],
)
def test_how_it_starts(make_run: Any, changes: dict[str, Any], exact: bool, same: int) -> None:
    path = make_run()
    rewrite(path / "verify.json", bitwise=False, **changes)
    run = read_run(path)
    assert (is_exact(run), kept_predictions(run)) == (exact, (same, 50))
    assert f"{same} of 50" in sentences(path)


@pytest.mark.parametrize(("top1", "compared"), [(22.0, False), (24.0, True)], ids=["a guess", "better"])
def test_a_parent_that_guesses_is_not_compared_with(make_run: Any, top1: float, compared: bool) -> None:
    path = make_run(without=("finetuned", "differences.csv", "rows.csv"))
    rows = f"r,parent,clean,d,top1,{top1},50,{top1 - 11},40\nr,recast,clean,d,top1,60,50,,\n"
    (path / "rows.csv").write_text(HEADER + rows, encoding="utf-8")
    run = read_run(path)
    assert words(run).others == (("parent", "finetuned") if compared else ("finetuned",))
    assert ("22.0\u00a0%" in words(run).comparison) != compared
    assert any("against the parent" in detail for *_, detail in tiles(run)) == compared


def test_a_parent_with_a_new_classifier_is_not_compared_with(make_run: Any) -> None:
    path = make_run(recipe={"model.checkpoint": "parent.safetensors"})
    run = read_run(path)
    assert "classifier" in words(run).comparison
    assert series_of(*relative(run)) == {"Recast against parent, fine-tuned"}
    assert [cell.text for cell in arms_table(run).heads][4:] == ["Recast −\nfine-tuned", "Images"]
    charts = [*attacks(run), *(chart for charts in cost_charts([run]).values() for chart in charts)]
    assert series_of(*charts) == {"Parent, fine-tuned", "Recast"}
    assert compared_with(path, run.rows) == ("finetuned",)
    assert METRICS["no_gradient"].label not in glossary([run])  # 0 everywhere: no line of the tables is about it
    assert "− parent" not in evaluate.format_arms(run.rows, run.differences, ("finetuned",))


def test_runs_that_lack_something(make_run: Any, make_plain: Any) -> None:
    untrained = sentences(make_run("a", epochs=0, without=("rows.csv", "verify.json")))
    assert all(part in untrained for part in ("58.0 %", "verify.json"))
    assert "2 of 3 epochs" in sentences(make_run("b", epochs=2, without=("rows.csv",)))
    alone = make_run("c", recipe={"control": False}, without=("finetuned", "differences.csv", "rows.csv"))
    (alone / "rows.csv").write_text(HEADER + "r,recast,clean,d,top1,90,50,,\n", encoding="utf-8")
    assert PARENT.control in headline_of(alone)
    assert PARENT.control in headline_of(alone, alone)
    assert "schedule.json" in sentences(make_run("lost", "during", without=("schedule.json",)))
    before, during, plain = make_run("d"), make_run("e", "during"), make_plain()
    assert "58.0 %" in sentences(plain)
    assert headline_of(plain, before) == headline_of(before)
    assert headline_of(plain, plain) == headline_of(plain)
    assert "1 of 1" in sentences(before, during)


@pytest.mark.parametrize(
    ("epochs", "control", "progress"),
    [
        (2, 0, "2 of 3 epochs"),
        (3, 0, "0 of 3 epochs of the control arm"),
        pytest.param(3, 1, "1 of 3 epochs of the control arm", marks=pytest.mark.slow),
        (3, 3, ""),
    ],
)
def test_an_interrupted_run_is_continued_before_it_is_compared(
    make_run: Any, epochs: int, control: int, progress: str
) -> None:
    without = ("rows.csv", "differences.csv", *["finetuned"] * (control == 0))
    path = make_run(epochs=epochs, control=control, without=without)
    run = read_run(path)
    assert run.unfinished == progress
    assert progress in headline_of(path)
    assert (PARENT.control in headline_of(path)) == (not progress)
    assert any(PARENT.control in detail for *_, detail in tiles(run)) == (not progress)
    assert any(label.endswith("at the end") for label, *_ in tiles(run)) == (epochs == 3)
    page = write_report([path]).read_text(encoding="utf-8")
    assert (f"<code>recast train --resume {path}</code>" in page) == bool(progress)
    done = make_run("done")
    assert ("2 of 3 epochs" in runs_table([run]).groups[""][0][0].small[1]) == (epochs == 2)
    assert headline_of(path, done).endswith("1 of 2 runs") == bool(progress)
    assert ("finished" in why_no_mean([run, run])) == bool(progress)


def test_seeds_give_a_mean_and_other_recipes_none(make_run: Any) -> None:
    paths = [make_run(f"s{seed}", top1={}, recipe={"seed": seed}) for seed in range(3)]
    for path, gain in zip(paths, (1, 3, -1), strict=True):
        set_images(path, {"parent": 344, "finetuned": 348, "recast": 348 + gain})
    assert all(part in sentences(*paths) for part in ("3 seeds", "+0.3 points", "−1.3 to 1.8", "not shown", "3 of 3"))
    for path, gain in zip(paths, (14, 11, 12), strict=True):
        set_images(path, {"parent": 324, "finetuned": 324, "recast": 324 + gain})
    assert all(part in sentences(*paths) for part in ("3.4 points above", "over seeds and images 1.7 to 6.0"))
    set_values(paths[0], "clean", "top1", {"parent": 90, "finetuned": 90, "recast": 93})  # measured again
    assert all(part in sentences(*paths) for part in ("not shown", "+3.1 points", "s0 lacks", "recast evaluate"))
    apart = make_run("other", top1={"parent": 90, "finetuned": 90, "recast": 89}, recipe={"seed": 9, "optim.lr": 0.5})
    rewrite(apart / "verify.json", argmax_agreement=0.5)
    assert all(part in sentences(paths[0], apart) for part in ("0 of 2", "1 of 2"))
