"""What the models say of the same images, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from colorsys import hsv_to_rgb
from pathlib import Path

import numpy as np
from PIL import Image

from recast.files import replaced
from recast.lab.evaluation.context import Batch, Context, Source, sampled
from recast.modes import in_eval

GAP = ((2, 2), (2, 2), (0, 0))
"""White pixels around a panel."""
AMONG = 64
"""Images that the drawn ones are chosen from."""
Panels = Callable[[Batch], Iterator[tuple[float, list[np.ndarray]]]]
"""How much the last two models differ on an image, and its panels (H, W, 3) in [0, 1], of every image of a batch."""


def draw_predictions(context: Context, panels: Panels, count: int = 6) -> Image.Image:
    """Image, truth and every model's prediction side by side, a row an image: of `AMONG` images those of
    which the last two models (the fine-tuned parent, the recast network) say most different things."""
    rows: list[tuple[float, list[np.ndarray]]] = []
    for batch in context.batches(Source(sampled(context.data.val, AMONG))):
        rows += panels(batch)
    chosen = sorted(rows, key=lambda row: -row[0])[:count]
    framed = [[np.pad(panel, GAP, constant_values=1) for panel in row] for _, row in chosen]
    grid = np.concatenate([np.concatenate(row, 1) for row in framed])
    return Image.fromarray((grid * 255).round().astype(np.uint8))


def write_predictions(folder: Path, context: Context, panels: Panels) -> None:
    """Draw predictions.png of a run, which the report shows."""
    with in_eval(*context.models.values()), replaced(folder / "predictions.png") as temporary:
        draw_predictions(context, panels).save(temporary, format="png")


def class_colours(classes: int) -> np.ndarray:
    """Return (classes, 3) colours in [0, 1] that differ from one to the next."""
    return np.stack([hsv_to_rgb(0.618 * hue % 1, 0.75, 0.95 - 0.4 * (hue % 2)) for hue in range(classes)])
