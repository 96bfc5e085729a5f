"""Confusion matrices of the arms, from their predictions for the validation images (suite `agreement`)."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.axes import Axes

from recast.lab.report.charts import Chart, Palette
from recast.lab.report.draw import draw_heat_map
from recast.lab.report.labels import words
from recast.lab.report.load import Run

MOST_CLASSES, MOST_COUNTED = 50, 12
"""Largest numbers of classes of a figure, and of one with the numbers of images in it."""


def confusion(run: Run, arm: str) -> np.ndarray:
    """Return (classes, classes) numbers of images by label (row) and prediction, as scikit-learn's confusion_matrix."""
    place = {name: index for index, name in enumerate(run.classes)}
    pairs = [(place.get(image["label"]), place.get(image.get(arm, ""))) for image in run.agreement]
    counts = np.zeros((len(place), len(place)), dtype=int)
    for label, prediction in pairs:
        if label is not None and prediction is not None:
            counts[label, prediction] += 1
    return counts


def confusion_charts(run: Run) -> list[Chart]:
    """Return a heat map of every arm: shares of the images of a class that are predicted as each class."""
    if not 1 < len(run.classes) <= MOST_CLASSES:
        return []
    charts = []
    for arm in words(run).drawn:
        if (counts := confusion(run, arm)).any():
            rows = [
                (label, prediction, int(counts[i, j]))
                for i, label in enumerate(run.classes) for j, prediction in enumerate(run.classes) if counts[i, j]
            ]  # fmt: skip
            title = f"{words(run).arms[arm]}: labels (down) and predictions (across)"
            panel = partial(_panel, counts=counts, names=run.classes)
            columns = ("label", "prediction", "images")
            charts.append(Chart(f"confusion_{arm}", title, columns, rows, panel, (4.0, 3.6)))
    return charts


def _panel(axes: Axes, palette: Palette, counts: np.ndarray, names: tuple[str, ...]) -> None:
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    draw_heat_map(axes, palette, shares, names, names, "prediction", "label")
    axes.invert_yaxis()  # the first class at the top
    for row, column in zip(*counts.nonzero(), strict=True) if len(names) <= MOST_COUNTED else ():
        color = "black" if shares[row, column] > 0.5 else "white"  # cividis is light from the middle on
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6.6, color=color)
