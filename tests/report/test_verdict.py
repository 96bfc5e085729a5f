"""The sentence at the top says what was measured, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changed_runs import rewrite, set_values

from recast.lab.cli import evaluate
from recast.lab.cli.evaluate import compared_with
from recast.lab.records import ARMS
from recast.lab.report.arms_table import arms_table
from recast.lab.report.costs import cost_charts
from recast.lab.report.curves import attacks, corruptions, relative
from recast.lab.report.labels import FROM_START, PARENT, glossary, words
from recast.lab.report.load import read_run
from recast.lab.report.summary import tiles, won_and_lost
from recast.lab.report.verdict import joint_verdict, verdict
from recast.lab.suites import METRICS

MakeRun = Callable[..., Path]
OWN = {"model.checkpoint": None}
"""A network that is recast while it learns: its weights are its own."""


def said(*paths: Path) -> str:
    runs = [read_run(path) for path in paths]
    found = verdict(runs[0]) if len(runs) == 1 else joint_verdict(runs)
    return " ".join(part for part in found if part).replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("recast", "expected"),
    [
        (96.8 + 5 / 3.6, "ends 1.4 points above the parent fine-tuned the same way. After 3 epochs it reaches 98.2 %"),
        (96.0, "it reaches 96.0 %, against 96.8 %: −0.8 points (3 of 360 images; one seed: a first look"),
        (96.8, "level with the parent fine-tuned the same way. After 3 epochs it reaches 96.8 %, against 96.8 %: 0.0"),
        (96.84, "ends 0.04 points above the parent"),
    ],
)
def test_better_or_not(make_run: MakeRun, recast: float, expected: str) -> None:
    assert expected in said(make_run(top1={"parent": 95.6, "finetuned": 96.8, "recast": recast}))


def test_the_interval_is_named(make_run: MakeRun) -> None:
    path = make_run()
    assert said(path).startswith("The recast network ends 24.0 points below the parent fine-tuned the same way. ")
    assert "−24.0 points (95 % interval −36.0 to −12.0, over the images; one seed" in said(path)
    set_values(path, "clean", "top1", {"parent": 58.0, "finetuned": 56.0, "recast": 57.0}, half=2)
    assert said(path).startswith("The recast network is not shown to differ from the parent fine-tuned the same way. ")
    assert "+1.0 points (95 % interval −0.2 to 2.2, over the images; one seed" in said(path)


@pytest.mark.parametrize(
    ("top1", "half", "headline", "card"),
    [
        ((92.0, 85.7, 86.2), 2, "92.0 % fell to 86.2 %, and to 85.7 % without", "5.8 points less than"),
        ((92.0, 88.5, 86.2), 0.5, "worse than the parent as it was: 92.0 % fell to 86.2 %.", "5.8 points less than"),
        ((92.0, 85.7, 86.2), 0, "92.0 % fell to 86.2 %, and to 85.7 % without", "5.8 points less than"),
        ((92.0, 91.5, 90.6), 2, "worse than the parent as it was: 92.0 % fell to 90.6 %.", "1.4 points less"),
        ((92.0, 85.7, 91.8), 2, "6.1 points above the parent fine-tuned the same way, which training", "6.1"),
        ((92.0, 91.5, 91.6), 2, "not shown to differ from the parent fine-tuned the same way.", "0.1 points more"),
        ((92.0, 92.5, 86.0), 2, "ends 6.5 points below the parent fine-tuned the same way.", "6.0 points less than"),
    ],
)  # fmt: skip
def test_harm_is_the_headline(
    make_run: MakeRun, top1: tuple[float, ...], half: float, headline: str, card: str
) -> None:
    path = make_run(top1=dict.fromkeys(ARMS, 0.0))
    set_values(path, "clean", "top1", dict(zip(ARMS, top1, strict=True)), half=half)
    run = read_run(path)
    assert headline in verdict(run).headline.replace("\u00a0", " ")
    cards = {tile["label"]: tile["detail"] for tile in tiles(run)}
    assert card in cards["Top-1 at the end"]
    worse = top1[2] < 91
    assert ("−4.6). Try" in verdict(run).numbers) == (half == 2 and top1[:2] == (92.0, 85.7) and worse)
    assert ("--lr (here 0.001)" in verdict(run).numbers) == (top1[1] < 91 or worse)
    assert not (worse and any(label.startswith("Largest gain") for label in cards))


def test_harm_over_several_runs(make_run: MakeRun) -> None:
    tops = [{"parent": 92.0, "finetuned": 85.7 + gap, "recast": 86.2 - gap} for gap in (0.0, 0.5, 0.2)]
    paths = [make_run(f"s{seed}", top1=top1, recipe={"seed": seed}) for seed, top1 in enumerate(tops)]
    assert said(*paths).startswith("Over 3 seeds training made the recast network worse than the parent as it was.")
    assert "−6.0 (−6.7 to −5.4) against the parent as it was" in said(*paths)
    other = make_run("other", top1=tops[0], recipe={"optim.lr": 0.5})
    assert said(paths[0], other).startswith("In 2 of 2 runs training made the recast network worse than the parent")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_relative_error": 3.2e-7}, "the parent’s exact predictions (50 of 50, max relative error 3e−7)"),
        ({"max_relative_error": 2e-3}, "(50 of 50), though not with its exact outputs (max relative error 0.002)"),
        ({"max_relative_error": float("nan")}, "though not with its exact outputs (max relative error not finite)"),
        ({"argmax_agreement": 0.98}, "does not start as its parent: 49 of 50 predictions agree"),
    ],
)
def test_how_it_starts(make_run: MakeRun, changes: dict[str, Any], expected: str) -> None:
    path = make_run()
    rewrite(path / "verify.json", bitwise=False, **changes)
    assert expected in said(path)


@pytest.mark.parametrize(
    ("recast", "caution"),
    [(90.0, "30.0 points above its parent; more training"), (50.0, "no fair comparison")],
)
def test_without_control(make_run: MakeRun, recast: float, caution: str) -> None:
    path = make_run(without=("finetuned", "differences.csv", "rows.csv"))
    (path / "rows.csv").write_text(
        "run,model,suite,dataset,metric,value,n,low,high\n"
        f"r,parent,clean,d,top1,60,50,,\nr,recast,clean,d,top1,{recast},50,,\n",
        encoding="utf-8",
    )
    assert said(path).startswith("Nothing to compare with: no parent was fine-tuned the same way. After 3 epochs it")
    assert caution in said(path)


@pytest.mark.parametrize(("low", "compared"), [(9.0, False), (11.0, True)], ids=["a guess", "better"])
def test_a_parent_that_never_learnt_the_classes_is_not_compared_with(
    make_run: MakeRun, low: float, compared: bool
) -> None:
    path = make_run(without=("finetuned", "differences.csv", "rows.csv"))
    (path / "rows.csv").write_text(
        "run,model,suite,dataset,metric,value,n,low,high\n"
        f"r,parent,clean,d,top1,{low + 3},50,{low},30\nr,recast,clean,d,top1,60,50,,\n",
        encoding="utf-8",
    )
    run = read_run(path)
    assert ("above its parent" in said(path)) == compared
    assert words(run).others == (("parent", "finetuned") if compared else ("finetuned",))
    assert ("12.0\u00a0%, is not shown to be above a guess, 10.0\u00a0%" in words(run).comparison) != compared
    assert any("more than the parent" in tile["detail"] for tile in tiles(run)) == compared


def test_a_parent_with_a_new_classifier_is_not_compared_with(make_run: MakeRun) -> None:
    """Its weights are in the run folder alone."""
    path = make_run(recipe={"model.checkpoint": "parent.safetensors"})
    run = read_run(path)
    assert "its classifier was new" in words(run).comparison
    assert {row[1] for chart in relative(run) for row in chart.rows} == {"finetuned"}
    assert [pair["arm"] for pair in won_and_lost(run)] == ["finetuned"]
    assert [cell.text for cell in arms_table(run).heads][4:] == ["Recast\n−\nfine-tuned", "Images"]
    found = [*attacks(run), *corruptions(run), *(one for charts in cost_charts([run]).values() for one in charts)]
    assert {cell for chart in found for row in chart.rows for cell in row} >= {"finetuned", "recast"}
    assert not any("parent" in row for chart in found for row in chart.rows)
    assert compared_with(path, run.rows) == ("finetuned",)
    assert METRICS["no_gradient"].label not in glossary([run])  # 0 everywhere: no line of the tables is about it
    assert "− parent" not in evaluate.arms_table(run.rows, run.differences, ("finetuned",))


def test_what_is_not_known_is_not_said(make_run: MakeRun) -> None:
    untrained = said(make_run("a", epochs=0, without=("rows.csv", "verify.json")))
    assert untrained == (
        "The recast network has not been trained. As it stands it reaches 58.0 %. "
        "How the recast model started was not measured (no verify.json)."
    )
    assert "After 2 of 3 epochs" in said(make_run("b", epochs=2, without=("rows.csv",)))


def test_seeds_give_a_mean_and_other_recipes_none(make_run: MakeRun) -> None:
    tops = [{"parent": 95.6, "finetuned": 96.8, "recast": 96.8 + gain} for gain in (0.4, 0.8, -0.3)]
    paths = [make_run(f"s{seed}", top1=top1, recipe={"seed": seed}) for seed, top1 in enumerate(tops)]
    assert said(*paths) == (
        "Over 3 seeds the recast network is not shown to differ from the parent fine-tuned the same way. In the mean "
        "+0.3 points (95 % interval over the seeds −1.1 to 1.7). All 3 recast models start with their parent’s exact "
        "predictions."
    )
    other = make_run("other", top1=tops[2], recipe={"seed": 9, "optim.lr": 0.5})
    rewrite(other / "verify.json", argmax_agreement=0.5)
    words_of_two = said(paths[0], other)
    assert words_of_two == (
        "The recast network is shown to end above a parent fine-tuned the same way in none of 2 runs. It is shown to "
        "end below in 0; in 2 no difference is shown. Intervals are missing of 2 (recast evaluate). "
        "1 of 2 recast models start with their parent’s exact predictions."
    )


@pytest.mark.parametrize(
    ("changes", "epochs", "expected"),
    [
        ({}, None, "4 layers became attention from epoch 1 to epoch 3."),
        ({"switches": [0]}, 2, "1 of 4 layers became attention at the start of epoch 1."),
        ({"switches": [1]}, 2, "2 of 4 layers became attention together at the start of epoch 2."),
        ({"switches": [0, 2]}, 2, "2 of 4 layers became attention, one after the other, from epoch 1 to epoch 3."),
        ({"switches": []}, 1, "None of the 4 layers has become attention yet."),
        ({"switches": []}, 3, "None of the 4 layers has become attention."),
        ({"switches": []}, 0, "None of the 4 layers has become attention yet."),
    ],
)
def test_when_layers_became_attention(
    make_run: MakeRun, changes: dict[str, list[int]], epochs: int | None, expected: str
) -> None:
    path = make_run(source="during", epochs=epochs, recipe=OWN)
    switches = json.loads((path / "schedule.json").read_text(encoding="utf-8"))["switches"]
    rewrite(path / "schedule.json", switches=[switches[place] for place in changes.get("switches", range(3))])
    assert said(path).endswith(expected)


def test_a_network_that_learns_from_the_start_has_other_words(make_run: MakeRun) -> None:
    path = make_run(source="during", recipe=OWN)
    assert words(read_run(path)) is FROM_START
    assert "points below the same network trained the same way as a convolution" in said(path)
    for name, changes in (("weights", {}), ("pretrained", OWN | {"model.pretrained": True})):
        assert words(read_run(make_run(name, "during", recipe=changes))) is PARENT
    lonely = make_run("lonely", "during", recipe=OWN, without=("finetuned", "rows.csv"))
    assert "Nothing to compare with: the network was not trained as a convolution beside it." in said(lonely)
    lost = make_run("lost", "during", without=("schedule.json",))
    assert said(lost).endswith("When layers became attention was not written down (no schedule.json).")


def test_several_runs_of_several_kinds(make_run: MakeRun, make_plain: MakeRun) -> None:
    before, during, plain = make_run("a"), make_run("b", "during"), make_plain()
    assert said(plain) == "Nothing was recast. The network alone, trained for 3 epochs, reaches 58.0 %."
    assert said(plain, before).startswith("The recast network ends 24.0 points below")
    assert "1 of 2 runs recast nothing; of the other: After 3 epochs it reaches" in said(plain, before)
    assert said(plain, plain) == "None of these 2 runs recast anything."
    both = said(before, during)
    assert both.endswith("became attention during training; the other starts with its parent’s exact predictions.")
    assert said(during, during).endswith(
        "in 0 no difference is shown. Both recast models became attention during training."
    )
