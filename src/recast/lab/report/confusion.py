"""Confusion matrices of the arms."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from recast.lab.report.charts import Chart
from recast.lab.report.draw import shortened
from recast.lab.report.labels import words
from recast.lab.report.load import Run

SIZE = (4.0, 3.6)  # inches
MOST_NAMED = 16  # of more classes, only every n-th is named
MOST_CLASSES, MOST_COUNTED = 50, 12
"""Largest numbers of classes of a confusion matrix, and of one with the numbers of images in it."""


def confusion(run: Run, arm: str) -> np.ndarray:
    """Return (classes, classes) numbers of images by label (row) and prediction, from the suite `agreement`."""
    counts = Counter((image["label"], image.get(arm)) for image in run.agreement)
    return np.array([[counts[label, prediction] for prediction in run.classes] for label in run.classes])


def confusion_charts(run: Run) -> list[Chart]:
    """Return a heat map of every arm: shares of the images of a class that are predicted as each class."""
    if not 1 < len(run.classes) <= MOST_CLASSES:
        return []
    charts = []
    for arm in words(run).drawn:
        if (counts := confusion(run, arm)).any():
            title = f"{words(run).arms[arm]}: labels (down) and predictions (across)"
            panel = partial(_draw_confusion, counts=counts, names=run.classes)
            charts.append(Chart(f"confusion_{arm}", title, panel, SIZE))
    return charts


def _draw_confusion(axes: Axes, counts: np.ndarray, names: tuple[str, ...]) -> None:
    """Draw shares of each row, the first class at the top, with a color bar; the colors are the same in dark mode."""
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, interpolation="none", aspect="auto")
    axes.set_position((0.25, 0.25, 0.62, 0.68))
    shown = range(0, len(names), math.ceil(len(names) / MOST_NAMED))
    for set_ticks, turn in ((axes.set_xticks, 90), (axes.set_yticks, 0)):
        set_ticks(shown, [shortened(names[place], 18) for place in shown], fontsize=6.6, rotation=turn)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set(xlabel="prediction", ylabel="label")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)
    for row, column in np.argwhere(counts) if len(names) <= MOST_COUNTED else ():
        color = "black" if shares[row, column] > 0.5 else "white"  # cividis is light from the middle on
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6.6, color=color)
