"""One layer: our forms, its convolution, the papers' formula and timm's attention layers, by turns.

    python benchmarks/layer.py                 # everything, writes results/layer.csv (about 40 minutes on 2 cores)
    python benchmarks/layer.py --maps 14x512   # only some maps; the rows of others stay

Columns: side, channels, batch; pass (forward in eval, or forward + backward); arm; form (the one that ran); median_ms
and spread (interquartile range over median); over_conv (time over the 3×3 convolution's, median of ratios within a
round); macs_over_conv (the same ratio of multiply-accumulates); share_of_bound = the second over the first; naive_over
(the naive form's time over this one's; `naive_interior_over`: with output pixels only as queries); saved_mib (memory
kept for the backward pass, forward + backward only).

Arms: conv; folded and closed (all heads closed, after `fold_` and before, in eval); N open (N heads with a Gaussian
and a content map, the other maps and W_val folded away); all open (as in training, with W_val); content (nine content
maps, all Gaussians closed, in eval); positional (nine Gaussians, no content, folded); linear (content="linear", all
heads); "…, FORM": by that form instead of the chosen one.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from naive import NaiveGPSA, map_bytes
from timing import RESULTS, by_turns, inference, machine, macs, open_gates, ratio, saved_mib, spread, update, write
from torch import Tensor, nn

from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA

MAPS = {
    (7, 512): 32,
    (14, 512): 8,
    (14, 256): 8,
    (28, 256): 4,
    (28, 128): 4,
    (56, 128): 1,
    (56, 64): 2,
    (112, 64): 1,
}
"""Side and channels of a map → images: ResNet-50's stages, and the same with their stride removed."""
CHANNELS_LAST = ((14, 512), (28, 256))
"""Maps that are also timed in channels_last."""
LABELS = ("side", "channels", "format", "pass", "arm")
SLOPE_CHANNELS, SLOPE_SIDES, SLOPE_BATCH = 64, (14, 28, 56, 112), 2
GEOMETRY = Geometry((3, 3), padding=(1, 1, 1, 1))
LONG = 112
"""Side from which arms that take minutes are left out."""
LARGEST_MAP = 2**31
"""Bytes of maps above which forms that write them out are left out."""


class TimmTokens(nn.Module):
    """timm's ConViT GPSA, a layer of tokens, on maps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        from timm.models.convit import GPSA as ConvitGPSA

        self.layer = ConvitGPSA(channels, num_heads=8, locality_strength=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of the shape of x (B, C, H, W)."""
        return self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


def opened(channels: int, num_gaussian: int, num_content: int, fold: bool, **config: Any) -> GPSA:
    """Return a layer of nine heads whose first Gaussians and content maps are open."""
    layer = GPSA(channels, channels, GEOMETRY, config=RecastConfig("linear", **PAPERS_LAYER, **config))
    open_gates(layer, num_gaussian, num_content)
    if fold:
        assert layer.fold() is layer
    return layer


def arms_of(side: int, channels: int, batch: int) -> dict[str, nn.Module]:
    """Return the layers that are timed at this map."""
    from timm.layers.bottleneck_attn import BottleneckAttn
    from timm.layers.halo_attn import HaloAttn
    from timm.layers.lambda_layer import LambdaLayer

    arms: dict[str, nn.Module] = {
        "conv": nn.Conv2d(channels, channels, 3, padding=1),
        "folded": opened(channels, 0, 0, fold=False).to_conv(),
        "closed": opened(channels, 0, 0, fold=False),
        "1 open": opened(channels, 1, 1, fold=True),
        "3 open": opened(channels, 3, 3, fold=True),
        "6 open": opened(channels, 6, 6, fold=True),
        "all open": opened(channels, 9, 9, fold=False),
        "content": opened(channels, 0, 9, fold=False),
        "content, folded": opened(channels, 0, 9, fold=True),
        "all open, folded": opened(channels, 9, 9, fold=True),
        "positional": opened(channels, 9, 0, fold=True),
        "linear": opened(channels, 9, 9, fold=False, content="linear"),
        "all open, split": opened(channels, 9, 9, fold=False, backend="split"),
        "3 open, split": opened(channels, 3, 3, fold=True, backend="split"),
        "3 open, merged": opened(channels, 3, 3, fold=True, backend="merged"),
        "all open, sdpa": opened(channels, 9, 9, fold=False, backend="sdpa"),
    }
    if side >= LONG:
        for name in ("1 open", "6 open", "content", "content, folded", "all open, folded", "3 open, merged"):
            del arms[name]
    if map_bytes(batch, side) < LARGEST_MAP:
        arms |= {
            "all open, dense": opened(channels, 9, 9, fold=False, backend="dense"),
            "naive": NaiveGPSA(channels, interior=False),
            "naive interior": NaiveGPSA(channels, interior=True),
            "timm ConViT GPSA": TimmTokens(channels),
            "timm BottleneckAttn": BottleneckAttn(channels, channels, feat_size=(side, side), num_heads=8),
            "timm LambdaLayer": LambdaLayer(channels, channels, r=9),
        }
    arms["timm HaloAttn"] = HaloAttn(channels, channels, num_heads=8, block_size=7, halo_size=3)
    return arms


def call(layer: nn.Module, x: Tensor, training: bool) -> Callable[[], object]:
    """Return a function that runs a forward pass in eval, or a step of training without an optimizer."""
    gradient = torch.randn_like(x, requires_grad=False)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(gradient)

    return step if training else inference(layer, x)


def set_memory_format_(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Lay out all 4D kernels. `Module.to` fails on the 5D ones of timm's LambdaLayer."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=memory_format)


def measure(
    side: int,
    channels: int,
    batch: int,
    rounds: int,
    memory_format: torch.memory_format,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """Return the rows of one map, both passes."""
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for training in (False, True):
        arms = {name: layer.train(training).to(device) for name, layer in arms_of(side, channels, batch).items()}
        if training:  # all maps run then: as "all open"
            del arms["closed"]
            arms.pop("content", None)
        for layer in arms.values():
            set_memory_format_(layer, memory_format)
        x = torch.randn(batch, channels, side, side, device=device).to(memory_format=memory_format)
        x.requires_grad_(training)
        counts = {name: macs(layer, x, training) for name, layer in arms.items()}
        seconds = by_turns({name: call(layer, x, training) for name, layer in arms.items()}, rounds)
        naive = {form: seconds[form] for form in ("naive", "naive interior") if form in seconds}
        for name, layer in arms.items():
            over, bound = ratio(seconds[name], seconds["conv"]), counts[name] / counts["conv"]
            over_naive = {form: round(ratio(times, seconds[name]), 2) for form, times in naive.items()}
            row: dict[str, Any] = {"side": side, "channels": channels, "batch": batch}
            row |= {"format": str(memory_format).removeprefix("torch.").removesuffix("_format")}
            row |= {"pass": "forward+backward" if training else "forward", "arm": name}
            row |= {"form": layer.chosen_backend() if isinstance(layer, GPSA) else ""}
            row |= {"median_ms": round(1e3 * statistics.median(seconds[name]), 2)}
            row |= {"spread": round(spread(seconds[name]), 3), "over_conv": round(over, 3)}
            row |= {"macs_over_conv": round(bound, 3), "share_of_bound": round(bound / over, 3)}
            row |= {"naive_over": over_naive.get("naive", "")}
            row |= {"naive_interior_over": over_naive.get("naive interior", "")}
            row |= {"saved_mib": round(saved_mib(layer, x), 2) if training else ""}
            row |= {"naive_maps_mib": round(map_bytes(batch, side) / 2**20, 1), "machine": machine()}
            rows.append(row)
    return rows


def slopes(rounds: int) -> list[dict[str, Any]]:
    """Return the exponents of time in tokens, least squares, at the same channels and batch."""
    rows: list[dict[str, Any]] = []
    layers: dict[str, nn.Module] = {
        "conv": nn.Conv2d(SLOPE_CHANNELS, SLOPE_CHANNELS, 3, padding=1),
        "positional": opened(SLOPE_CHANNELS, 9, 0, fold=True),
        "linear": opened(SLOPE_CHANNELS, 0, 9, fold=True, content="linear"),
        "linear and positional": opened(SLOPE_CHANNELS, 9, 9, fold=True, content="linear"),
        "all open": opened(SLOPE_CHANNELS, 9, 9, fold=True),
    }
    for training in (False, True):
        if training:
            del layers["all open"]  # a minute a step at the longest map
        calls = {}
        for side in SLOPE_SIDES:
            for name, layer in layers.items():
                x = torch.randn(SLOPE_BATCH, SLOPE_CHANNELS, side, side, requires_grad=training)
                calls[f"{name}/{side}"] = call(layer.train(training), x, training)
        seconds = by_turns(calls, rounds)
        for name in layers:
            times = {side: statistics.median(seconds[f"{name}/{side}"]) for side in SLOPE_SIDES}
            points = [math.log(side**2) for side in times], [math.log(time) for time in times.values()]
            row: dict[str, Any] = {"arm": name, "pass": "forward+backward" if training else "forward"}
            row |= {"channels": SLOPE_CHANNELS, "batch": SLOPE_BATCH}
            row |= {f"ms_{side}": round(1e3 * time, 3) for side, time in times.items()}
            row |= {"exponent": round(statistics.linear_regression(*points).slope, 3), "machine": machine()}
            rows.append(row)
    return rows


def main() -> None:
    """Measure all maps and the exponents, or some maps."""
    names = [f"{side}x{channels}" for side, channels in MAPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", nargs="+", choices=names, default=names, help="side and channels")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    for memory_format, maps in ((torch.contiguous_format, tuple(MAPS)), (torch.channels_last, CHANNELS_LAST)):
        for side, channels in maps:
            if f"{side}x{channels}" in options.maps:
                rounds = options.rounds if side < 56 else max(2, options.rounds // 3)
                rows = measure(side, channels, MAPS[side, channels], rounds, memory_format)
                update(RESULTS / "layer.csv", rows, LABELS)
    if options.maps == names:
        write(RESULTS / "layer_slopes.csv", slopes(options.rounds))


if __name__ == "__main__":
    main()
