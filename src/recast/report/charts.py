"""Which curves the page shows of a run: training, adversarial images, corruptions. Each chart: a title and its SVG."""

from __future__ import annotations

import math
from typing import Any

from recast.report import figures, formats, verdict
from recast.report.figures import Curve
from recast.report.json_files import number
from recast.report.read import ARMS, Run
from recast.report.tables import PER_CORRUPTION
from recast.report.words import words

MOST_SWITCHES = 24
"""With more dates than this the lines that mark them would hide the curves."""


def training(run: Run) -> list[dict[str, Any]]:
    """Accuracy and loss by epoch, with a line at every switch: a date's switch comes right after the row before it."""
    names = words(run).arms
    switches = [switch.epoch - 1 for switch in run.schedule.switches] if run.schedule else []
    switches = switches if len(switches) <= MOST_SWITCHES else []
    parent = verdict.accuracy(run, "parent")
    arms = {"finetuned": run.control, "recast": run.metrics}
    arms = {arm: rows for arm, rows in arms.items() if rows}
    epochs = {arm: [number(row["epoch"]) for row in rows] for arm, rows in arms.items()}

    def curves(key: str, dotted: bool = False) -> list[Curve]:
        return [Curve(epochs[arm], [number(row.get(key)) for row in rows], arm, dotted) for arm, rows in arms.items()]

    def story(key: str, unit: str) -> str:
        return "; ".join(
            f"{names[arm]} from {formats.decimal(number(rows[0][key]), 2)}{unit} at epoch {rows[0]['epoch']} "
            f"to {formats.decimal(number(rows[-1][key]), 2)}{unit} at epoch {rows[-1]['epoch']}"
            for arm, rows in arms.items()
        )

    if run.epochs == 0:
        return []
    before = f"{names['parent']}: {formats.decimal(parent, 2)} %."
    return [
        {
            "title": "Top-1 accuracy, %",
            "svg": figures.line_chart(
                curves("val_top1"),
                f"Top-1 accuracy by epoch. {story('val_top1', ' %')}. {before}",
                xlabel="epoch",
                reference=parent,
                whole_x=True,
                switches=switches,
            ),
        },
        {
            "title": "Loss: validation (solid), training (dotted)",
            "svg": figures.line_chart(
                curves("val_loss") + curves("train_loss", dotted=True),
                f"Validation loss by epoch. {story('val_loss', '')}.",
                xlabel="epoch",
                whole_x=True,
                switches=switches,
            ),
        },
    ]


def adversarial(run: Run) -> list[dict[str, Any]]:
    charts, names = [], words(run).arms
    for suite, title in (("fgsm", "FGSM: top-1, % by ε in 1/255"), ("pgd", "PGD: top-1, % by ε in 1/255")):
        curves, ends = [], []
        for arm in ARMS:
            measured = {0.0: run.value(arm, "clean", "top1")}
            for row in run.rows:
                if row.suite == suite and row.model == arm and row.metric.startswith("top1@"):
                    try:
                        measured[float(row.metric.removeprefix("top1@"))] = row.value
                    except ValueError:
                        continue
            known = {epsilon: value for epsilon, value in sorted(measured.items()) if math.isfinite(value)}
            if len(known) > 1:
                curves.append(Curve(list(known), list(known.values()), arm))
                ends.append(f"{names[arm]} {formats.decimal(known[max(known)])} % at ε = {max(known):g}/255")
        if curves:
            story = f"{title}. {'; '.join(ends)}."
            chart = figures.line_chart(curves, story, xlabel="ε in 1/255", ylim=(0, 102), xticks=curves[0].x)
            charts.append({"title": title, "svg": chart})
    return charts


def corruptions(run: Run) -> list[dict[str, Any]]:
    charts, names = [], words(run).arms
    found = [(row, match) for row in run.rows if (match := PER_CORRUPTION.match(row.metric))]
    for suite, kind in dict.fromkeys((row.suite, match["kind"]) for row, match in found):
        curves = []
        for arm in ARMS:
            measured = {
                int(match["severity"]): row.value
                for row, match in found
                if (row.suite, match["kind"], row.model) == (suite, kind, arm) and math.isfinite(row.value)
            }
            clean = run.value(arm, "clean", "top1")
            if measured:
                known = ({0: clean} if math.isfinite(clean) else {}) | dict(sorted(measured.items()))
                curves.append(Curve(list(known), list(known.values()), arm))
        if curves:
            worst = "; ".join(f"{names[curve.arm]} {formats.decimal(curve.y[-1])} %" for curve in curves)
            svg = figures.line_chart(
                curves,
                f"Top-1 under {kind} by severity. At the strongest: {worst}.",
                xlabel="severity (0: clean)",
                whole_x=True,
                ylim=(0, 102),
                size=(3.5, 2.2),
            )
            charts.append({"title": kind.replace("_", " "), "svg": svg})
    return charts
