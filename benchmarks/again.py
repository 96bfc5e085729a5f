"""What a layer beside a convolution keeps for the backward pass, and what making C X again there costs.

    python benchmarks/again.py    # writes results/layer_again.csv

A row per map: MiB that the convolution keeps, and the layer without and with C X made again; the time of a forward and
a backward pass with it over that without (`ratio`, by turns; quartiles), and whether the layer does it (`chosen`).
fp32, one thread, γ open.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from timing import RESULTS, by_turns, machine, open_gates, saved_mib, write
from torch import Tensor, nn

import recast
from recast.layers.functional import beside

CASES = ((512, 14, 32), (512, 7, 32), (256, 14, 32), (128, 28, 8), (64, 16, 32), (64, 8, 32))
"""Channels, side of the map, images."""
ROUNDS = 15


def main() -> None:
    """Measure every case."""
    torch.set_num_threads(1)
    chosen, rows = beside._is_large, []

    def with_form(makes_again: bool, call: Callable[[], object]) -> object:
        beside._is_large = lambda *_: makes_again
        return call()

    for channels, side, images in CASES:
        conv, x = nn.Conv2d(channels, channels, 3, padding=1), torch.randn(images, channels, side, side)
        x.requires_grad_()
        layer = open_gates(recast.AttentionBeside(conv).train())

        def step(layer: nn.Module = layer, x: Tensor = x) -> None:
            layer(x).square().sum().backward()
            layer.zero_grad()
            x.grad = None

        seconds = by_turns({str(again): partial(with_form, again, step) for again in (False, True)}, ROUNDS)
        low, middle, high = statistics.quantiles([b / a for a, b in zip(*seconds.values(), strict=True)], n=4)
        sizes = [with_form(again, partial(saved_mib, layer, x)) for again in (False, True)]
        row = {"convolution_mib": saved_mib(conv, x)}
        row |= dict(zip(("kept_mib", "made_again_mib"), sizes, strict=True))
        row |= {"ratio": middle, "low_quartile": low, "high_quartile": high}
        is_chosen = chosen(x.detach().flatten(2), x, 1)
        measured = {name: f"{value:.3f}" for name, value in row.items()}
        labels = {"channels": channels, "side": side, "images": images}
        rows.append(labels | measured | {"chosen": is_chosen, "machine": machine()})
    write(RESULTS / "layer_again.csv", rows)


if __name__ == "__main__":
    main()
