"""The two kinds of charts: series as lines, points or bars with intervals, and a heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.optimize import isotonic_regression

from recast.lab.report import formats
from recast.lab.report.charts import Cells, Chart, Hit, Key, Palette, Role

MARKERS = {"parent": "D", "finetuned": "s", "ink": "s"}
"""Of a role; others have circles."""
LOOKS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2.0, "markersize": 4.2},
    "bare": {"linewidth": 1.5},
    "dotted": {"linewidth": 1.3, "linestyle": (0, (1, 1.6))},
    "thin": {"linewidth": 0.9, "alpha": 0.75},
    "thick": {"linewidth": 2.6, "zorder": 3},
    "points": {"linestyle": "none", "markersize": 5.5, "zorder": 3},
    "rings": {"linestyle": "none", "markersize": 7, "markerfacecolor": "none", "markeredgewidth": 1.3, "zorder": 4},
}
BARS = {"bars": 1.0, "pale bars": 0.4}
"""Looks of bars and their opacity."""
SINGLE = ("points", "rings")
"""Looks without a line."""
MOST_MARKED = 30
"""Longer lines have neither markers nor values to point at."""
MOST_TICKS = 8
"""With more than this a chart chooses its own."""
ALL_LABELLED = 12
"""With more ends than this only the three highest and the three lowest are named."""
MOST_NAMED = 16
"""With more layers than this only every few are named on an axis of a heat map."""
LETTERS = 48
"""That have room side by side under an axis."""
MOST_HITS = 400
"""Larger heat maps have no values to point at: they are in the table of the folder of figures."""


class Point(NamedTuple):
    """A value with its interval, drawn as whiskers; None where there is none."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    place: str = ""
    """What `x` is called, where the number does not say it."""

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Series:
    """Points of one kind: a line, single points, or bars."""

    label: str
    """What it is called where a point says its value; "" where nothing is said."""
    points: Sequence[Point]
    role: Role = "recast"
    look: str = "line"
    """One of `LOOKS` or `BARS`."""
    end: str = ""
    """A name at its end."""


def series_chart(
    name: str, title: str, series: Sequence[Series], table: tuple[Sequence[str], Cells] | str, *, subject: str = "",
    note: str = "", size: tuple[float, float] = (4.0, 2.4), right: float = 0.97, keys: Sequence[Key] | None = None,
    **settings: Any,
) -> Chart:  # fmt: skip
    """A chart of series, whose labels are its legend unless `keys` are.

    `table` is (columns, rows) or, of arms, what x is called there; `settings` are those of `draw_series`.
    """
    rows: Cells
    if isinstance(table, str):
        columns: Sequence[str] = ("arm", "label", table, "top1", "low", "high")
        rows = [(one.role, one.label, *point[:4]) for one in series for point in one.points]
    else:
        columns, rows = table
    if keys is None:
        keys = list(dict.fromkeys(Key(one.label, one.role, BARS.get(one.look, 1.0)) for one in series if one.label))
    story = in_words(subject or title, series, settings.get("unit", ""), note, settings.get("xlabel", ""))
    panel = partial(draw_series, series=series, **settings)
    return Chart(name, title, story, columns, rows, panel, size, right, keys, note)


def in_words(title: str, series: Sequence[Series], unit: str = "", note: str = "", xlabel: str = "epoch") -> str:
    """A chart in words: where its lines begin and end, and its bars; of curves of one kind the first and the last."""

    def value(point: Point) -> str:
        place = point.place or f"{'epoch ' if xlabel == 'epoch' else ''}{point.x:g}"
        return f"{formats.significant(point.y, 4)}{unit} at {place}"

    named = [one for one in series if one.label and one.points]
    shown = [one for one in named if one.look in ("line", "thick", *BARS) or len(one.points) == 1]
    each = []
    for one in shown or [*named[:1], *named[1:][-1:]]:
        if one.look in ("line", "bare") and len(one.points) > 1:
            each.append(f"{one.label} from {value(one.points[0])} to {value(one.points[-1])}")
        else:
            each.append(f"{one.label} {', '.join(map(value, one.points))}")
    return " ".join(part for part in (f"{title}.", f"{'; '.join(each)}." if each else "", note) if part)


def draw_series(
    axes: Axes,
    palette: Palette,
    series: Sequence[Series],
    *,
    xlabel: str = "",
    unit: str = "",
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
    xticks: Mapping[float, str] | None = None,
    yticks: int = 5,
    whole_x: bool = False,
    log_x: bool = False,
    xformat: Callable[[float], str] | None = None,
    level: tuple[float, Role] = (math.nan, "muted"),
    switches: Sequence[float] = (),
) -> list[Hit]:
    """Series on one pair of axes.

    At `level` lies a dashed line of that role; at each of `switches`, where layers became attention, a light vertical
    one. `unit` follows the values that a reader points at.
    """
    for edge in switches:
        axes.axvline(edge, color=palette["muted"], linewidth=0.7, alpha=0.55, dashes=(2, 2), zorder=1)
    if math.isfinite(level[0]):
        axes.axhline(level[0], color=palette.color(level[1]), linewidth=1.2, dashes=(4, 3))
    bars = [one for one in series if one.look in BARS]
    hits = [hit for one in series if one not in bars for hit in _line(axes, one, palette, xlabel, unit)]
    hits += [hit for place in range(len(bars)) for hit in _bars(axes, bars, place, palette, unit)]
    axes.set_xlabel(xlabel)
    if log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6 if xformat is None else 4, integer=whole_x))
    if xformat is not None:
        axes.xaxis.set_major_formatter(lambda value, _: xformat(value))
        axes.margins(0.14)
    axes.yaxis.set_major_locator(MaxNLocator(yticks))
    if xticks is not None and len(xticks) <= MOST_TICKS:
        axes.set_xticks(list(xticks), list(xticks.values()))
    axes.set(xlim=xlim, ylim=ylim)
    _name_ends(axes, [one for one in series if one.end and math.isfinite(one.points[-1].y)], palette)
    return hits


def _line(axes: Axes, one: Series, palette: Palette, xlabel: str, unit: str) -> list[Hit]:
    marked = one.look in SINGLE or (one.look == "line" and len(one.points) <= MOST_MARKED)
    marker = "o" if one.look == "rings" else MARKERS.get(str(one.role), "o") if marked else None
    color = palette.color(one.role)
    look = {"zorder": 2.7 if one.role == "recast" else 2.5} | LOOKS[one.look]
    axes.plot([point.x for point in one.points], [point.y for point in one.points], color=color, marker=marker, **look)
    for point in one.points if marked else ():
        if point.interval is not None:
            axes.vlines(point.x, *point.interval, color=color, linewidth=1.2, alpha=0.7, zorder=2.4)
    pointed_at = one.points if marked else one.points[-1:] if one.look == "bare" else ()
    return [hit for point in pointed_at for hit in _hit(axes, one, point, point.place or f"{xlabel} {point.x:g}", unit)]


def _hit(axes: Axes, one: Series, point: Point, where: str, unit: str, x: float | None = None) -> list[Hit]:
    if not one.label or not math.isfinite(point.y):
        return []
    text = f"{one.label}, {where}: {formats.significant(point.y, 4)}{unit}"
    text += f" ({formats.interval(*point.interval)})" if point.interval else ""
    return [Hit(axes, float(point.x if x is None else x), float(point.y), text)]


def _bars(axes: Axes, bars: Sequence[Series], number: int, palette: Palette, unit: str) -> list[Hit]:
    one, width, hits = bars[number], 0.72 / len(bars), list[Hit]()
    for point in one.points:
        x = point.x + (number - (len(bars) - 1) / 2) * width
        alpha = BARS[one.look]
        axes.bar(x, point.y, 0.9 * width, color=palette.color(one.role), alpha=alpha, linewidth=0)
        if point.interval is not None:
            axes.vlines(x, *point.interval, color=palette["ink"], linewidth=1.1)
        hits += _hit(axes, one, point, point.place, unit, x)
    axes.axhline(0, color=palette["ink"], linewidth=0.9)
    axes.tick_params(axis="x", length=0)
    return hits


def _name_ends(axes: Axes, series: Sequence[Series], palette: Palette) -> None:
    """The name of each series right of its end, moved apart where they would overlap; the outermost six of many."""
    low, high = axes.get_ylim()
    order = sorted(series, key=lambda one: one.points[-1].y)
    if len(order) > ALL_LABELLED:
        order = order[:3] + order[-3:]
    height = axes.bbox.height / axes.get_figure(root=True).dpi * 72  # type: ignore[union-attr]
    places = spread([(one.points[-1].y - low) / (high - low) for one in order], 8.6 / height)
    for one, place in zip(order, places, strict=True):
        line = {"arrowstyle": "-", "color": palette.color(one.role), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            one.end, one.points[-1][:2], xytext=(13, place), textcoords=("offset points", "axes fraction"),
            va="center_baseline", fontsize=7.2, color=palette["muted"], annotation_clip=False, arrowprops=line,
        )  # fmt: skip


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Ascending positions, moved as little as can be (least squares) so that neighbours are `gap` apart, within 0..1:
    isotonic regression of what is left of them less `gap` per place."""
    if not positions:
        return []
    flat = isotonic_regression([position - place * gap for place, position in enumerate(positions)]).x
    highest = max(1.0 - gap * (len(positions) - 1), 0.0)
    return [float(min(max(value, 0.0), highest)) + place * gap for place, value in enumerate(flat)]


def draw_heat_map(
    axes: Axes, palette: Palette, values: np.ndarray, columns: Sequence[str], rows: Sequence[str], a: str, b: str
) -> list[Hit]:
    """Values from 0 to 1, the first row at the bottom, with a scale of colours beside it."""
    # Colours of its own: a map is read by its scale, which goes with it, on light and dark pages alike.
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="none", aspect="auto")
    axes.set_position((0.25, 0.25, 0.62, 0.68))
    for set_ticks, names, turn in ((axes.set_xticks, columns, 90), (axes.set_yticks, rows, 0)):
        shown = range(0, len(names), math.ceil(len(names) / MOST_NAMED))
        set_ticks(shown, [shortened(names[place], 18) for place in shown], fontsize=6.6, rotation=turn)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set(xlabel=a, ylabel=b)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)
    return [
        Hit(axes, x, y, f"{columns[x]} and {rows[y]}: {formats.decimal(float(values[y, x]), 3)}")
        for y, x in np.ndindex(*values.shape)
        if values.size <= MOST_HITS and math.isfinite(values[y, x])
    ]


def layer_ticks(names: Sequence[str]) -> dict[float, str]:
    """Names of layers under an axis, the last part on a line of its own but for a number; only every few, so that none
    run together."""

    def lines(name: str) -> list[str]:
        first, _, last = name.rpartition(".")
        return [shortened(part, 12) for part in ((name,) if last.isdecimal() else (first, last)) if part]

    parts = list(map(lines, names))
    step = math.ceil(len(names) * (max(len(part) for found in parts for part in found) + 1) / LETTERS)
    return {float(place): "\n".join(parts[place]) for place in range(0, len(names), step)}


def shortened(name: str, most: int) -> str:
    """The end of a layer's name, which tells layers apart."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
