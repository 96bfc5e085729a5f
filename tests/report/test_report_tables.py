"""Differences, and who is called better."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recast.report.read.run import read_run
from recast.report.tables.arms import Line, three_arms
from recast.report.tables.heat import heat_tables
from recast.report.tables.plan import left_by_reason, plan_lines, totals
from recast.report.tables.summary import summary
from recast.report.text import formats

MakeRun = Callable[..., Path]


def lines(path: Path) -> dict[tuple[str, str], Line]:
    return {
        (group.title.partition(":")[0], line.label.replace("\u00a0", " ")): line
        for group in three_arms(read_run(path))
        for line in group.lines
    }


def test_differences_of_every_suite(make_run: MakeRun) -> None:
    found = lines(make_run(gain=-0.8))
    top1 = found["Clean images", "Top-1, %"]
    assert top1.values == {"parent": "95.6", "finetuned": "96.8", "recast": "96.0"}
    assert (top1.to_parent.text, top1.to_parent.better) == ("+0.4", "recast")
    assert (top1.to_finetuned.text, top1.to_finetuned.better) == ("−0.8", "finetuned")
    assert top1.n == "360"
    assert top1.bar is not None
    assert top1.bar.left + top1.bar.width == pytest.approx(50, abs=0.02)  # to the left of 0
    loss = found["Clean images", "Loss"]
    assert loss.to_finetuned.text.startswith("+")
    assert loss.to_finetuned.better == "finetuned"  # a higher loss is worse
    assert loss.bar is None
    cost = found["Cost", "Parameters"]
    assert (cost.to_parent.text, cost.to_parent.better) == ("+14.1\u00a0%", "parent")
    assert found["Cost", "Images per second"].to_finetuned.better == "finetuned"
    assert found["PGD, iterated in an L∞ ball", "ε = 4/255"].values["recast"] == "20.0"
    assert ("Corruptions (basic)", "mean of all") in found


def test_adversarial_rows_stand_in_order_of_strength(make_run: MakeRun) -> None:
    fgsm = next(group for group in three_arms(read_run(make_run())) if group.title.startswith("FGSM"))
    assert [line.label.replace("\u00a0", " ") for line in fgsm.lines] == [
        f"ε = {e}/255" for e in ("0.5", "1", "2", "4")
    ]


def test_an_unknown_suite_and_a_nan_are_shown(make_run: MakeRun) -> None:
    path = make_run()
    with (path / "rows.csv").open("a", encoding="utf-8") as file:
        file.write("run,recast,imagenet_x,digits,top1,nan,50,,\nrun,parent,imagenet_x,digits,top1,31.5,50,,\n")
    line = lines(path)["imagenet_x", "Top-1, %"]
    assert line.values == {"parent": "31.5", "finetuned": "–", "recast": "–"}
    assert line.to_parent.text == "–"
    assert line.bar is None


def test_a_comparison_with_the_parent_alone(make_run: MakeRun) -> None:
    top1 = lines(make_run(control=False))["Clean images", "Top-1, %"]
    assert top1.to_finetuned.text == "–"
    assert top1.bar is not None
    assert top1.bar.against == "parent"


def test_heat_table(make_run: MakeRun) -> None:
    run = read_run(make_run())
    (table,) = heat_tables(run)
    assert table.against == "finetuned"
    assert table.severities == [1, 2, 3, 4, 5]
    assert list(table.lines) == ["gaussian_noise", "blur", "contrast", "occlusion", "pixelate"]
    cell = table.lines["blur"][2]
    gain = run.value("recast", "basic", "top1/blur/3") - run.value("finetuned", "basic", "top1/blur/3")
    assert cell.difference == formats.signed(gain)
    assert cell.better == ("recast" if gain > 0 else "finetuned")
    assert max(cell.strength for cells in table.lines.values() for cell in cells) == 55


def test_plan(make_run: MakeRun) -> None:
    run = read_run(make_run())
    first, second = plan_lines(run)
    assert (first["kernel"], first["tokens"], first["exact"]) == ("3×3, stride 2", "64 × 324", True)
    assert second["kernel"] == "3×3"
    assert first["costs"][0]["title"] == "36,864 → 49,203"
    assert totals(run)[0]["change"] == "+14\u00a0%"


def test_reasons_are_told_once(make_run: MakeRun) -> None:
    run = read_run(make_run())
    reasons = {"a": "too many tokens: 90 (9× of 10)", "b": "1×1", "c": "too many tokens: 80 (8× of 10)", "d": "1×1"}
    run.plan["left"][:] = [{"name": name, "reason": reason} for name, reason in (reasons | {"e": "1×1"}).items()]
    assert left_by_reason(run) == [
        ("1×1", 3, "b, d, e"),
        ("too many tokens", 2, "a: 90 (9× of 10)\nc: 80 (8× of 10)"),
    ]


def test_summary_over_seeds(make_run: MakeRun) -> None:
    runs = [read_run(make_run(f"s{seed}", seed=seed, gain=gain)) for seed, gain in enumerate((0.2, 0.4))]
    table, mean = summary(runs)
    assert [line["to_finetuned"] for line in table] == ["+0.2", "+0.4"]
    assert mean is not None
    assert mean["to_finetuned"] == "+0.3"
    assert mean["to_finetuned_interval"] == "−1.0 to 1.6"  # 0.3 ± 12.706 · 0.1414 / √2
    assert summary(runs[:1])[1] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.decimal(-0.04), "0.0"),
        (formats.decimal(-1234.56), "−1,234.6"),
        (formats.signed(0.04), "0.0"),
        (formats.signed(0.25, 2), "+0.25"),
        (formats.points(0.04), "0.04"),
        (formats.significant(0.1867), "0.19"),
        (formats.significant(-0.000138), "−0.00014"),
        (formats.significant(9.13e-6), "9.1e−6"),
        (formats.significant(0.0), "0"),
        (formats.compact(9_870_000), "9.87\u00a0M"),
        (formats.compact(512), "512"),
        (formats.memory(2_097_152), "2.0\u00a0MiB"),
        (formats.error(0.0), "0"),
        (formats.error(3.4e-7), "3e−7"),
        (formats.error(0.789), "0.79"),
        (formats.error(float("inf")), "not finite"),
        (formats.duration(83.4), "83\u00a0s"),
        (formats.percent(float("nan")), "–"),
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text == expected
