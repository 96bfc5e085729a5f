"""RUN/neighbours.json, which `recast explain RUN --neighbours` writes: images, the training images nearest to them, and
the two as HTML, for the page of that command and for the report."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from recast.config import read
from recast.errors import RecastError
from recast.files import read_json

FILE = "neighbours.json"
PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")
COLOURS = {"right": "#1a7f37", "coarse class right": "#b26a00", "wrong": "#b3261e", "": "#8a9099"}
MARKS = {"right": "✓", "coarse class right": "~", "wrong": "✗", "": ""}


def png(pixels: NDArray[np.uint8], most: int | None = None) -> str:
    """(height, width, 3 or 4) as a data: URI; shrunk to sides of `most` pixels where they are longer."""
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    if most is not None:
        picture.thumbnail((most, most))
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Shown:
    """An image and its class; the coarse class is empty where the data have none."""

    picture: str
    """A data: URI of a PNG."""
    name: str
    label: str
    coarse: str = ""
    similarity: float = 1.0
    """Cosine with the query."""

    def __post_init__(self) -> None:
        if not PNG.fullmatch(self.picture):
            raise RecastError("a picture must be a data: URI of a PNG")

    def beside(self, query: Shown) -> str:
        """What this neighbour says of the query's class; empty where nobody knows that."""
        if not query.label:
            return ""
        if self.label == query.label:
            return "right"
        return "coarse class right" if self.coarse and self.coarse == query.coarse else "wrong"


@dataclass(frozen=True)
class Query:
    """An image and its nearest by arm, nearest first."""

    image: Shown
    nearest: dict[str, list[Shown]]


@dataclass(frozen=True)
class Neighbours:
    """What the file holds."""

    queries: list[Query]


def read_neighbours(path: Path) -> Neighbours:
    """Raises RecastError for another file."""
    return read(Neighbours, read_json(path), str(path))


def draw_neighbours(found: Neighbours) -> str:
    """HTML: a row of pictures for every query and arm, each with its class, framed and marked right or wrong."""
    parts = []
    for query in found.queries:
        rows = []
        for arm, images in query.nearest.items():
            right = sum(one.beside(query.image) == "right" for one in images)
            count = f", {right} of {len(images)} right" if query.image.label else ""
            figures = "".join(_figure(one, one.beside(query.image)) for one in images)
            rows.append(f"<p>{escape(arm)}{count}</p><div style='display:flex;flex-wrap:wrap;gap:4px'>{figures}</div>")
        parts.append(
            f"<article class='card' style='margin:0 0 20px'><div style='display:flex;gap:20px;flex-wrap:wrap'>"
            f"{_figure(query.image, '', is_query=True)}<div style='flex:1;min-width:0'>{''.join(rows)}</div></div>"
            "</article>"
        )
    lead = (
        "The training images whose features are nearest to those of the image on the left (cosine), nearest first. "
        "Green and ✓: of its class; amber and ~: only its coarse class is right; red and ✗: another class."
    )
    return f"<p class='lead'>{lead}</p>{''.join(parts)}"


def _figure(one: Shown, verdict: str, is_query: bool = False) -> str:
    side, under = 112 if is_query else 74, escape((one.label or "class unknown").replace("_", " "))
    coarse = f"{escape(one.coarse.replace('_', ' '))}<br>" if one.coarse else ""
    last = escape(one.name) if is_query else f"{one.similarity:.2f}"
    alt = f"{under}{', ' + verdict if verdict else ''}"
    return (
        f"<figure style='margin:0;width:{side + 8}px;font-size:11px;line-height:1.3;overflow-wrap:anywhere'>"
        f"<img src='{one.picture}' alt='{alt}' title='{escape(one.name)}' style='width:{side}px;height:{side}px;"
        f"object-fit:contain;image-rendering:pixelated;border:4px solid {COLOURS[verdict]}'>"
        f"<figcaption style='font:inherit'><b>{MARKS[verdict]} {under}</b><br>{coarse}{last}</figcaption></figure>"
    )
