"""Charts of series (lines, points or bars with intervals) as SVG pictures of the page.

Placeholder colors become CSS variables, text keeps the font of the page, and ids are unique: one picture serves light
and dark mode, and many share a page.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.optimize import isotonic_regression

from recast.lab.folder.records import ARMS

DEPTHS = 9  # steps of the ordered colors, from the first block (or the earliest run) to the last
Role = str | float
"""Key of a color: an arm, "ink", "muted" or "rule", or a position in an order, from 0 to 1."""

NAMES = ("ink", "muted", "rule", *ARMS, *(f"depth{place}" for place in range(DEPTHS)))
COLORS = {name: f"#0102{place:02x}" for place, name in enumerate(NAMES, start=3)}
"""Placeholders for CSS variables: distinct colors that no chart uses."""

MARKERS = {"parent": "D", "finetuned": "s", "ink": "s"}  # by role; default circles
LOOKS: dict[str, dict[str, Any]] = {
    "line": {"linewidth": 2.0, "markersize": 4.2},
    "bare": {"linewidth": 1.5},
    "dotted": {"linewidth": 1.3, "linestyle": (0, (1, 1.6))},
    "thin": {"linewidth": 0.9, "alpha": 0.75},
    "thick": {"linewidth": 2.6, "zorder": 3},
    "points": {"linestyle": "none", "markersize": 5.5, "zorder": 3},
}
BARS = {"bars": 1.0, "pale bars": 0.4}  # looks of bars and their opacity
MOST_MARKED = 30  # longer lines have no markers
ALL_LABELLED = 12  # of more ends, only the three highest and the three lowest are labeled

SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def color(role: Role) -> str:
    """Return the placeholder of a color."""
    return COLORS[role if isinstance(role, str) else f"depth{min(max(round(role * (DEPTHS - 1)), 0), DEPTHS - 1)}"]


class LegendEntry(NamedTuple):
    """One entry of a legend."""

    label: str
    role: Role
    opacity: float = 1.0


@dataclass(frozen=True)
class Chart:
    """A picture of one panel."""

    name: str
    title: str
    panel: partial[None]  # draws into axes
    size: tuple[float, float] = (4.0, 2.4)  # inches
    right: float = 0.97  # right end of the panel as a share of the width
    keys: Sequence[LegendEntry] = ()

    def draw(self) -> Figure:
        """Draw the picture; call inside `styled`."""
        # fixed margins: a layout engine takes longer than the drawing
        left, bottom = 0.5 / self.size[0], 34 / 72 / self.size[1]
        figure = Figure(self.size)
        axes = figure.add_axes((left, bottom, self.right - left, 0.96 - bottom))
        axes.patch.set_visible(False)
        self.panel(axes)
        return figure

    @cached_property
    def svg(self) -> Markup:
        """The picture as an <svg> element of the page."""
        buffer = io.BytesIO()
        values = self.panel.keywords.get("series", self.panel.keywords)
        with styled(salt=f"{self.name} {self.title} {values}"):
            no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.draw().savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
        root = ElementTree.fromstring(buffer.getvalue())
        for group in root.iter(f"{SVG}g"):
            group.attrib.pop("id", None)  # repeated in every figure, and not referenced
        root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": self.title}
        text = ElementTree.tostring(root, encoding="unicode")
        for name, placeholder in COLORS.items():
            text = text.replace(placeholder, f"var(--{name})")
        return Markup(text)


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Apply our settings to matplotlib's defaults, ignoring the user's matplotlibrc. Charts of different `salt` share
    no id."""
    settings: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,  # a dollar in a name is a dollar
        "font.size": 8.5,
        "axes.formatter.useoffset": False,
        "axes.edgecolor": color("rule"),
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.labelcolor": color("muted"),
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": color("rule"),
        "grid.linewidth": 0.7,
        "xtick.color": color("rule"),
        "ytick.color": color("rule"),
        "xtick.labelcolor": color("muted"),
        "ytick.labelcolor": color("muted"),
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "text.color": color("ink"),
    }
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)  # type: ignore[arg-type]
        yield


class Point(NamedTuple):
    """A value and its interval, drawn as whiskers."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points of one kind: a line, single points, or bars."""

    label: str  # in legends; "" for none
    points: Sequence[Point]
    role: Role = "recast"
    look: str = "line"  # one of `LOOKS` or `BARS`
    end: str = ""  # label at the last point


def series_chart(
    name: str, title: str, series: Sequence[Series], *, size: tuple[float, float] = (4.0, 2.4), right: float = 0.97,
    keys: Sequence[LegendEntry] | None = None, **settings: Any,
) -> Chart:  # fmt: skip
    """Return a chart of series.

    Args:
        keys: the legend; default the labels of the series.
        settings: arguments of `draw_series`.
    """
    if keys is None:
        keys = list(dict.fromkeys(LegendEntry(s.label, s.role, BARS.get(s.look, 1.0)) for s in series if s.label))
    return Chart(name, title, partial(draw_series, series=series, **settings), size, right, keys)


def draw_series(
    axes: Axes,
    series: Sequence[Series],
    *,
    xlabel: str = "",
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
    xticks: Mapping[float, str] | None = None,
    whole_x: bool = False,
    log_x: bool = False,
    xformat: Callable[[float], str] | None = None,
    level: tuple[float, Role] = (math.nan, "muted"),
    switches: Sequence[float] = (),
) -> None:
    """Draw series on a pair of axes.

    Args:
        level: (value, role) of a dashed horizontal line.
        switches: positions of light vertical lines, where layers became attention.
    """
    for edge in switches:
        axes.axvline(edge, color=color("muted"), linewidth=0.7, alpha=0.55, dashes=(2, 2), zorder=1)
    if math.isfinite(level[0]):
        axes.axhline(level[0], color=color(level[1]), linewidth=1.2, dashes=(4, 3))
    for line in series:
        if line.look in LOOKS:
            _draw_line(axes, line)
    _draw_bars(axes, [bars for bars in series if bars.look in BARS])
    axes.set_xlabel(xlabel)
    if log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6 if xformat is None else 4, integer=whole_x))
    if xformat is not None:
        axes.xaxis.set_major_formatter(lambda value, _: xformat(value))
        axes.margins(0.14)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if xticks is not None:
        axes.set_xticks(list(xticks), list(xticks.values()))
    axes.set(xlim=xlim, ylim=ylim)
    _label_ends(axes, [line for line in series if line.end and math.isfinite(line.points[-1].y)])


def _draw_line(axes: Axes, line: Series) -> None:
    marked = line.look == "points" or (line.look == "line" and len(line.points) <= MOST_MARKED)
    marker = MARKERS.get(str(line.role), "o") if marked else None
    shade = color(line.role)
    look = {"zorder": 2.7 if line.role == "recast" else 2.5} | LOOKS[line.look]
    axes.plot(
        [point.x for point in line.points], [point.y for point in line.points], color=shade, marker=marker, **look
    )
    for point in line.points if marked else ():
        if point.low is not None and point.high is not None:
            axes.vlines(point.x, point.low, point.high, color=shade, linewidth=1.2, alpha=0.7, zorder=2.4)


def _draw_bars(axes: Axes, groups: Sequence[Series]) -> None:
    """Draw several series of bars side by side."""
    width = 0.72 / max(len(groups), 1)
    for index, bars in enumerate(groups):
        for point in bars.points:
            x = point.x + (index - (len(groups) - 1) / 2) * width
            axes.bar(x, point.y, 0.9 * width, color=color(bars.role), alpha=BARS[bars.look], linewidth=0)
            if point.low is not None and point.high is not None:
                axes.vlines(x, point.low, point.high, color=color("ink"), linewidth=1.1)
        axes.axhline(0, color=color("ink"), linewidth=0.9)
        axes.tick_params(axis="x", length=0)


def _label_ends(axes: Axes, series: Sequence[Series]) -> None:
    """Write the label of each series at its end, moved apart to avoid overlap; the outermost six of many."""
    low, high = axes.get_ylim()
    order = sorted(series, key=lambda line: line.points[-1].y)
    if len(order) > ALL_LABELLED:
        order = order[:3] + order[-3:]
    height = axes.bbox.height / axes.get_figure(root=True).dpi * 72  # type: ignore[union-attr]
    places = spread([(line.points[-1].y - low) / (high - low) for line in order], 8.6 / height)
    for line, place in zip(order, places, strict=True):
        arrow = {"arrowstyle": "-", "color": color(line.role), "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        look: dict[str, Any] = {"va": "center_baseline", "fontsize": 7.2, "color": color("muted"), "arrowprops": arrow}
        look |= {"textcoords": ("offset points", "axes fraction"), "annotation_clip": False}
        axes.annotate(line.end, line.points[-1][:2], xytext=(13, place), **look)


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move ascending positions in 0..1 as little as possible (least squares) so that neighbors are `gap` apart.

    This is an isotonic regression of the positions minus `gap` times their index.
    """
    if not positions:
        return []
    offsets = gap * np.arange(len(positions))
    flat = isotonic_regression(positions - offsets).x
    return (flat.clip(0, max(1 - offsets[-1], 0)) + offsets).tolist()


def shortened(name: str, most: int, start: int = 0) -> str:
    """Shorten a name to its first `start` characters and its end, which distinguishes layers."""
    return name if len(name) <= most else f"{name[:start]}…{name[start + 1 - most :]}"
