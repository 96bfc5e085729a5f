"""How alike the layers of two arms are: linear CKA, parent across, child up."""

from __future__ import annotations

import math

import numpy as np

from recast.report.figures.chart import Chart, Data, Draw, Drawing
from recast.report.figures.style import Hit, Palette, new_figure
from recast.report.read.analysis import Similarity
from recast.report.read.run import Run
from recast.report.text import formats
from recast.report.text.words import words

MOST_NAMED = 16
"""With more layers than this only every few are named."""
MOST_HITS = 400
"""Larger maps have no values to point at: they are in the table of the folder of figures."""


def similarity_charts(run: Run) -> list[Chart]:
    """A map for each pair of arms that was compared."""
    pairs = list(dict.fromkeys((line.model_a, line.model_b) for line in run.analysis.cka))
    pairs.sort(key=lambda pair: (pair[0] == pair[1], "recast" not in pair))  # what was asked for first
    return [_chart(run, *pair, [s for s in run.analysis.cka if (s.model_a, s.model_b) == pair]) for pair in pairs]


def _chart(run: Run, first: str, second: str, found: list[Similarity]) -> Chart:
    names = words(run).arms
    a, b = (names.get(arm, arm) for arm in (first, second))
    columns = list(dict.fromkeys(line.layer_a for line in found))
    rows = list(dict.fromkeys(line.layer_b for line in found))
    values = np.full((len(rows), len(columns)), np.nan)
    for line in found:
        values[rows.index(line.layer_b), columns.index(line.layer_a)] = line.cka
    same = [line for line in found if line.layer_a == line.layer_b and math.isfinite(line.cka)]
    told = ""
    if same and first != second:
        least = min(same, key=lambda line: line.cka)
        told = f" Of the same layer in both: at least {formats.decimal(least.cka, 2)}, in {least.layer_a}."
    data = [(line.model_a, line.layer_a, line.model_b, line.layer_b, line.cka, line.n) for line in found]
    return Chart(
        f"cka_{first}_{second}",
        f"CKA: {a} (across) and {b if first != second else 'itself'} (up)",
        f"Similarity of {len(columns)} layers of {a} with {len(rows)} of {b}.{told}",
        _draw(values, columns, rows, a, b),
        Data(("model_a", "layer_a", "model_b", "layer_b", "cka", "n"), list(data)),
        note=told.strip(),
    )


def _draw(values: np.ndarray, columns: list[str], rows: list[str], a: str, b: str) -> Draw:
    def draw(palette: Palette) -> Drawing:
        figure = new_figure((4.0, 3.6))
        axes = figure.add_axes((0.25, 0.25, 0.6, 0.6 * 4.0 / 3.6))
        # Colours of its own: a map is read by its scale, which goes with it, on light and dark pages alike.
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="none", aspect="auto")
        for set_ticks, names, turn in ((axes.set_xticks, columns, 90), (axes.set_yticks, rows, 0)):
            step = math.ceil(len(names) / MOST_NAMED)
            shown = [name if len(name) <= 18 else f"…{name[-17:]}" for name in names[::step]]
            set_ticks(range(0, len(names), step), shown, fontsize=6.6, rotation=turn)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_xlabel(a)
        axes.set_ylabel(b)
        bar = figure.colorbar(image, cax=figure.add_axes((0.875, 0.25, 0.025, 0.6 * 4.0 / 3.6)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=7)
        hits = []
        if values.size <= MOST_HITS:
            hits = [
                Hit(axes, x, y, f"{columns[x]} and {rows[y]}: {formats.decimal(float(values[y, x]), 3)}")
                for y, x in np.ndindex(*values.shape)
                if math.isfinite(values[y, x])
            ]
        return Drawing(figure, hits)

    return draw
