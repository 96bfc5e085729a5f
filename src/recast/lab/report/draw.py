"""Draw charts of series (lines, points or bars with intervals) and heat maps."""

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

MARKERS = {"parent": "D", "finetuned": "s", "ink": "s"}  # by role; default circles
LOOKS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2.0, "markersize": 4.2},
    "bare": {"linewidth": 1.5},
    "dotted": {"linewidth": 1.3, "linestyle": (0, (1, 1.6))},
    "thin": {"linewidth": 0.9, "alpha": 0.75},
    "thick": {"linewidth": 2.6, "zorder": 3},
    "points": {"linestyle": "none", "markersize": 5.5, "zorder": 3},
    "rings": {"linestyle": "none", "markersize": 7, "markerfacecolor": "none", "markeredgewidth": 1.3, "zorder": 4},
}
BARS = {"bars": 1.0, "pale bars": 0.4}  # looks of bars and their opacity
SINGLE = ("points", "rings")  # looks without a line
MOST_MARKED = 30  # longer lines have neither markers nor tooltips
MOST_TICKS = 8  # with more, matplotlib chooses the ticks
ALL_LABELLED = 12  # of more ends, only the three highest and the three lowest are labeled
MOST_NAMED = 16  # of more layers, only every n-th is named on an axis of a heat map
LETTERS = 48  # that fit side by side under an axis
MOST_HITS = 400  # larger heat maps have no tooltips; their values are in the folder of figures


class Point(NamedTuple):
    """A value and its interval, drawn as whiskers."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    place: str = ""  # text for `x`, if not the number

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Series:
    """Points of one kind: a line, single points, or bars."""

    label: str  # in tooltips and legends; "" for none
    points: Sequence[Point]
    role: Role = "recast"
    look: str = "line"  # one of `LOOKS` or `BARS`
    end: str = ""  # label at the last point


def series_chart(
    name: str, title: str, series: Sequence[Series], table: tuple[Sequence[str], Cells] | str, *, subject: str = "",
    note: str = "", size: tuple[float, float] = (4.0, 2.4), right: float = 0.97, keys: Sequence[Key] | None = None,
    **settings: Any,
) -> Chart:  # fmt: skip
    """Return a chart of series.

    Args:
        table: (columns, rows) of the CSV file; for arms, the name of the column of x.
        keys: the legend; default the labels of the series.
        settings: arguments of `draw_series`.
    """
    rows: Cells
    if isinstance(table, str):
        columns: Sequence[str] = ("arm", "label", table, "top1", "low", "high")
        rows = [(line.role, line.label, *point[:4]) for line in series for point in line.points]
    else:
        columns, rows = table
    if keys is None:
        keys = list(dict.fromkeys(Key(s.label, s.role, BARS.get(s.look, 1.0)) for s in series if s.label))
    story = in_words(subject or title, series, settings.get("unit", ""), note, settings.get("xlabel", ""))
    panel = partial(draw_series, series=series, **settings)
    return Chart(name, title, story, columns, rows, panel, size, right, keys, note)


def in_words(title: str, series: Sequence[Series], unit: str = "", note: str = "", xlabel: str = "epoch") -> str:
    """Describe a chart: the ends of its lines, and its bars; of unlabeled curves the first and the last."""

    def value(point: Point) -> str:
        place = point.place or f"{'epoch ' if xlabel == 'epoch' else ''}{point.x:g}"
        return f"{formats.significant(point.y, 4)}{unit} at {place}"

    labeled = [line for line in series if line.label and line.points]
    shown = [line for line in labeled if line.look in ("line", "thick", *BARS) or len(line.points) == 1]
    parts = []
    for line in shown or [*labeled[:1], *labeled[1:][-1:]]:
        if line.look in ("line", "bare") and len(line.points) > 1:
            parts.append(f"{line.label} from {value(line.points[0])} to {value(line.points[-1])}")
        else:
            parts.append(f"{line.label} {', '.join(map(value, line.points))}")
    return " ".join(part for part in (f"{title}.", f"{'; '.join(parts)}." if parts else "", note) if part)


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
    """Draw series on a pair of axes and return their tooltips.

    Args:
        unit: appended to values in tooltips.
        level: (value, role) of a dashed horizontal line.
        switches: positions of light vertical lines, where layers became attention.
    """
    for edge in switches:
        axes.axvline(edge, color=palette["muted"], linewidth=0.7, alpha=0.55, dashes=(2, 2), zorder=1)
    if math.isfinite(level[0]):
        axes.axhline(level[0], color=palette.color(level[1]), linewidth=1.2, dashes=(4, 3))
    bars = [line for line in series if line.look in BARS]
    hits = [hit for line in series if line not in bars for hit in _line(axes, line, palette, xlabel, unit)]
    hits += [hit for index in range(len(bars)) for hit in _bars(axes, bars, index, palette, unit)]
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
    _label_ends(axes, [line for line in series if line.end and math.isfinite(line.points[-1].y)], palette)
    return hits


def _line(axes: Axes, line: Series, palette: Palette, xlabel: str, unit: str) -> list[Hit]:
    marked = line.look in SINGLE or (line.look == "line" and len(line.points) <= MOST_MARKED)
    marker = "o" if line.look == "rings" else MARKERS.get(str(line.role), "o") if marked else None
    color = palette.color(line.role)
    look = {"zorder": 2.7 if line.role == "recast" else 2.5} | LOOKS[line.look]
    axes.plot(
        [point.x for point in line.points], [point.y for point in line.points], color=color, marker=marker, **look
    )
    for point in line.points if marked else ():
        if point.interval is not None:
            axes.vlines(point.x, *point.interval, color=color, linewidth=1.2, alpha=0.7, zorder=2.4)
    pointed_at = line.points if marked else line.points[-1:] if line.look == "bare" else ()
    return [
        hit for point in pointed_at for hit in _hit(axes, line, point, point.place or f"{xlabel} {point.x:g}", unit)
    ]


def _hit(axes: Axes, line: Series, point: Point, where: str, unit: str, x: float | None = None) -> list[Hit]:
    if not line.label or not math.isfinite(point.y):
        return []
    text = f"{line.label}, {where}: {formats.significant(point.y, 4)}{unit}"
    text += f" ({formats.interval(*point.interval)})" if point.interval else ""
    return [Hit(axes, float(point.x if x is None else x), float(point.y), text)]


def _bars(axes: Axes, bars: Sequence[Series], index: int, palette: Palette, unit: str) -> list[Hit]:
    line, width, hits = bars[index], 0.72 / len(bars), list[Hit]()
    for point in line.points:
        x = point.x + (index - (len(bars) - 1) / 2) * width
        alpha = BARS[line.look]
        axes.bar(x, point.y, 0.9 * width, color=palette.color(line.role), alpha=alpha, linewidth=0)
        if point.interval is not None:
            axes.vlines(x, *point.interval, color=palette["ink"], linewidth=1.1)
        hits += _hit(axes, line, point, point.place, unit, x)
    axes.axhline(0, color=palette["ink"], linewidth=0.9)
    axes.tick_params(axis="x", length=0)
    return hits


def _label_ends(axes: Axes, series: Sequence[Series], palette: Palette) -> None:
    """Write the label of each series at its end, moved apart to avoid overlap; the outermost six of many."""
    low, high = axes.get_ylim()
    order = sorted(series, key=lambda line: line.points[-1].y)
    if len(order) > ALL_LABELLED:
        order = order[:3] + order[-3:]
    height = axes.bbox.height / axes.get_figure(root=True).dpi * 72  # type: ignore[union-attr]
    places = spread([(line.points[-1].y - low) / (high - low) for line in order], 8.6 / height)
    for line, place in zip(order, places, strict=True):
        arrow = {"arrowstyle": "-", "color": palette.color(line.role), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate(
            line.end, line.points[-1][:2], xytext=(13, place), textcoords=("offset points", "axes fraction"),
            va="center_baseline", fontsize=7.2, color=palette["muted"], annotation_clip=False, arrowprops=arrow,
        )  # fmt: skip


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move ascending positions in 0..1 as little as possible (least squares) so that neighbors are `gap` apart.

    This is an isotonic regression of the positions minus `gap` times their index.
    """
    if not positions:
        return []
    flat = isotonic_regression([position - place * gap for place, position in enumerate(positions)]).x
    highest = max(1.0 - gap * (len(positions) - 1), 0.0)
    return [float(min(max(value, 0.0), highest)) + place * gap for place, value in enumerate(flat)]


def draw_heat_map(
    axes: Axes, palette: Palette, values: np.ndarray, columns: Sequence[str], rows: Sequence[str], a: str, b: str
) -> list[Hit]:
    """Draw values from 0 to 1, the first row at the bottom, with a color bar; the colors are the same in dark mode."""
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
    """Return names of layers for an axis, the last component on its own line; only every n-th, to avoid overlap."""

    def lines(name: str) -> list[str]:
        first, _, last = name.rpartition(".")
        return [shortened(part, 12) for part in ((name,) if last.isdecimal() else (first, last)) if part]

    parts = list(map(lines, names))
    step = math.ceil(len(names) * (max(len(part) for texts in parts for part in texts) + 1) / LETTERS)
    return {float(place): "\n".join(parts[place]) for place in range(0, len(names), step)}


def shortened(name: str, most: int) -> str:
    """Shorten the name of a layer to its end, which distinguishes layers."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
