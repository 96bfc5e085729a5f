"""Nearest training images of `recast explain RUN --neighbours` as HTML."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLOURS = {"right": "#1a7f37", "coarse class right": "#b26a00", "wrong": "#b3261e", "": "#8a9099"}
MARKS = {"right": "✓", "coarse class right": "~", "wrong": "✗", "": ""}


def png(pixels: NDArray[np.uint8], most: int | None = None) -> str:
    """Return pixels (height, width, 3 or 4) as the data: URI of a PNG, shrunk to sides of at most `most`."""
    buffer = io.BytesIO()
    picture = Image.fromarray(pixels)
    if most is not None:
        picture.thumbnail((most, most))
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


@dataclass(frozen=True)
class Shown:
    """An image and its class; the coarse class is empty if the data have none."""

    picture: str  # data: URI of a PNG
    name: str
    label: str
    coarse: str = ""
    similarity: float = 1.0  # cosine with the query

    def beside(self, query: Shown) -> str:
        """Compare the class with that of the query: a key of `MARKS`, empty if the query has no label."""
        if not query.label:
            return ""
        if self.label == query.label:
            return "right"
        return "coarse class right" if self.coarse and self.coarse == query.coarse else "wrong"


@dataclass(frozen=True)
class Query:
    """An image and its neighbours by arm, the nearest first."""

    image: Shown
    nearest: dict[str, list[Shown]]


def draw_neighbours(queries: Sequence[Query]) -> str:
    """Return HTML: a row of pictures for every query and arm, each with its class, marked right or wrong."""
    parts = []
    for query in queries:
        rows = []
        for arm, images in query.nearest.items():
            right = sum(image.beside(query.image) == "right" for image in images)
            count = f", {right} of {len(images)} right" if query.image.label else ""
            figures = "".join(_figure(image, image.beside(query.image)) for image in images)
            rows.append(f"<p>{escape(arm)}{count}</p><div style='display:flex;flex-wrap:wrap;gap:4px'>{figures}</div>")
        parts.append(
            f"<article class='card' style='margin:0 0 20px'><div style='display:flex;gap:20px;flex-wrap:wrap'>"
            f"{_figure(query.image, '', is_query=True)}<div style='flex:1;min-width:0'>{''.join(rows)}</div></div>"
            "</article>"
        )
    lead = (
        "Training images with the highest cosine similarity of features to the image on the left, the nearest first. "
        "Green ✓: same class; amber ~: same coarse class only; red ✗: another class."
    )
    return f"<p class='lead'>{lead}</p>{''.join(parts)}"


def _figure(image: Shown, verdict: str, is_query: bool = False) -> str:
    side, under = 112 if is_query else 74, escape((image.label or "class unknown").replace("_", " "))
    coarse = f"{escape(image.coarse.replace('_', ' '))}<br>" if image.coarse else ""
    last = escape(image.name) if is_query else f"{image.similarity:.2f}"
    alt = f"{under}{', ' + verdict if verdict else ''}"
    return (
        f"<figure style='margin:0;width:{side + 8}px;font-size:11px;line-height:1.3;overflow-wrap:anywhere'>"
        f"<img src='{image.picture}' alt='{alt}' title='{escape(image.name)}' style='width:{side}px;height:{side}px;"
        f"object-fit:contain;image-rendering:pixelated;border:4px solid {COLOURS[verdict]}'>"
        f"<figcaption style='font:inherit'><b>{MARKS[verdict]} {under}</b><br>{coarse}{last}</figcaption></figure>"
    )
