"""How matplotlib draws for the page: inline SVG in the page's own colours and font.

Place-holder colours become CSS variables of the page, text stays text in the page's font and only ids that are referred
to are kept, made the picture's own: one picture serves light and dark mode, and many share a page.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Place-holders: no two alike, none a colour anybody would choose.
INK, MUTED, RULE = "#010203", "#010204", "#010205"
ARM_COLORS = {"parent": "#010206", "finetuned": "#010207", "recast": "#010208"}
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    ARM_COLORS["parent"]: "var(--parent)",
    ARM_COLORS["finetuned"]: "var(--finetuned)",
    ARM_COLORS["recast"]: "var(--recast)",
}
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "recast",
    "font.size": 8.5,
    "axes.edgecolor": RULE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "text.color": INK,
    "path.simplify": True,
}


@contextmanager
def page_style() -> Iterator[None]:
    """Our settings on matplotlib's defaults: a user's own matplotlibrc does not reach the report."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of (width, height) in inches that is written as SVG."""
    figure = Figure(figsize=size)
    FigureCanvasSVG(figure)
    return figure


def inline_svg(figure: Figure, description: str) -> Markup:
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
    return Markup(opening + text[text.index(">") + 1 :].strip())
