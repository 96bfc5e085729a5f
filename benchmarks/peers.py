"""Recast networks beside their alternatives: other attention in the same family of networks, by turns.

    python benchmarks/peers.py                          # writes results/peers.csv (eight minutes on 2 idle cores)
    python benchmarks/peers.py --family resnet26t       # some families; the rows of others stay
    python benchmarks/peers.py --compile --threads 1    # by torch.compile: a minute for each arm and pass

Columns for a family, arm, image size, batch and pass (a training step is forward, backward and SGD): the median time;
relative_speed (the parent's time over this one's: median of the ratios within a round; low, high: quartiles); gmacs per
image; mac_bound (the parent's multiply-accumulates over this one's); peak_mib (memory that a pass adds to the process,
gradients included: resident pages on a CPU, allocated bytes on a GPU); parameters.

Arms: the parent. "recast": the default, attention beside the last convolution of each block of the last stage; "after
the blocks": the same layer there; "as peers": beside the layers where timm's networks have attention, also in earlier
stages; "stride removed": one content head, gate "linear", stride="remove"; "all heads": content, Gaussian and W_val in
every head. All gates are open, except in "folded", by `fold_` of closed gates. timm's
BoTNet, HaloNet and LambdaNetwork. "ConViT GPSA": timm's layer for the last stage's 3×3 convolutions, pooled where they
have a stride. "non-local": timm's block, which starts at zero, after the last stage.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import timm
import torch
from layer import TimmTokens
from model import LABELS, call
from timing import RESULTS, by_turns, machine, macs, open_gates, update
from timm.layers.non_local_attn import NonLocalAttn
from torch import Tensor, nn

import recast
from recast.layers.config import PAPERS_LAYER

RESULT = RESULTS / "peers.csv"
SIZE = 256  # HaloNet takes multiples of it
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...], list[str]]] = {
    "resnet26t": ({}, ("botnet26t_256", "halonet26t", "lambda_resnet26t"), ["layer3.1.conv2", "layer4.[01].conv2"]),
    "resnet50t": (
        {"act_layer": nn.SiLU},
        ("botnet50ts_256", "halonet50ts", "lambda_resnet50ts"),
        ["layer2.3.conv2", "layer3.[135].conv2", "layer4.1.conv2"],
    ),
}
"""Parent → its options (timm's 50ts networks have SiLU), the networks of its family, their layers with attention."""


def recast_copy(parent: nn.Module, size: int, where: Any = None, fold: bool = False, **config: Any) -> nn.Module:
    """Recast a copy, and open all gates or fold it."""
    model, settings = copy.deepcopy(parent), recast.RecastConfig(**config)
    images = torch.zeros(1, 3, size, size, device=next(parent.parameters()).device)
    recast.recast_(model, recast.plan(model, images, settings, where=where, max_tokens=2048))
    if fold:
        recast.fold_(model)
    return open_gates(model)


def arms_of(name: str, size: int) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build the arms of a family."""
    options, peers, layers = FAMILIES[name]
    torch.manual_seed(0)
    parent, convit, non_local = (timm.create_model(name, **options) for _ in range(3))
    for block in convit.layer4:
        pool = nn.AvgPool2d(2) if block.conv2.stride == (2, 2) else nn.Identity()
        block.conv2 = nn.Sequential(TimmTokens(block.conv2.in_channels), pool)
    non_local.layer4.append(NonLocalAttn(non_local.num_features))
    return {
        name: lambda: parent,
        "recast": lambda: recast_copy(parent, size),
        "recast, after the blocks": lambda: recast_copy(parent, size, beside="block"),
        "recast, as peers": lambda: recast_copy(parent, size, layers),
        "recast, stride removed": lambda: recast_copy(parent, size, gate="linear", content_heads=1, stride="remove"),
        "recast, all heads": lambda: recast_copy(parent, size, gate="linear", **PAPERS_LAYER),
        "recast, folded": lambda: recast_copy(parent, size, fold=True),
        **{peer: partial(timm.create_model, peer) for peer in peers},
        "ConViT GPSA": lambda: convit,
        "non-local": lambda: non_local,
    }


def peak_mib(step: Callable[[], object], model: nn.Module) -> float:
    """Return the memory that a call adds at its peak: the least of three, as an allocator keeps more at times."""
    peaks, on_gpu = [], torch.cuda.is_initialized()

    def peak() -> int:
        return torch.cuda.max_memory_allocated() if on_gpu else 1024 * getrusage(RUSAGE_SELF).ru_maxrss

    for _ in range(3):
        model.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # resident free pages would hide memory of the call
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the resident size
        before = peak()
        step()
        peaks.append(peak() - before)
    return min(peaks) / 2**20


def measure(
    models: dict[str, nn.Module], images: Tensor, training: bool, rounds: int, mode: str | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a family, whose parent is first, in one pass, compiled in a mode of `torch.compile`."""
    counts = {arm: macs(model.train(training), images, training) for arm, model in models.items()}
    torch._dynamo.config.recompile_limit = 64  # most arms share code: above the limit they run eager
    for model in models.values() if mode else ():
        model.compile(mode=mode)
    compiled = {None: "", "default": ", compiled"}.get(mode, f", compiled, {mode}")
    calls = {arm: call(model, images, training) for arm, model in models.items()}
    peaks = {arm: peak_mib(calls[arm], model) for arm, model in models.items()}
    parent, seconds, rows = next(iter(models)), by_turns(calls, rounds), []
    for arm, model in models.items():
        ratios = [parent_time / time for parent_time, time in zip(seconds[parent], seconds[arm], strict=True)]
        low, middle, high = (round(value, 3) for value in statistics.quantiles(ratios, n=4, method="inclusive"))
        median, parameters = statistics.median(seconds[arm]), sum(p.numel() for p in model.parameters())
        row: dict[str, Any] = {"family": parent, "arm": arm, "img_size": images.shape[-1], "batch": len(images)}
        row |= {"pass": ("training step" if training else "inference") + compiled}
        row |= {"median_ms": round(1e3 * median, 1)}
        row |= {"images_per_s": round(len(images) / median, 2), "relative_speed": middle, "low": low, "high": high}
        row |= {"gmacs": round(counts[arm] / len(images) / 1e9, 3), "mac_bound": round(counts[parent] / counts[arm], 3)}
        row |= {"peak_mib": round(peaks[arm], 1), "params_m": round(parameters / 1e6, 2), "machine": machine()}
        rows.append(row)
    return rows


def main() -> None:
    """Measure the families; update the table after each pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of steps; three times as many of inference")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", choices=("default", "reduce-overhead"), help="mode of torch.compile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = torch.randn(options.batch, 3, SIZE, SIZE)
    for name in options.family:
        models = {arm: build() for arm, build in arms_of(name, SIZE).items()}
        for training in (False, True):
            rounds = options.rounds * (1 if training else 3)
            update(RESULT, measure(models, images, training, rounds, options.compile), LABELS)


if __name__ == "__main__":
    main()
