"""How matplotlib draws: for the page in the page's own colours and font, for paper in dark ink on white.

On the page, place-holder colours become CSS variables, text stays text in the page's font and only ids that are
referred to are kept, made the picture's own: one picture serves light and dark mode, and many share a page.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

DEPTHS = 9
"""Steps of the ordered colours, from the first block (or the earliest run) to the last."""


@dataclass(frozen=True)
class Palette:
    """What a figure may be coloured with."""

    ink: str
    muted: str
    rule: str
    arms: dict[str, str]
    depths: tuple[str, ...]

    def depth(self, share: float) -> str:
        """The ordered colour of `share` from 0 to 1."""
        return self.depths[min(max(round(share * (DEPTHS - 1)), 0), DEPTHS - 1)]


# Place-holders: no two alike, none a colour anybody would choose.
PAGE = Palette(
    ink="#010203",
    muted="#010204",
    rule="#010205",
    arms={"parent": "#010206", "finetuned": "#010207", "recast": "#010208"},
    depths=tuple(f"#0103{index:02x}" for index in range(DEPTHS)),
)
# Okabe and Ito's blue and vermilion; the ordered ones are cividis without its lightest end, which paper swallows.
PAPER = Palette(
    ink="#1d2126",
    muted="#4c535c",
    rule="#d9d7d0",
    arms={"parent": "#70777f", "finetuned": "#0a6cb0", "recast": "#d55e00"},
    depths=tuple(mpl.colors.to_hex(mpl.colormaps["cividis"](0.88 * index / (DEPTHS - 1))) for index in range(DEPTHS)),
)
VARIABLES = {
    PAGE.ink: "var(--ink)",
    PAGE.muted: "var(--muted)",
    PAGE.rule: "var(--rule)",
    **{color: f"var(--{arm})" for arm, color in PAGE.arms.items()},
    **{color: f"var(--depth{index})" for index, color in enumerate(PAGE.depths)},
}


@dataclass(frozen=True)
class Hit:
    """A point that says its value where the reader points at it."""

    axes: Axes
    x: float
    y: float
    text: str


@contextmanager
def styled(palette: Palette) -> Iterator[None]:
    """Our settings on matplotlib's defaults: a user's own matplotlibrc does not reach the report."""
    settings: dict[str, Any] = {
        "svg.fonttype": "none" if palette is PAGE else "path",
        "svg.hashsalt": "recast",
        "font.size": 8.5,
        "axes.formatter.useoffset": False,
        "axes.edgecolor": palette.rule,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.labelcolor": palette.muted,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": palette.rule,
        "grid.linewidth": 0.7,
        "xtick.color": palette.rule,
        "ytick.color": palette.rule,
        "xtick.labelcolor": palette.muted,
        "ytick.labelcolor": palette.muted,
        "ytick.major.size": 0,
        "xtick.major.size": 3,
        "text.color": palette.ink,
        "path.simplify": True,
    }
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(settings)  # type: ignore[arg-type]
        yield


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of (width, height) in inches."""
    figure = Figure(figsize=size)
    FigureCanvasSVG(figure)
    return figure


def new_axes(figure: Figure, right: float = 0.97, left: float = 36, bottom: float = 34, top: float = 0.96) -> Axes:
    """The axes of a figure of one panel; `left` and `bottom` in points, `right` and `top` as shares of the figure.

    Fixed margins: a layout engine costs more time than the whole drawing.
    """
    width, height = (72 * side for side in figure.get_size_inches())
    axes = figure.add_axes((left / width, bottom / height, right - left / width, top - bottom / height))
    axes.patch.set_visible(False)
    return axes


def inline_svg(figure: Figure, description: str, hits: Sequence[Hit] = ()) -> Markup:
    """The figure as an <svg> element for the page; what `hits` say is shown where the reader points."""
    buffer = io.StringIO()
    empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    # A hundredth of a point is finer than any screen, and half the bytes.
    text = re.sub(r' d="[^"]+"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    prefix = f"f{hashlib.sha1((description + text).encode()).hexdigest()[:8]}-"
    used = set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text))
    text = re.sub(r' id="([^"]+)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in used else "", text)
    text = text.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
    for placeholder, variable in VARIABLES.items():
        text = text.replace(placeholder, variable)
    view = re.search(r'viewBox="[^"]+"', text)
    assert view is not None
    space = 'xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {space} {view[0]} role="img" aria-label="{escape(description)}">'
    body = text[text.index(">") + 1 :].strip().removesuffix("</svg>")
    return Markup(opening + body + _hit_circles(figure, hits) + "</svg>")


def _hit_circles(figure: Figure, hits: Sequence[Hit]) -> str:
    """Invisible circles in the picture's units, each with its text: the browser shows it even without a script."""
    width, height = (72 * side for side in figure.get_size_inches())
    circles = []
    for hit in hits:
        across, up = figure.transFigure.inverted().transform(hit.axes.transData.transform((hit.x, hit.y)))
        place = f'cx="{across * width:.1f}" cy="{(1 - up) * height:.1f}"'
        circles.append(f'<circle class="hit" {place} r="6"><title>{escape(hit.text)}</title></circle>')
    return "".join(circles)
