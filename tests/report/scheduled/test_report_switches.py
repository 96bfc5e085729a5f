"""schedule.json, and the section that says when layers became attention."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recast.errors import RecastError
from recast.report.figures import timeline
from recast.report.figures.chart import Chart, Data
from recast.report.figures.style import PAGE
from recast.report.figures.switches import Section, switch_section
from recast.report.read.run import Run, read_run
from recast.report.read.schedule import Probe

MakeRun = Callable[..., Path]


def section_of(run: Run) -> Section:
    section = switch_section(run)
    assert section is not None
    return section


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that read words only: pictures take most of the time."""
    for name in ("timeline", "probe_chart"):
        monkeypatch.setattr(f"recast.report.figures.switches.{name}", lambda *_: "")


def rewrite(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found | changes), encoding="utf-8")


# the file


def test_reads_what_was_written(make_scheduled: MakeRun) -> None:
    run = read_run(make_scheduled(name="learned"))
    assert run.schedule is not None
    assert (run.schedule.name, run.schedule.epochs, len(run.schedule.layers)) == ("learned", 14, 6)
    assert run.schedule.switched == [f"blocks.{layer}.mixer" for layer in (4, 5, 2, 1)]
    first = run.schedule.switches[0]
    assert first.before.top1 == run.metrics[first.epoch - 1]["val_top1"]
    assert first.after.loss - first.before.loss == pytest.approx(0.12)
    assert math.isnan(run.schedule.probes[0].delivered)
    assert run.schedule.probes[2].chosen == ["blocks.4.mixer"]


def test_a_run_recast_before_training_has_none(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert (run.schedule, run.is_scheduled, switch_section(run)) == (None, False, None)


def test_a_truncated_schedule_is_named(make_scheduled: MakeRun) -> None:
    path = make_scheduled() / "schedule.json"
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    with pytest.raises(RecastError, match=r"schedule\.json is truncated or not JSON"):
        read_run(path.parent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"schedule\.json is of version 2: this recast reads version 1"),
        ({"layers": "blocks.0"}, r"layers of .*schedule\.json must be a list, got str"),
        ({"dates": {"blocks.0.mixer": 2.5}}, r"the date of blocks\.0\.mixer in .* must be a whole number, got 2\.5"),
        ({"switches": [{"epoch": 3}]}, r"a switch of .*schedule\.json lacks layers, before, after"),
        ({"probes": [{"epoch": 1, "promised": {}, "chosen": []}]}, r"a probe of .*schedule\.json lacks delivered"),
        ({"epochs": "many"}, "must be a whole number, got 'many'"),
    ],
)
def test_another_format(make_scheduled: MakeRun, changes: dict[str, Any], message: str) -> None:
    path = make_scheduled()
    rewrite(path / "schedule.json", **changes)
    with pytest.raises(RecastError, match=message):
        read_run(path)


# the section


@pytest.mark.usefixtures("undrawn")
def test_every_switch_is_a_line(make_scheduled: MakeRun) -> None:
    run = read_run(make_scheduled())
    section = section_of(run)
    assert [line.epoch for line in section.lines] == [3, 5, 7, 9, 11, 13]
    assert [line.layers for line in section.lines[:2]] == ["blocks.5.mixer", "blocks.4.mixer"]
    before, end = run.metrics[2]["val_loss"], run.metrics[3]["val_loss"]
    assert section.lines[0].loss.values == f"{before:.3f} → {before + 0.12:.3f} → {end:.3f}"
    assert section.lines[0].loss.changes.startswith("+0.120, then −")
    assert section.lines[0].top1.changes.startswith("−1.60, then +")
    assert section.lines[1].top1.changes.startswith("−0.40, then +")
    assert section.largest.replace("\u00a0", " ") == (
        "The switch that changed the loss most, at the start of epoch 3, moved the validation loss by +0.120 and "
        "top-1 by −1.60 points."
    )
    assert section.unfinished == ""


@pytest.mark.usefixtures("undrawn")
def test_one_switch_of_many_layers_is_shortened(make_scheduled: MakeRun) -> None:
    (line,) = section_of(read_run(make_scheduled(name="at_once", layers=8))).lines
    assert line.layers == "8 layers: blocks.0.mixer … blocks.7.mixer"
    assert line.title.count(",") == 7


@pytest.mark.usefixtures("undrawn")
def test_switches_that_change_nothing_say_so(make_scheduled: MakeRun) -> None:
    path = make_scheduled()
    switches = json.loads((path / "schedule.json").read_text(encoding="utf-8"))["switches"]
    rewrite(path / "schedule.json", switches=[switch | {"after": switch["before"]} for switch in switches])
    assert section_of(read_run(path)).largest == "No switch changed the validation loss by 0.001 or more."


@pytest.mark.usefixtures("undrawn")
def test_a_switch_that_is_not_measured_yet(make_scheduled: MakeRun) -> None:
    """The run was stopped between the switch before epoch 7 and its measurement."""
    path = make_scheduled(trained=6)
    found = json.loads((path / "schedule.json").read_text(encoding="utf-8"))
    before = {"val_loss": 2.0, "val_top1": 40.0}
    found["switches"].append({"epoch": 7, "layers": ["blocks.3.mixer"], "before": before, "after": None})
    rewrite(path / "schedule.json", switches=found["switches"])
    section = section_of(read_run(path))
    assert (section.lines[2].loss.values, section.lines[2].loss.changes) == ("2.000 → – → –", "–, then –")
    assert section.largest.startswith("The switch that changed the loss most, at the start of epoch\u00a03")


def drawn(bars: list[timeline.Bar], epochs: int, trained: int) -> list[list[tuple[float, float, bool, float]]]:
    """Per bar: (from, to, thick?, opacity) of its parts."""
    axes = timeline.new_figure((4, 3)).add_axes((0, 0, 1, 1))
    timeline.draw_bars(axes, bars, [bar.label for bar in bars], epochs, trained, "never", PAGE)
    parts: list[list[tuple[float, float, bool, float]]] = [[] for _ in bars]
    for patch in axes.patches:
        x, y, width, height = (getattr(patch, f"get_{key}")() for key in ("x", "y", "width", "height"))
        parts[round(y + height / 2)].append((x, x + width, height > 0.4, patch.get_alpha() or 1.0))
    return parts


def test_bars_are_thick_from_the_date_on_and_pale_in_the_future() -> None:
    bars = [timeline.Bar("a", 3), timeline.Bar("b", 1), timeline.Bar("c", None), timeline.Bar("d", 9)]
    assert drawn(bars, 10, 10) == [
        [(0, 2, False, 1), (2, 10, True, 1)],
        [(0, 10, True, 1)],
        [(0, 10, False, 1)],
        [(0, 8, False, 1), (8, 10, True, 1)],
    ]
    assert drawn(bars, 10, 4) == [
        [(0, 2, False, 1), (2, 4, True, 1), (4, 10, True, 0.35)],
        [(0, 4, True, 1), (4, 10, True, 0.35)],
        [(0, 4, False, 1), (4, 10, False, 0.35)],
        [(0, 4, False, 1), (4, 8, False, 0.35), (8, 10, True, 0.35)],
    ]


def test_many_layers_of_one_date_share_a_bar(make_scheduled: MakeRun) -> None:
    schedule = read_run(make_scheduled(name="at_once", layers=45)).schedule
    assert schedule is not None
    assert timeline.bars(schedule) == [timeline.Bar("blocks.44.mixer +44", 8)]


def test_the_picture_names_layers_dates_and_both_arms(make_scheduled: MakeRun) -> None:
    section = section_of(read_run(make_scheduled(trained=6)))
    chart = section.chart
    assert chart is not None
    for word in ("blocks.5.mixer", "epoch 13", "Validation loss", "Top-1, %", "Layers, input at the top"):
        assert f">{word}</text>" in chart.svg
    assert {"var(--recast)", "var(--finetuned)", "var(--muted)"} <= set(re.findall(r"var\(--\w+\)", chart.svg))
    story = re.search(r'aria-label="([^"]+)"', chart.svg)
    assert story is not None
    assert "blocks.5.mixer from epoch 3" in story[1]
    assert re.search(r"Top-1, %: Convolution only \d+\.\d\d at epoch 6, Recast \d+\.\d\d at epoch 6\.", story[1])
    assert section.unfinished == "The run has got to epoch 6 of 14: what is to come is pale."


def test_the_curve_jumps_at_a_switch(make_scheduled: MakeRun) -> None:
    from recast.report.figures.switches import arm_curves

    control, recast = arm_curves(read_run(make_scheduled()), "loss")
    assert list(control.x) == list(range(15))
    place = list(recast.x).index(2)
    assert list(recast.x[place : place + 2]) == [2, 2]
    assert recast.y[place + 1] - recast.y[place] == pytest.approx(0.12)


def test_learned_shows_what_was_promised(make_scheduled: MakeRun) -> None:
    section = section_of(read_run(make_scheduled(name="learned", gate="linear")))
    assert section.probes is not None
    assert section.probes.svg.count("<svg") == 1
    assert "Taken: after epoch 3 blocks.4.mixer (promised 0.19, delivered 0.17); after epoch 4" in section.reading
    early = section_of(read_run(make_scheduled("early", name="learned", trained=2)))
    assert early.probes is None  # one number delivered is no curve
    assert early.lines == []
    assert early.reading == (
        "No promise was taken; after epoch 2 the largest is that of blocks.5.mixer (promised 0.044, delivered 0.25)."
    )
    assert early.chart is not None
    assert ">undecided</text>" in early.chart.svg
    unnamed = section_of(read_run(make_scheduled("listed", name="listed", trained=2)))
    assert unnamed.chart is not None
    assert ">never</text>" in unnamed.chart.svg  # a list does not grow
    assert section_of(read_run(make_scheduled("prs"))).probes is None


def test_small_promises_are_drawn_on_a_logarithmic_scale() -> None:
    def probes(promise: float) -> list[Probe]:
        return [Probe(epoch, 0.3 / epoch - 0.05, {"a": promise, "b": promise / 3}, []) for epoch in range(1, 9)]

    def drawn_probes(promise: float) -> str:
        return Chart("name", "title", "d", timeline.probe_chart(probes(promise)), Data((), [])).svg

    assert "logarithmic scale" not in drawn_probes(0.1)
    small = drawn_probes(1e-4)
    assert "logarithmic scale" in small
    assert {">0.0001</text>", ">−0.01</text>"} <= set(re.findall(r">[^<]+</text>", small))  # a loss that rose too
