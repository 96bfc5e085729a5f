"""Heat maps: similarity of layers (CKA), and confusion matrices of the arms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes

from recast.lab.folder.files import number
from recast.lab.pages.charts import Chart, shortened
from recast.lab.report.labels import words
from recast.lab.report.load import Run

SIZE = (4.0, 3.6)  # inches
AXIS_LABEL = 22  # points, with the gaps on both sides
LONGEST, START = 18, 11  # characters of a name, and those kept of the start of a class
MOST_NAMED = 16  # of more rows or columns, only every n-th is named
MOST_CLASSES, MOST_COUNTED = 50, 12
"""Largest numbers of classes of a confusion matrix, and of one with the numbers of images in it."""


def similarity_charts(run: Run) -> list[Chart]:
    """Return the linear CKA of the layers of two arms: a heat map for each pair of arms."""
    pairs = list(dict.fromkeys((line.model_a, line.model_b) for line in run.cka))
    pairs.sort(key=lambda pair: (pair[0] == pair[1], "recast" not in pair))  # pairs with the recast arm first
    charts = []
    for first, second in pairs:
        lines = [line for line in run.cka if (line.model_a, line.model_b) == (first, second)]
        a, b = (words(run).arms.get(arm, arm) for arm in (first, second))
        columns = list(dict.fromkeys(line.layer_a for line in lines))
        rows = list(dict.fromkeys(line.layer_b for line in lines))
        values = np.full((len(rows), len(columns)), np.nan)
        for line in lines:
            values[rows.index(line.layer_b), columns.index(line.layer_a)] = number(line.cka)
        title = f"CKA: {a} (across) and {b if first != second else 'itself'} (up)"
        across, up = ([shortened(name, LONGEST) for name in names] for names in (columns, rows))
        panel = partial(_draw_heat_map, values=values, columns=across, rows=up, a=a, b=b)
        charts.append(Chart(f"cka_{first}_{second}", title, panel, SIZE))
    return charts


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
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    labels = [shortened(name, LONGEST, START) for name in names]
    _draw_heat_map(axes, shares, labels, labels, "prediction", "label")
    axes.invert_yaxis()  # the first class at the top
    for row, column in np.argwhere(counts) if len(names) <= MOST_COUNTED else ():
        color = "black" if shares[row, column] > 0.5 else "white"  # cividis is light from the middle on
        axes.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=6.6, color=color)


def _draw_heat_map(axes: Axes, values: np.ndarray, columns: Sequence[str], rows: Sequence[str], a: str, b: str) -> None:
    """Draw values from 0 to 1, the first row at the bottom, with a color bar; the colors are the same in dark mode."""
    image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="none", aspect="auto")
    for set_ticks, names, turn in ((axes.set_xticks, columns, 90), (axes.set_yticks, rows, 0)):
        shown = range(0, len(names), math.ceil(len(names) / MOST_NAMED))
        set_ticks(shown, [names[place] for place in shown], fontsize=6.6, rotation=turn)
    axes.tick_params(length=0)
    left, bottom = _room_of_labels(axes)
    axes.set_position((left, bottom, 0.87 - left, 0.93 - bottom))
    axes.grid(visible=False)
    axes.set(xlabel=a, ylabel=b)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=7)


def _room_of_labels(axes: Axes) -> tuple[float, float]:
    """Return the room that tick labels and axis labels need, as shares of the picture's width and height."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    beside = AXIS_LABEL * figure.dpi / 72
    widest = max((label.get_window_extent().width for label in axes.get_yticklabels()), default=0.0)
    tallest = max((label.get_window_extent().height for label in axes.get_xticklabels()), default=0.0)
    return (widest + beside) / figure.bbox.width, (tallest + beside) / figure.bbox.height
