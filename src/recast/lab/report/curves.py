"""Charts of the arms of a run: training, attacks, corruptions, and test-time sweeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recast.files import number
from recast.lab.report import formats
from recast.lab.report.charts import Chart
from recast.lab.report.draw import Point, Series, series_chart
from recast.lab.report.labels import CORRUPTIONS, suite_title, words
from recast.lab.report.load import Run
from recast.lab.report.verdict import accuracy
from recast.lab.suites import CATEGORIES, METRICS, of_kind

MOST_SWITCHES = 24  # more vertical lines would hide the curves
PERCENT = (0, 102)
SMALL = (3.5, 2.4)
Keyed = dict[float, tuple[str, str]]
"""Position on the horizontal axis → (suite, metric) of rows.csv."""


def training_series(run: Run, quantity: str, look: str = "line") -> list[Series]:
    """Return the arms by epoch; `quantity` is a field of `Epoch` or the name of a metric."""
    arms = {"finetuned": run.metrics} if run.is_plain else {"finetuned": run.control, "recast": run.metrics}
    series = []
    for arm, rows in arms.items():
        points = [
            Point(float(row.epoch), number(row.metrics.get(quantity, getattr(row, quantity, None)))) for row in rows
        ]
        series += [Series(words(run).arms[arm], points, arm, look)] if points else []
    return series


def training(run: Run) -> list[Chart]:
    """Return accuracy and loss by epoch, with a vertical line at every switch, which precedes its epoch."""
    if run.epochs == 0:
        return []
    switches = [switch.epoch - 1 for switch in run.switching.switches] if run.switching else []
    marked = switches if len(switches) <= MOST_SWITCHES else []
    axis: dict[str, Any] = {"xlabel": "epoch", "whole_x": True, "switches": marked}
    main, label = training_series(run, run.main[1]), run.judged
    losses = {"validation": training_series(run, "val_loss"), "training": training_series(run, "train_loss", "dotted")}
    rows = [(line.role, part, *p[:2]) for part, series in losses.items() for line in series for p in line.points]
    parent = accuracy(run, "parent") if "parent" in words(run).drawn else math.nan
    before = f"{words(run).arms['parent']}: {formats.percent(parent, 2)}. " if math.isfinite(parent) else ""
    return [
        series_chart(
            "training_accuracy", f"{label}, %", main, "epoch", subject=f"{before}{label} by epoch",
            level=(parent, "parent"), unit=" %", **axis,
        ),
        series_chart(
            "training_loss", "Loss: validation (solid), training (dotted)", losses["validation"] + losses["training"],
            (("arm", "part", "epoch", "loss"), rows), **axis,
        ),
    ]  # fmt: skip


def metrics(run: Run, suite: str, metric: str = "top1") -> dict[str, str]:
    """Return setting → metric, `0.5` → `top1@0.5`, of the measured rows of a suite, in the order of the file."""
    names = dict.fromkeys(row.metric for row in run.rows if row.suite == suite)
    return {name.partition("@")[2]: name for name in names if name.startswith(f"{metric}@")}


def settings(run: Run, suite: str, metric: str = "top1") -> Keyed:
    """Return setting → (suite, metric) with settings as numbers."""
    return {float(text): (suite, name) for text, name in metrics(run, suite, metric).items()}


def clean_point(run: Run, suite: str) -> Keyed:
    """Return strength 0 of a suite: the clean images, if their number is the same."""
    counts = [{row.n for row in run.rows if row.suite == name} for name in ("clean", suite)]
    return {0.0: ("clean", "top1")} if counts[0] == counts[1] else {}


def arms_chart(
    run: Run, name: str, title: str, points: Keyed, x: str, place: str = "",
    ticks: Callable[[list[float]], Sequence[float]] | None = None, **options: Any,
) -> list[Chart]:  # fmt: skip
    """Return a chart of the arms with their intervals; none if no arm has two finite values.

    Args:
        points: position → (suite, metric).
        x: name of the column of positions.
        place: format of a position in tooltips, as in "{:g} pixels".
        ticks: choose the ticks from the positions.
    """
    series = []
    for arm in words(run).drawn:
        line = [
            Point(position, row.value, row.low, row.high, place.format(position))
            for position, key in sorted(points.items())
            if (row := run.row(arm, *key)) and math.isfinite(row.value)
        ]
        if len(line) > 1:
            series.append(Series(words(run).arms[arm], line, arm))
    if not series:
        return []
    if ticks is not None:
        options["xticks"] = {x: f"{x:g}" for x in ticks(sorted({point.x for line in series for point in line.points}))}
    return [series_chart(name, title, series, x, unit=" %", **options)]


def attacks(run: Run) -> list[Chart]:
    """Return a chart per attack, by its strength."""
    charts = []
    for suite in of_kind("attack"):
        charts += arms_chart(
            run, f"adversarial_{suite}", f"{suite_title(suite, short=True)}: top-1, % by ε in 1/255",
            settings(run, suite) | clean_point(run, suite), "epsilon_255",
            ticks=list, xlabel="ε in 1/255", ylim=PERCENT,
        )  # fmt: skip
    return charts


def sweeps(run: Run) -> list[Chart]:
    """Return charts of test resolution and neighbors."""
    title, by_k = "k nearest neighbours: top-1, %", settings(run, "knn")
    return resolution(run) + arms_chart(run, "knn", title, by_k, "k", ticks=list, xlabel="k", whole_x=True)


def resolution(run: Run) -> list[Chart]:
    """Return a chart by the side of square test sizes (T-CNN, Fig. 7); other sizes are listed in a note."""
    sizes = _sizes(run)
    note = f"Trained at {run.recipe.data.img_size} pixels." if run.recipe.data.img_size else ""
    for size, metric in sizes.items():
        if size[0] != size[-1]:
            values = {words(run).arms[arm]: run.value(arm, "resolution", metric) for arm in words(run).drawn}
            text = ", ".join(f"{name} {formats.decimal(value)} %" for name, value in values.items() if value == value)
            note += f" {size[0]}×{size[1]} (height × width): {text}."
    return arms_chart(
        run, "resolution", "Top-1, % by test resolution", _squares(run), "side", "{:g} pixels", apart,
        xlabel="test size, pixels", note=note.strip(),
    )  # fmt: skip


def _sizes(run: Run) -> dict[tuple[int, ...], str]:
    """(height, width) of the test sizes → metric."""
    return {tuple(map(int, size.split("x"))): name for size, name in metrics(run, "resolution").items()}


def _squares(run: Run) -> Keyed:
    return {size[0]: ("resolution", metric) for size, metric in _sizes(run).items() if size[0] == size[-1]}


def of_runs(runs: Sequence[Run]) -> list[Chart]:
    """What each of several runs trained, by epoch (T-CNN, Fig. 6) and by test size (Fig. 7)."""
    by_epoch, by_size = list[Series](), list[Series]()
    for place, run in enumerate(runs):
        arm, role = "finetuned" if run.is_plain else "recast", place / max(len(runs) - 1, 1)
        epochs = [Point(float(row.epoch), number(row.metrics.get(run.main[1]))) for row in run.metrics]
        sizes = [
            Point(s, row.value, row.low, row.high)
            for s, key in sorted(_squares(run).items())
            if (row := run.row(arm, *key))
        ]
        by_epoch += [Series(run.name, epochs, role, end=run.name)] if len(epochs) > 1 else []
        by_size += [Series(run.name, sizes, role, end=run.name)] if len(sizes) > 1 else []
    charts = []
    label = METRICS[runs[0].main[1]].label
    for name, series, x, xlabel in (
        ("training_runs", by_epoch, "epoch", "epoch"), ("resolution_runs", by_size, "side", "test size, pixels"),
    ):  # fmt: skip
        if len(series) > 1:
            rows = [(one.label, *point[:4]) for one in series for point in one.points]
            table = (("run", x, "percent", "low", "high"), rows)
            title = f"{label}, %, by {xlabel.partition(',')[0]}"
            charts.append(series_chart(name, title, series, table, xlabel=xlabel, unit=" %", right=0.8, whole_x=True))
    return charts


def apart(ticks: Sequence[float]) -> list[float]:
    """Return the ticks whose labels do not overlap, including both ends."""
    least, shown = 0.13 * (ticks[-1] - ticks[0]), [ticks[0]]
    for tick in ticks[1:-1]:
        if tick - shown[-1] >= least and ticks[-1] - tick >= least:
            shown.append(tick)
    return [*shown, ticks[-1]] if len(ticks) > 1 else shown


def corruptions(run: Run) -> list[Chart]:
    """Return accuracy by severity, a small chart per kind of corruption; severity 0 is the clean images."""
    charts = []
    for suite, kind in ((suite, kind) for suite, kinds in run.corruptions.items() for kind in kinds if kind != "mean"):
        points = {float(severity): (suite, metric) for severity, metric in run.corruptions[suite][kind].items()}
        suffix = f" · {suite_title(suite, short=True)}" if len(run.corruptions) > 1 else ""
        charts += arms_chart(
            run, f"severity_{suite}_{kind}", kind.replace("_", " ") + suffix, clean_point(run, suite) | points,
            "severity", xlabel="severity (0: clean)", whole_x=True, ylim=PERCENT, size=SMALL,
        )  # fmt: skip
    return charts


def relative(run: Run) -> list[Chart]:
    """Return 100·(recast − other)/other by category and by severity of corruptions (T-CNN, Fig. 3), for each suite.

    Intervals are those of the paired difference divided by the accuracy of the other arm.
    """
    charts = []
    for suite in CORRUPTIONS:
        kinds = {kind: metrics for kind, metrics in run.corruptions.get(suite, {}).items() if kind != "mean"}
        severities = sorted({severity for metrics in kinds.values() for severity in metrics}, key=int)
        if not kinds:
            continue
        parts = {name: [f"top1/{name}"] for name in CATEGORIES if run.row("recast", suite, f"top1/{name}")}
        group_by = "category" if parts else "kind"
        parts = parts or {kind: [f"top1/{kind}/{severity}" for severity in severities] for kind in kinds}
        means = {severity: [f"top1/mean/{severity}"] for severity in severities}
        if any(run.row("recast", suite, metrics[0]) is None for metrics in means.values()):
            means = {severity: [f"top1/{kind}/{severity}" for kind in kinds] for severity in severities}
        for name, groups in ((group_by, parts), ("severity", means)):
            gains = {arm: _gains(run, suite, arm, groups) for arm in reversed(words(run).others)}
            gains = {arm: bars for arm, bars in gains.items() if bars.points}
            if not gains:
                continue
            long = max(map(len, groups)) > 9
            ticks = {place: group.replace("_", "\n") if long else group for place, group in enumerate(groups)}
            rows = [
                (list(groups)[int(p.x)], arm, p.y, p.low, p.high) for arm, bars in gains.items() for p in bars.points
            ]
            columns = (name, "against", "relative_improvement_percent", "low", "high")
            title = f"{suite_title(suite, short=True)}: relative improvement, %, by {name}"
            axis: dict[str, Any] = {"xlabel": "" if long else name, "unit": " %", "xticks": ticks}
            charts.append(series_chart(f"relative_{suite}_{name}", title, [*gains.values()], (columns, rows), **axis))
    return charts


def _gains(run: Run, suite: str, against: str, groups: Mapping[str, Sequence[str]]) -> Series:
    points = []
    for place, (group, metrics) in enumerate(groups.items()):
        pairs = [[run.value(arm, suite, metric) for arm in ("recast", against)] for metric in metrics]
        recast, other = (sum(pair[side] for pair in pairs if all(map(math.isfinite, pair))) for side in (0, 1))
        if other > 0:
            paired = run.difference(against, suite, metrics[0]) if len(metrics) == 1 else None
            low, high = (100 * paired.low / other, 100 * paired.high / other) if paired else (None, None)
            points.append(Point(place, 100 * (recast - other) / other, low, high, group.replace("_", " ")))
    name = words(run).arms.get(against, against)
    look = "bars" if against == "finetuned" else "pale bars"
    return Series(f"Recast against {name[0].lower()}{name[1:]}", points, "recast", look)
