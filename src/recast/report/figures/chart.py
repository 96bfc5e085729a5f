"""A chart: its title, its words, how it is drawn, and the numbers that it shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recast.report.figures.style import PAGE, Hit, Palette, inline_svg, new_axes, new_figure, styled


@dataclass(frozen=True)
class Drawing:
    figure: Figure
    hits: Sequence[Hit] = ()


DrawAxes = Callable[[Axes, Palette], list[Hit]]
"""Draws into axes that stand; what can be pointed at."""
Draw = Callable[[Palette], Drawing]
"""Draws the same picture for the page and for paper; called inside `styled`."""


@dataclass(frozen=True)
class Key:
    """One entry of a legend: a role of the palette, an arm or a depth from 0 to 1."""

    label: str
    arm: str = ""
    depth: float = 0.0


@dataclass(frozen=True)
class Data:
    """The numbers behind a chart, one observation a row."""

    columns: tuple[str, ...]
    rows: list[tuple[str | float | int | None, ...]]


@dataclass(frozen=True)
class Chart:
    name: str
    """Stem of its files: letters, digits, `-` and `_`."""
    title: str
    story: str
    """What is seen, for readers who do not see it."""
    draw: Draw
    data: Data
    keys: Sequence[Key] = field(default_factory=tuple)
    note: str = ""
    panel: DrawAxes | None = None
    """The same without a figure of its own, for a figure of several panels."""

    @cached_property
    def svg(self) -> Markup:
        """The picture for the page."""
        with styled(PAGE):
            drawing = self.draw(PAGE)
            return inline_svg(drawing.figure, self.story, drawing.hits)


def alone(panel: DrawAxes, size: tuple[float, float]) -> Draw:
    """One panel as a figure of `size` inches."""

    def draw(palette: Palette) -> Drawing:
        figure = new_figure(size)
        return Drawing(figure, panel(new_axes(figure), palette))

    return draw


def joined(name: str, title: str, charts: Sequence[Chart], columns: int = 3) -> Chart:
    """Several charts of one kind as the panels of one figure, each under its own title."""
    panels = [(chart.title, chart.panel) for chart in charts if chart.panel is not None]
    across = min(columns, len(panels))
    down = math.ceil(len(panels) / across)
    width, height, title_room = 3.1, 2.2, 0.2

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((width * across, (height + title_room) * down))
        for place, (heading, panel) in enumerate(panels):
            row, column = divmod(place, across)
            left, bottom = (column + 0.14) / across, 1 - (row + 1) / down + 0.48 / (height + title_room) / down
            tall = (height - 0.62) / (height + title_room) / down
            axes = figure.add_axes((left, bottom, 0.8 / across, tall))
            panel(axes, palette)
            axes.set_title(heading, fontsize=8.5, loc="left", color=palette.ink)
        return Drawing(figure)

    first = charts[0]
    rows = [(chart.title, *row) for chart in charts for row in chart.data.rows]
    return Chart(
        name,
        title,
        " ".join(chart.story for chart in charts),
        draw,
        Data(("panel", *first.data.columns), list(rows)),
        first.keys,
    )
