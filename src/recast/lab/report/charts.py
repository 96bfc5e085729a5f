"""Charts: their text, their numbers, and their picture, for the page or for paper.

On the page, placeholder colors become CSS variables, text keeps the font of the page, and ids are unique: one picture
serves light and dark mode, and many share a page. On paper a chart is dark ink on white.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recast.analysis.records import FourierLine, HeadLine, SimilarityLine

DEPTHS = 9  # steps of the ordered colors, from the first block (or the earliest run) to the last
Role = str | float
"""Key of a color: an arm, "ink", "muted" or "rule", or a position in an order, from 0 to 1."""


class Palette(dict[str, str]):
    """The colors of a figure: of the arms, of ink, muted and rule, and of depth0 to depth8."""

    def color(self, role: Role) -> str:
        return self[role if isinstance(role, str) else f"depth{min(max(round(role * (DEPTHS - 1)), 0), DEPTHS - 1)}"]


# Okabe and Ito's blue and vermilion; ordered colors are cividis without its light end, which is invisible on paper
DEPTH_COLORS = [mpl.colors.to_hex(mpl.colormaps["cividis"](0.88 * place / (DEPTHS - 1))) for place in range(DEPTHS)]
PAPER = Palette(
    ink="#1d2126",
    muted="#4c535c",
    rule="#d9d7d0",
    parent="#70777f",
    finetuned="#0a6cb0",
    recast="#d55e00",
    **{f"depth{place}": color for place, color in enumerate(DEPTH_COLORS)},
)
# placeholders for CSS variables: distinct colors that no chart uses
PAGE = Palette({name: f"#0102{place:02x}" for place, name in enumerate(PAPER, start=3)})
VARIABLES = {color: f"var(--{name})" for name, color in PAGE.items()}

SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


class Hit(NamedTuple):
    """A point with a tooltip."""

    axes: Axes
    x: float
    y: float
    text: str


Panel = Callable[[Axes, Palette], list[Hit]]
"""Draws into existing axes and returns the tooltips."""
Cells = Sequence[Sequence[Any]]
Line = FourierLine | HeadLine | SimilarityLine


class Key(NamedTuple):
    """One entry of a legend."""

    label: str
    role: Role
    opacity: float = 1.0


@dataclass(frozen=True)
class Chart:
    """A picture of one panel, or of several with a `layout`."""

    name: str  # stem of its files: letters, digits, `-` and `_`
    title: str
    story: str  # description for screen readers
    columns: Sequence[str]
    rows: Cells  # the numbers behind it, one observation per row
    panel: Panel = lambda axes, palette: []
    size: tuple[float, float] = (4.0, 2.4)  # inches
    right: float = 0.97  # right end of the panel as a share of the width
    keys: Sequence[Key] = ()
    note: str = ""
    layout: Callable[[Palette], Figure] | None = None

    def draw(self, palette: Palette) -> tuple[Figure, list[Hit]]:
        """Draw the picture, for page or paper; call inside `styled`."""
        if self.layout is not None:
            return self.layout(palette), []
        # fixed margins: a layout engine takes longer than the drawing
        left, bottom = 0.5 / self.size[0], 34 / 72 / self.size[1]
        figure = Figure(self.size)
        axes = figure.add_axes((left, bottom, self.right - left, 0.96 - bottom))
        axes.patch.set_visible(False)
        return figure, self.panel(axes, palette)

    @cached_property
    def svg(self) -> Markup:
        """The picture as an <svg> element of the page."""
        with styled(PAGE, salt=f"{self.story} {self.rows}"):
            return _inline_svg(*self.draw(PAGE), self.story)


def lines_table(lines: Sequence[Line]) -> tuple[Sequence[str], Cells]:
    """Return (columns, rows) of records."""
    return [column.name for column in fields(lines[0])], [astuple(line) for line in lines]


def joined(name: str, title: str, charts: Sequence[Chart]) -> Chart:
    """Return charts of one kind as the panels of one figure, each with its title."""
    across = min(3, len(charts))
    down = math.ceil(len(charts) / across)

    def layout(palette: Palette) -> Figure:
        figure = Figure((3.1 * across, 2.4 * down))
        grid = figure.subplots(down, across, squeeze=False)
        figure.subplots_adjust(0.14 / across, 0.2 / down, 1 - 0.06 / across, 1 - 0.12 / down, wspace=0.25, hspace=0.55)
        for axes, chart in zip(grid.flat, charts, strict=False):
            chart.panel(axes, palette)
            axes.set_title(chart.title, fontsize=8.5, loc="left", color=palette["ink"])
        for axes in grid.flat[len(charts) :]:
            axes.remove()
        return figure

    rows = [(chart.title, *row) for chart in charts for row in chart.rows]
    story = " ".join(chart.story for chart in charts)
    return Chart(name, title, story, ("panel", *charts[0].columns), rows, keys=charts[0].keys, layout=layout)


@contextmanager
def styled(palette: Palette, salt: str = "recast") -> Iterator[None]:
    """Apply our settings to matplotlib's defaults, ignoring the user's matplotlibrc. Charts of different `salt` share
    no id."""
    settings: dict[str, Any] = {
        "svg.fonttype": "none" if palette is PAGE else "path",
        "svg.hashsalt": salt,
        "text.parse_math": False,  # a dollar in a name is a dollar
        "font.size": 8.5,
        "axes.formatter.useoffset": False,
        "axes.edgecolor": palette["rule"],
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.labelcolor": palette["muted"],
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": palette["rule"],
        "grid.linewidth": 0.7,
        "xtick.color": palette["rule"],
        "ytick.color": palette["rule"],
        "xtick.labelcolor": palette["muted"],
        "ytick.labelcolor": palette["muted"],
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "text.color": palette["ink"],
    }
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)  # type: ignore[arg-type]
        yield


def _inline_svg(figure: Figure, hits: Sequence[Hit], description: str) -> Markup:
    """Return the figure as an <svg> element with an invisible circle per hit, whose tooltip works without a script."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    root = ElementTree.fromstring(buffer.getvalue())
    for group in root.iter(f"{SVG}g"):
        group.attrib.pop("id", None)  # repeated in every figure, and not referenced
    width, height = (72 * side for side in figure.get_size_inches())
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": description}
    for hit in hits:
        across, up = figure.transFigure.inverted().transform(hit.axes.transData.transform((hit.x, hit.y)))
        place = {"cx": f"{across * width:.1f}", "cy": f"{(1 - up) * height:.1f}"}
        circle = ElementTree.SubElement(root, f"{SVG}circle", {"class": "hit", **place, "r": "6"})
        ElementTree.SubElement(circle, f"{SVG}title").text = hit.text
    text = ElementTree.tostring(root, encoding="unicode")
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, variable)
    return Markup(text)
