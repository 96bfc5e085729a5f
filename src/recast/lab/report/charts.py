"""Charts as SVG pictures of the page.

Placeholder colors become CSS variables, text keeps the font of the page, and ids are unique: one picture serves light
and dark mode, and many share a page.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure

from recast.lab.records import ARMS

DEPTHS = 9  # steps of the ordered colors, from the first block (or the earliest run) to the last
Role = str | float
"""Key of a color: an arm, "ink", "muted" or "rule", or a position in an order, from 0 to 1."""

NAMES = ("ink", "muted", "rule", *ARMS, *(f"depth{place}" for place in range(DEPTHS)))
COLORS = {name: f"#0102{place:02x}" for place, name in enumerate(NAMES, start=3)}
"""Placeholders for CSS variables: distinct colors that no chart uses."""

SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def color(role: Role) -> str:
    """Return the placeholder of a color."""
    return COLORS[role if isinstance(role, str) else f"depth{min(max(round(role * (DEPTHS - 1)), 0), DEPTHS - 1)}"]


class Key(NamedTuple):
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
    keys: Sequence[Key] = ()

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
