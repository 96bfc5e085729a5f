"""Relative improvement under corruptions by category and by severity (T-CNN, Fig. 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import MaxNLocator

from recast.report.figures.chart import Chart, Data, Draw, Drawing, Key
from recast.report.figures.style import Hit, Palette, new_axes, new_figure
from recast.report.read.run import Run
from recast.report.tables.names import CATEGORIES, CORRUPTIONS, PER_CORRUPTION, SHORT
from recast.report.text import formats
from recast.report.text.words import words


@dataclass(frozen=True)
class Gain:
    """100·(recast − other)/other in percent, `other` being the accuracy of the arm compared with."""

    where: str
    against: str
    value: float
    low: float | None
    high: float | None


def relative_charts(run: Run) -> list[Chart]:
    """Two charts for each corruption suite; intervals are those of the paired difference over the other's accuracy."""
    charts = []
    for suite in CORRUPTIONS:
        found = [match for row in run.rows if row.suite == suite and (match := PER_CORRUPTION.match(row.metric))]
        kinds = list(dict.fromkeys(match["kind"] for match in found if match["kind"] != "mean"))
        severities = sorted({match["severity"] for match in found}, key=int)
        if not kinds:
            continue
        by_category = {name: [f"top1/{name}"] for name in CATEGORIES if run.row("recast", suite, f"top1/{name}")}
        parts = by_category or {kind: [f"top1/{kind}/{severity}" for severity in severities] for kind in kinds}
        what = "category" if by_category else "kind"
        means = {severity: [f"top1/mean/{severity}"] for severity in severities}
        if any(run.row("recast", suite, metrics[0]) is None for metrics in means.values()):
            means = {severity: [f"top1/{kind}/{severity}" for kind in kinds] for severity in severities}
        for name, groups in ((what, parts), ("severity", means)):
            gains = [gain for where, metrics in groups.items() for gain in _gains(run, suite, where, metrics)]
            if gains:
                charts.append(_chart(run, suite, name, gains))
    return charts


def _gains(run: Run, suite: str, where: str, metrics: Sequence[str]) -> list[Gain]:
    gains = []
    for against in ("finetuned", "parent"):
        pairs = [(run.value("recast", suite, metric), run.value(against, suite, metric)) for metric in metrics]
        pairs = [pair for pair in pairs if all(map(math.isfinite, pair))]
        other = sum(pair[1] for pair in pairs)
        if not pairs or other <= 0:
            continue
        low = high = None
        paired = run.difference("recast", against, suite, metrics[0]) if len(metrics) == 1 else None
        if paired is not None and math.isfinite(paired.low) and math.isfinite(paired.high):
            low, high = 100 * paired.low / other, 100 * paired.high / other
        gains.append(Gain(where, against, 100 * (sum(pair[0] for pair in pairs) - other) / other, low, high))
    return gains


def _chart(run: Run, suite: str, name: str, gains: Sequence[Gain]) -> Chart:
    arms = words(run).arms
    told = "; ".join(
        f"{gain.where.replace('_', ' ')} {formats.signed(gain.value)} % against {arms[gain.against].lower()}"
        for gain in gains
    )
    title = f"{SHORT[suite]}: relative improvement, %, by {name}"
    rows = [(gain.where, gain.against, gain.value, gain.low, gain.high) for gain in gains]
    against = dict.fromkeys(gain.against for gain in gains)
    return Chart(
        f"relative_{suite}_{name}",
        title,
        f"{title}. {told}.",
        _draw(gains, name, arms),
        Data((name, "against", "relative_improvement_percent", "low", "high"), list(rows)),
        [Key(f"Recast against {arms[arm][0].lower()}{arms[arm][1:]}", arm) for arm in against],
    )


def _draw(gains: Sequence[Gain], name: str, arms: dict[str, str]) -> Draw:
    places = {where: place for place, where in enumerate(dict.fromkeys(gain.where for gain in gains))}
    against = list(dict.fromkeys(gain.against for gain in gains))
    width = 0.72 / len(against)

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((4.0, 2.4))
        axes = new_axes(figure)
        hits = []
        for gain in gains:
            x = places[gain.where] + (against.index(gain.against) - (len(against) - 1) / 2) * width
            axes.bar(x, gain.value, 0.9 * width, color=palette.arms[gain.against], linewidth=0)
            text = f"{gain.where.replace('_', ' ')}, against {arms[gain.against].lower()}: "
            text += f"{formats.signed(gain.value)} %"
            if gain.low is not None and gain.high is not None:
                axes.vlines(x, gain.low, gain.high, color=palette.ink, linewidth=1.1)
                text += f" ({formats.interval(gain.low, gain.high)})"
            hits.append(Hit(axes, x, gain.value, text))
        axes.axhline(0, color=palette.ink, linewidth=0.9)
        longest = max(map(len, places))
        names = [where.replace("_", "\n") if longest > 9 else where for where in places]
        axes.set_xticks(list(places.values()), names, fontsize=7.6 if len(places) > 4 else 8.5)
        if longest <= 9:
            axes.set_xlabel(name)
        axes.tick_params(axis="x", length=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return Drawing(figure, hits)

    return draw
