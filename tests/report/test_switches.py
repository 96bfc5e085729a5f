"""The section that says when layers became attention."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from changed_runs import rewrite
from matplotlib.figure import Figure

from recast.lab.report import switches
from recast.lab.report.charts import PAGE
from recast.lab.report.load import read_run

MakeRun = Callable[..., Path]


def test_every_switch_is_a_line(make_run: MakeRun) -> None:
    path = make_run(source="during")
    found = json.loads((path / "schedule.json").read_text(encoding="utf-8"))["switches"]
    found[0]["after"] = {"val_loss": found[0]["before"]["val_loss"] + 0.12, "val_top1": 56.4}
    found[2]["after"] = None  # the run was stopped between the switch and its measurement
    rewrite(path / "schedule.json", switches=found)
    part = switches.switch_part(read_run(path))
    rows = part["table"].groups[0].rows
    assert [(row[0].text, row[0].small[0]) for row in rows[:2]] == [
        ("epoch 1", "layer3.1.conv2"), ("epoch 2", "layer3.0.conv2, layer3.1.conv1"),
    ]  # fmt: skip
    assert rows[0][1].text == "1.888 → 2.008 → 1.884"
    assert rows[0][1].small == ("+0.120, then −0.124",)
    assert rows[0][2].small == ("−1.60, then −6.40",)
    assert rows[2][1].text == "1.984 → – → 1.823"


def test_one_switch_of_many_layers_is_shortened(make_run: MakeRun) -> None:
    path = make_run(source="during")
    layers = [f"blocks.{place}.mixer" for place in range(45)]
    measured = {"val_loss": 2.0, "val_top1": 40.0}
    switch = {"epoch": 2, "layers": layers, "before": measured, "after": measured}
    rewrite(path / "schedule.json", name="at_once", layers=layers, dates=dict.fromkeys(layers, 2), switches=[switch])
    part = switches.switch_part(read_run(path))
    assert part["chart"].rows == [(layer, 2) for layer in layers]
    cell = part["table"].groups[0].rows[0][0]
    assert cell.small == ("45 layers",)
    assert cell.title.count(",") == 44


def test_bars_are_thin_before_the_switch_and_pale_after_the_last_epoch() -> None:
    axes = Figure((4, 3)).add_axes((0, 0, 1, 1))
    switches.draw_bars(axes, PAGE, [("a", 3), ("b", 1), ("c", None), ("d", 9)], 10, 4)
    parts: list[list[tuple[float, float, bool, float]]] = [[], [], [], []]
    for patch in axes.patches:
        left, bottom = patch.get_xy()  # type: ignore[attr-defined]
        width, height = patch.get_width(), patch.get_height()  # type: ignore[attr-defined]
        parts[round(bottom + height / 2)].append((left, left + width, height > 0.5, patch.get_alpha() or 1))
    assert parts == [
        [(0, 2, False, 1), (2, 4, True, 1), (4, 10, True, 0.35)],
        [(0, 4, True, 1), (4, 10, True, 0.35)],
        [(0, 4, False, 1), (4, 10, False, 0.35)],
        [(0, 4, False, 1), (4, 8, False, 0.35), (8, 10, True, 0.35)],
    ]


def test_the_picture_has_layers_and_dates(make_run: MakeRun) -> None:
    chart = switches.switch_part(read_run(make_run(source="during")))["chart"]
    assert all(f">{word}</text>" in chart.svg for word in ("layer3.1.conv2", "epoch 3"))
    assert {"var(--recast)", "var(--muted)"} <= set(re.findall(r"var\(--\w+\)", chart.svg))
