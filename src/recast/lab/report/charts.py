"""Charts: their numbers, and their picture, for the page or for paper.

On the page, placeholder colors become CSS variables, text keeps the font of the page, and ids are unique: one picture
serves light and dark mode, and many share a page. On paper a chart is dark ink on white.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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

SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

Panel = Callable[[Axes, Palette], None]
"""Draws into existing axes."""


class Key(NamedTuple):
    """One entry of a legend."""

    label: str
    role: Role
    opacity: float = 1.0


@dataclass(frozen=True)
class Chart:
    """A picture of one panel."""

    name: str  # stem of its files: letters, digits, `-` and `_`
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # the numbers behind it, one observation per row
    panel: Panel
    size: tuple[float, float] = (4.0, 2.4)  # inches
    right: float = 0.97  # right end of the panel as a share of the width
    keys: Sequence[Key] = ()

    def draw(self, palette: Palette) -> Figure:
        """Draw the picture, for page or paper; call inside `styled`."""
        # fixed margins: a layout engine takes longer than the drawing
        left, bottom = 0.5 / self.size[0], 34 / 72 / self.size[1]
        figure = Figure(self.size)
        axes = figure.add_axes((left, bottom, self.right - left, 0.96 - bottom))
        axes.patch.set_visible(False)
        self.panel(axes, palette)
        return figure

    @cached_property
    def svg(self) -> Markup:
        """The picture as an <svg> element of the page."""
        buffer = io.BytesIO()
        with styled(PAGE, salt=f"{self.name} {self.title} {self.rows}"):
            no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            self.draw(PAGE).savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
        root = ElementTree.fromstring(buffer.getvalue())
        for group in root.iter(f"{SVG}g"):
            group.attrib.pop("id", None)  # repeated in every figure, and not referenced
        root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": self.title}
        text = ElementTree.tostring(root, encoding="unicode")
        for name, placeholder in PAGE.items():
            text = text.replace(placeholder, f"var(--{name})")
        return Markup(text)


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
