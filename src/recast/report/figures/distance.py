"""Mean attention distance of every head by depth, and over the epochs of kept checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from recast.report.figures.chart import Chart, Data, Drawing, Key
from recast.report.figures.style import Hit, Palette, new_axes, new_figure
from recast.report.read.analysis import Head
from recast.report.read.run import Run
from recast.report.text import formats

DATA = ("layer", "head", "epoch", "distance", "nonlocality", "entropy", "gate", "span", "is_convolution", "n")
MOST_LAYERS = 9
"""With more layers than this only every few are named under the axis."""


def last_heads(run: Run) -> dict[str, list[Head]]:
    """Layer → its heads as they are at the end, in the network's order."""
    layers: dict[str, list[Head]] = {}
    for head in run.analysis.heads:
        if head.model == "recast":
            layers.setdefault(head.layer, []).append(head)
    return {name: [head for head in heads if _epoch(head) == max(map(_epoch, heads))] for name, heads in layers.items()}


def _epoch(head: Head) -> float:
    """No epoch is the network as it is now."""
    return math.inf if head.epoch is None else head.epoch


def head_data(heads: Sequence[Head]) -> Data:
    rows = [
        (h.layer, h.head, h.epoch, h.distance, h.nonlocality, h.entropy, h.gate, h.span, h.is_convolution, h.n)
        for h in heads
    ]
    return Data(DATA, list(rows))


def distance_charts(run: Run) -> list[Chart]:
    """By depth at the end; by epoch too where checkpoints were kept and measured."""
    layers = last_heads(run)
    if not layers:
        return []
    charts = [_by_depth(layers)]
    if over_time := _by_epoch(run):
        charts.append(over_time)
    return charts


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _by_depth(layers: dict[str, list[Head]]) -> Chart:
    means = {name: _mean([head.distance for head in heads]) for name, heads in layers.items()}

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((4.0, 2.4))
        axes = new_axes(figure)
        hits = []
        for place, (name, heads) in enumerate(layers.items()):
            for head in heads:
                filled = "none" if head.is_convolution else palette.arms["recast"]
                axes.plot(
                    [place], [head.distance], "o", markersize=4.6, markerfacecolor=filled,
                    markeredgecolor=palette.arms["recast"], markeredgewidth=1.0, alpha=0.85,
                )  # fmt: skip
                kind = ", still its convolution" if head.is_convolution else ""
                value = f"{formats.decimal(head.distance, 2)} pixels"
                if math.isfinite(head.distance):
                    hits.append(Hit(axes, place, head.distance, f"{name}, head {head.head}: {value}{kind}"))
        axes.plot(range(len(means)), list(means.values()), color=palette.ink, linewidth=2.0, zorder=2)
        names = list(means)
        step = math.ceil(len(names) / MOST_LAYERS)
        shown = [name if place % step == 0 else "" for place, name in enumerate(names)]
        axes.set_xticks(range(len(names)), [_short(name, len(names)) for name in shown], fontsize=7.2)
        axes.set_xlabel("layer, input at the left")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.08)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return Drawing(figure, hits)

    told = "; ".join(f"{name} {formats.decimal(mean, 2)}" for name, mean in means.items())
    return Chart(
        "distance_depth",
        "Mean attention distance, pixels, by depth",
        f"Mean attention distance of every head, in pixels of its layer’s input. Means: {told}.",
        draw,
        head_data([head for heads in layers.values() for head in heads]),
        [Key("a head", "recast")],
        note="A ring is a head that is still its convolution; the dark line is the mean of a layer.",
    )


def _short(name: str, layers: int) -> str:
    longest = max(70 // max(min(layers, MOST_LAYERS), 1), 4)
    return name if len(name) <= longest else f"…{name[1 - longest :]}"


def _by_epoch(run: Run) -> Chart | None:
    heads = [head for head in run.analysis.heads if head.model == "recast"]
    at = {id(head): run.epochs if head.epoch is None else head.epoch for head in heads}
    epochs = sorted(set(at.values()))
    layers = list(dict.fromkeys(head.layer for head in heads))
    if len(epochs) < 2:
        return None
    means = {
        layer: [_mean([h.distance for h in heads if (h.layer, at[id(h)]) == (layer, epoch)]) for epoch in epochs]
        for layer in layers
    }
    last = max(len(layers) - 1, 1)

    def draw(palette: Palette) -> Drawing:
        figure = new_figure((4.0, 2.4))
        axes = new_axes(figure)
        hits = []
        for place, (layer, values) in enumerate(means.items()):
            color = palette.depth(place / last)
            axes.plot(epochs, values, color=color, linewidth=1.8, marker="o", markersize=3.2)
            known = [(epoch, value) for epoch, value in zip(epochs, values, strict=True) if math.isfinite(value)]
            hits += [Hit(axes, x, y, f"{layer}, epoch {x}: {formats.decimal(y, 2)} pixels") for x, y in known]
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        return Drawing(figure, hits)

    told = "; ".join(f"{layer} to {formats.decimal(values[-1], 2)}" for layer, values in means.items())
    return Chart(
        "distance_epochs",
        "Mean attention distance, pixels, by epoch",
        f"Mean attention distance of each layer by epoch: {told}.",
        draw,
        head_data(heads),
        [Key(layer, depth=place / last) for place, layer in enumerate(layers)] if len(layers) <= 6 else [],
    )
