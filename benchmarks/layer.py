"""One layer: our forms, the convolution they stand for, the papers' formula, and timm's attention layers, by turns.

    python benchmarks/layer.py                 # everything, writes results/layer.csv (about 40 minutes on 2 cores)
    python benchmarks/layer.py --maps 14x512   # some maps; their rows are put in the place of the old ones

Columns: side, channels, batch; pass (forward in eval, or forward + backward); arm; form (what ran); median_ms and
spread (interquartile range over median); over_conv (time over the 3×3 convolution's, median of ratios within a round);
macs_over_conv (the multiply-accumulates': what it would cost at the convolution's speed); share_of_bound = the second
over the first; naive_over (the naive form's time over this one's; `naive_interior_over`: over output pixels only);
saved_mib (what the backward pass keeps, forward + backward only).

Arms: conv; folded and closed (all heads closed, after `fold_` and before, in eval); N open (N heads with a Gaussian
and a content map, the other maps and W_val folded away); all open (as it is trained, W_val there); content (nine
content maps, all Gaussians closed, in eval); positional (nine Gaussians, no content, folded); linear (content="linear",
all heads); "…, FORM": by that form instead of the chosen one.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Collection
from typing import Any

import torch
from naive import NaiveGPSA, map_bytes
from timing import RESULTS, by_turns, machine, ratio, spread, write
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.tracing.cost import saved_sizes

RESULT = RESULTS / "layer.csv"
MAPS = {
    (7, 512): 32, (14, 512): 8, (14, 256): 8, (28, 256): 4, (28, 128): 4, (56, 128): 1, (56, 64): 2, (112, 64): 1,
}  # fmt: skip
"""Side and channels of a map: images. ResNet-50's stages, and the same with their stride removed."""
LAST = ((14, 512), (28, 256))
"""Maps that are also timed in channels_last."""
SLOPE_CHANNELS, SLOPE_SIDES, SLOPE_BATCH = 64, (14, 28, 56, 112), 2
GEOMETRY = Geometry((3, 3), padding=(1, 1, 1, 1))
LONG = 112  # side from which some arms are left out, which take minutes
LARGEST_MAP = 2**31  # bytes of maps above which a form that writes them out is left out


class TimmTokens(nn.Module):
    """timm's ConViT GPSA, which takes tokens, on maps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        from timm.models.convit import GPSA as ConvitGPSA

        self.layer = ConvitGPSA(channels, num_heads=8, locality_strength=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → same."""
        return self.layer(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


def opened(channels: int, with_gaussian: int, with_content: int, fold: bool, **config: Any) -> GPSA:
    """A layer with open gates, in the first heads."""
    layer = GPSA(channels, channels, GEOMETRY, config=RecastConfig(**PAPERS_LAYER, **config))
    with torch.no_grad():
        layer.key.normal_(std=0.02)
        layer.gamma[:with_content] = 0.2
        layer.spread[:with_gaussian] = 0.3
    if fold:
        assert layer.fold() is layer
    return layer


def arms_of(side: int, channels: int, batch: int) -> dict[str, nn.Module]:
    """Every layer that is timed at this map."""
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


def call(layer: nn.Module, x: Tensor, gradient: Tensor | None) -> Callable[[], object]:
    """One forward pass in eval, or a step of training without an optimiser."""

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).backward(gradient)

    return forward if gradient is None else both


def set_memory_format_(module: nn.Module, memory_format: torch.memory_format) -> None:
    """Lay out all kernels so. `Module.to` refuses those of five dimensions that timm's LambdaLayer has."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=memory_format)


def counted(layer: nn.Module, x: Tensor, training: bool) -> int:
    """Multiply-accumulates of a pass."""
    with FlopCounterMode(display=False) as flops, torch.set_grad_enabled(training):
        y = layer(x)
        if training:
            y.sum().backward()
    return flops.get_total_flops() // 2


def measure(
    side: int,
    channels: int,
    batch: int,
    rounds: int,
    memory_format: torch.memory_format,
    chosen: Collection[str] = (),
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """Rows of one map, both passes; of some arms only if `chosen`."""
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for training in (False, True):
        arms = {name: layer.train(training) for name, layer in arms_of(side, channels, batch).items()}
        if chosen:
            arms = {name: layer for name, layer in arms.items() if name in (*chosen, "conv")}
        arms = {name: layer.to(device) for name, layer in arms.items()}
        for layer in arms.values():
            if isinstance(layer, GPSA) and not training:
                layer.refresh_gates()
        if training:
            for name in ("closed", "content"):
                arms.pop(name, None)  # in training all maps run: as "all open"
        for layer in arms.values():
            set_memory_format_(layer, memory_format)
        x = torch.randn(batch, channels, side, side, device=device).to(memory_format=memory_format)
        x.requires_grad_(training)
        gradient = torch.randn_like(x, requires_grad=False) if training else None
        macs = {name: counted(layer, x, training) for name, layer in arms.items()}
        seconds = by_turns({name: call(layer, x, gradient) for name, layer in arms.items()}, rounds)
        for name, layer in arms.items():
            if training:
                with saved_sizes(layer) as sizes:
                    layer(x)
            over = ratio(seconds[name], seconds["conv"])
            bound = macs[name] / macs["conv"]

            def over_naive(form: str, mine: list[float] = seconds[name], all_: Any = seconds) -> float | str:
                return round(ratio(all_[form], mine), 2) if form in all_ else ""

            rows.append(
                {
                    "side": side, "channels": channels, "batch": batch,
                    "format": str(memory_format).removeprefix("torch.").removesuffix("_format"),
                    "pass": "forward+backward" if training else "forward", "arm": name,
                    "form": layer.chosen_backend() if isinstance(layer, GPSA) else "",
                    "median_ms": round(1e3 * statistics.median(seconds[name]), 2),
                    "spread": round(spread(seconds[name]), 3),
                    "over_conv": round(over, 3), "macs_over_conv": round(bound, 3),
                    "share_of_bound": round(bound / over, 3),
                    "naive_over": over_naive("naive"), "naive_interior_over": over_naive("naive interior"),
                    "saved_mib": round(sum(sizes) / 2**20, 2) if training else "",
                    "naive_maps_mib": round(map_bytes(batch, side) / 2**20, 1),
                    "machine": machine(),
                }
            )  # fmt: skip
            print(*list(rows[-1].values())[:-1], sep=",", flush=True)
    return rows


def slopes(rounds: int) -> list[dict[str, Any]]:
    """Seconds of a forward pass against tokens, same channels and batch; the exponent from the least squares line."""
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
                calls[f"{name}/{side}"] = call(layer.train(training), x, torch.randn_like(x) if training else None)
        seconds = by_turns(calls, rounds)
        for name in layers:
            times = [statistics.median(seconds[f"{name}/{side}"]) for side in SLOPE_SIDES]
            slope = statistics.linear_regression(
                [math.log(s * s) for s in SLOPE_SIDES], list(map(math.log, times))
            ).slope
            by_side = zip(SLOPE_SIDES, times, strict=True)
            rows.append(
                {"arm": name, "pass": "forward+backward" if training else "forward", "channels": SLOPE_CHANNELS,
                 "batch": SLOPE_BATCH, **{f"ms_{s}": round(1e3 * t, 3) for s, t in by_side},
                 "exponent": round(slope, 3), "machine": machine()}
            )  # fmt: skip
            print(*list(rows[-1].values())[:-1], sep=",", flush=True)
    return rows


def main() -> None:
    """Everything to the two files, or some maps to the screen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", nargs="*", help="sides and channels, 14x512; the rows of others stay")
    parser.add_argument("--arms", nargs="*", help="some arms, and the convolution; the rows of others stay")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--channels-last", action="store_true", help="all arms in that memory format")
    parser.add_argument("--slopes", action="store_true", help="the exponents only")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.slopes:
        found = slopes(arguments.rounds)
        if not arguments.dry_run:
            write(RESULT.with_name("layer_slopes.csv"), found)
        return
    chosen = [tuple(map(int, text.split("x"))) for text in arguments.maps or []]
    cases = [(at, arguments.channels_last) for at in chosen] or [(at, False) for at in MAPS] + [
        (at, True) for at in LAST
    ]
    for (side, channels), last in cases:
        memory_format = torch.channels_last if last else torch.contiguous_format
        rounds = arguments.rounds if side < 56 else max(2, arguments.rounds // 3)
        rows = measure(side, channels, MAPS[side, channels], rounds, memory_format, arguments.arms or ())
        if not arguments.dry_run:
            keep(rows)
    if not chosen and not arguments.dry_run:
        write(RESULT.with_name("layer_slopes.csv"), slopes(arguments.rounds))


def keep(rows: list[dict[str, Any]]) -> None:
    """Put rows in the place of those that the file has of the same map, format, pass and arm."""
    names = ("side", "channels", "format", "pass", "arm")
    new = {tuple(str(row[name]) for name in names): row for row in rows}
    old = list(csv.DictReader(RESULT.open(encoding="utf-8"))) if RESULT.exists() else []
    merged: list[dict[str, Any]] = [new.pop(tuple(row[name] for name in names), row) for row in old]
    write(RESULT, merged + list(new.values()))


if __name__ == "__main__":
    main()
