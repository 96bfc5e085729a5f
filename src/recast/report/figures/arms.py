"""Curves of a run's arms: training, adversarial images, corruptions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recast.report.figures.chart import Chart, Data, Key, alone
from recast.report.figures.lines import Curve, curve_data, line_chart, line_panel
from recast.report.read.run import ARMS, Run
from recast.report.tables.names import PER_CORRUPTION, SHORT
from recast.report.text import formats, verdict
from recast.report.text.words import words
from recast.run.files import number

MOST_SWITCHES = 24
"""With more dates than this the lines that mark them would hide the curves."""


def arm_keys(run: Run, arms: Sequence[str] = ARMS) -> list[Key]:
    """The legend of a chart of arms."""
    names = words(run).arms
    return [Key(names[arm], arm) for arm in names if arm in arms]


def training(run: Run) -> list[Chart]:
    """Accuracy and loss by epoch, with a line at every switch: a date's switch comes right after the row before it."""
    names = words(run).arms
    switches = [switch.epoch - 1 for switch in run.schedule.switches] if run.schedule else []
    switches = switches if len(switches) <= MOST_SWITCHES else []
    parent = verdict.accuracy(run, "parent")
    arms = {"finetuned": run.metrics} if run.is_plain else {"finetuned": run.control, "recast": run.metrics}
    arms = {arm: rows for arm, rows in arms.items() if rows}
    epochs = {arm: [number(row["epoch"]) for row in rows] for arm, rows in arms.items()}

    def curves(key: str, dotted: bool = False) -> list[Curve]:
        return [
            Curve(epochs[arm], [number(row.get(key)) for row in rows], arm, dotted, label=names[arm])
            for arm, rows in arms.items()
        ]

    def story(key: str, unit: str) -> str:
        return "; ".join(
            f"{names[arm]} from {formats.decimal(number(rows[0][key]), 2)}{unit} at epoch {rows[0]['epoch']} "
            f"to {formats.decimal(number(rows[-1][key]), 2)}{unit} at epoch {rows[-1]['epoch']}"
            for arm, rows in arms.items()
        )

    if run.epochs == 0:
        return []
    before = "" if run.is_plain else f"{names['parent']}: {formats.decimal(parent, 2)} %."
    keys = arm_keys(run, list(arms))
    return [
        Chart(
            "training_accuracy",
            "Top-1 accuracy, %",
            f"Top-1 accuracy by epoch. {story('val_top1', ' %')}. {before}",
            line_chart(
                curves("val_top1"), xlabel="epoch", reference=parent, whole_x=True, switches=switches, unit=" %"
            ),
            curve_data(curves("val_top1"), "epoch", "top1"),
            keys,
        ),
        Chart(
            "training_loss",
            "Loss: validation (solid), training (dotted)",
            f"Validation loss by epoch. {story('val_loss', '')}.",
            line_chart(
                curves("val_loss") + curves("train_loss", dotted=True), xlabel="epoch", whole_x=True, switches=switches
            ),
            _losses(curves("val_loss"), curves("train_loss")),
            keys,
        ),
    ]


def _losses(validation: Sequence[Curve], train: Sequence[Curve]) -> Data:
    rows: list[tuple[str | float | int | None, ...]] = []
    for part, curves in (("validation", validation), ("training", train)):
        for curve in curves:
            rows += [(curve.arm, part, x, y) for x, y in zip(curve.x, curve.y, strict=True)]
    return Data(("arm", "part", "epoch", "loss"), rows)


def measured_curve(run: Run, arm: str, points: dict[float, tuple[str, str]]) -> Curve | None:
    """An arm over x → (suite, metric) of rows.csv, its intervals with it; None with fewer than two finite values."""
    found = [(x, row) for x, key in sorted(points.items()) if (row := run.row(arm, *key)) and math.isfinite(row.value)]
    if len(found) < 2:
        return None
    x, rows = [x for x, _ in found], [row for _, row in found]
    label = words(run).arms[arm]
    return Curve(x, [row.value for row in rows], arm, False, [r.low for r in rows], [r.high for r in rows], label)


def clean_point(run: Run, suite: str) -> dict[float, tuple[str, str]]:
    """Strength 0 of a suite: the clean images, where they were as many."""
    clean = {row.n for row in run.rows if row.suite == "clean"}
    return {0.0: ("clean", "top1")} if clean == {row.n for row in run.rows if row.suite == suite} else {}


def values_after(run: Run, suite: str, prefix: str) -> list[str]:
    """What follows `prefix` in the metrics of a suite, each once, in the file's order."""
    metrics = [row.metric for row in run.rows if row.suite == suite and row.metric.startswith(prefix)]
    return [metric.removeprefix(prefix) for metric in dict.fromkeys(metrics)]


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def adversarial(run: Run) -> list[Chart]:
    """Accuracy by the strength of each attack, ε = 0 being the clean images."""
    charts = []
    for suite in ("fgsm", "pgd", "autoattack"):
        points = {float(eps): (suite, f"top1@{eps}") for eps in values_after(run, suite, "top1@") if is_number(eps)}
        points = clean_point(run, suite) | points
        curves = [curve for arm in ARMS if (curve := measured_curve(run, arm, points))]
        if not curves:
            continue
        title = f"{SHORT[suite]}: top-1, % by ε in 1/255"
        ends = "; ".join(f"{c.label} {formats.decimal(c.y[-1])} % at ε = {c.x[-1]:g}/255" for c in curves)
        draw = line_chart(curves, xlabel="ε in 1/255", ylim=(0, 102), xticks=curves[0].x, unit=" %")
        charts.append(
            Chart(
                f"adversarial_{suite}",
                title,
                f"{title}. {ends}.",
                draw,
                curve_data(curves, "epsilon_255", "top1"),
                arm_keys(run, [curve.arm for curve in curves]),
            )
        )
    return charts


def corruptions(run: Run) -> list[Chart]:
    """Accuracy by severity, a small chart per kind of corruption; severity 0 being the clean images."""
    kinds: dict[tuple[str, str], dict[float, tuple[str, str]]] = {}
    for row in run.rows:
        if (match := PER_CORRUPTION.match(row.metric)) and match["kind"] != "mean":
            points = kinds.setdefault((row.suite, match["kind"]), clean_point(run, row.suite))
            points[float(match["severity"])] = (row.suite, row.metric)
    several = len({suite for suite, _ in kinds}) > 1
    charts = []
    for (suite, kind), points in kinds.items():
        curves = [curve for arm in ARMS if (curve := measured_curve(run, arm, points))]
        if not curves:
            continue
        worst = "; ".join(f"{curve.label} {formats.decimal(curve.y[-1])} %" for curve in curves)
        panel = line_panel(curves, xlabel="severity (0: clean)", whole_x=True, ylim=(0, 102), unit=" %")
        charts.append(
            Chart(
                f"severity_{suite}_{kind}",
                kind.replace("_", " ") + (f" · {SHORT.get(suite, suite)}" if several else ""),
                f"Top-1 under {kind} by severity. At the strongest: {worst}.",
                alone(panel, (3.5, 2.2)),
                curve_data(curves, "severity", "top1"),
                arm_keys(run, [curve.arm for curve in curves]),
                panel=panel,
            )
        )
    return charts
