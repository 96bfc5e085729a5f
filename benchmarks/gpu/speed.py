"""Part `speed`: the ratios of docs/speed.md on a GPU, by turns as there.

layer    benchmarks/layer.py: convolution, our forms, the papers' formula, timm's attention layers
memory   peak of a pass with all heads open, and of it over that of the dense form, which must be larger
tune     benchmarks/tune.py: what `recast.tune_` chooses; measured again it must not be slower than what ran before
network  benchmarks/model.py: T-ResNet-RS beside the same network without attention
peers    benchmarks/peers.py: recast networks beside timm's networks with attention

fp32: TF32 off. bf16: autocast and channels_last. Quantities are the columns of those scripts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import layer
import model
import peers
import torch
import tune
from part import precision, start
from rows import Row, Unit, row

from recast.lab.evaluation.cost import peak_memory
from recast.surgery.tuning import FORMS

MAPS = ((14, 512, 32), (28, 256, 16), (56, 128, 2))
"""Side and channels of a map, images: four times as many as on a CPU, as far as the naive form's maps allow."""
NETWORKS = {"resnetrs50": (224, (64, 64)), "resnetrs152": (320, (16, 16))}
"""Image size, images of an inference pass and of a training step."""
PRECISIONS = ("bf16", "fp32")
ROUNDS = 5
SLOWER = 1.1
"""Time of a tuned choice over that of the form before, measured again: more is worse than noise."""
NAMES = frozenset(("arm", "side", "channels", "batch", "format", "family", "img_size", "pass", "machine"))
"""Columns of those scripts that say what was measured: they are in the unit's name, or the same for all."""


@contextmanager
def computing(name: str, device: torch.device) -> Iterator[torch.memory_format]:
    """The precision, and the memory format that goes with it. Every weight is cast anew where it is used, as in
    training: autocast's cache would last for all rounds."""
    half = name == "bf16"
    with precision("ieee"), torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        torch.backends.cudnn.deterministic = False  # the fastest algorithm, as where numbers are not compared
        yield torch.channels_last if half else torch.contiguous_format


def melted(rows: list[dict[str, Any]]) -> list[Row]:
    """A row per measure."""
    return [
        row(f"{each['pass']}, {each['arm']}", name, value if isinstance(value, str) else float(value))
        for each in rows
        for name, value in each.items()
        if name not in NAMES and value != ""
    ]


def time_layer(at: tuple[int, int, int], kind: str, device: torch.device, arms: tuple[str, ...]) -> list[Row]:
    """One map."""
    with computing(kind, device) as memory_format:
        return melted(layer.measure(*at, ROUNDS, memory_format, arms, device))


def compare_memory(side: int, channels: int, images: int, device: torch.device) -> list[Row]:
    """All heads open: a forward pass, and on a GPU a training step."""
    torch.manual_seed(0)
    x, peaks = torch.randn(images, channels, side, side, device=device), {}
    for backend in ("auto", "merged", "dense"):
        gpsa = layer.opened(channels, 9, 9, fold=False, backend=backend).to(device)
        peak_memory(gpsa, x)  # the first pass takes the libraries' workspaces too
        peaks[backend, "forward"] = peak_memory(gpsa, x)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            gpsa(x.requires_grad_()).square().sum().backward()
            peaks[backend, "training step"] = torch.cuda.max_memory_allocated(device) - before
            x = x.detach()
        del gpsa
    rows = [row(backend, f"peak MiB, {what}", peak / 2**20) for (backend, what), peak in peaks.items()]
    whats = sorted({what for _, what in peaks})
    forms = ("auto", "merged")
    return rows + [row(f, f"{w}, over dense", peaks[f, w] / peaks["dense", w], 1) for f in forms for w in whats]


def time_choices(name: str, heads: str, kind: str, device: torch.device, toy: bool) -> list[Row]:
    """A network's layers, each form; images enough to keep a GPU busy."""
    rows = []
    with computing(kind, device):
        for each in tune.measure(name, heads, device, 0.01 if toy else 0.3, 2 if toy else 64):
            what = f"{each['mode']}, {each['layers']}"
            rows += [row(what, f"{form} ms", each[f"{form}_ms"]) for form in FORMS if each[f"{form}_ms"] != ""]
            quantity, limit = f"{each['chosen']} over {each['before']}, again", None if toy else SLOWER
            rows.append(row(what, quantity, each["again"], limit))
    return rows


def time_network(
    name: str, size: int, batches: tuple[int, int], kind: str, device: torch.device, toy: bool
) -> list[Row]:
    """A family: inference, and a step of training of some arms."""
    rows = []
    with computing(kind, device) as memory_format:
        arms = model.family(name, size, model.IN_TRAINING[:2] if toy else model.ARMS)
        arms = {arm: network.to(device, memory_format=memory_format) for arm, network in arms.items()}  # type: ignore[call-overload]
        rows += melted(model.measure(name, arms, size, batches[0], False, ROUNDS))
        arms = {arm: network for arm, network in arms.items() if arm in model.IN_TRAINING}
        rows += melted(model.measure(name, arms, size, batches[1], True, ROUNDS))
    return rows


def time_peers(name: str, kind: str, device: torch.device, toy: bool) -> list[Row]:
    """A family: inference and a step of training."""
    size, batch, rows = peers.SIZE, 1 if toy else 64, []
    with computing(kind, device) as memory_format:
        models = {arm: build().to(device) for arm, build in peers.arms_of(name, size).items()}
        for network in models.values():
            layer.set_memory_format_(network, memory_format)
        images = torch.randn(batch, 3, size, size, device=device).to(memory_format=memory_format)
        for training in (False, True):
            rows += melted(peers.measure(models, images, training, ROUNDS))
    return rows


def units(device: torch.device, toy: bool) -> Iterator[Unit]:
    """What says most first."""
    maps, arms, kinds = (((7, 16, 1),), ("3 open",), PRECISIONS[:1]) if toy else (MAPS, (), PRECISIONS)
    for kind in kinds:
        for at in maps:
            yield f"layer/{'x'.join(map(str, at))}/{kind}", partial(time_layer, at, kind, device, arms)
        for name in () if toy else peers.FAMILIES:
            yield f"peers/{name}/{kind}", partial(time_peers, name, kind, device, toy)
        for name, heads in (("cifar_resnet20", "one"),) if toy else (("resnet26t", "one"), ("resnet50", "all")):
            yield f"tune/{name}/{heads}/{kind}", partial(time_choices, name, heads, kind, device, toy)
    for at in maps[not toy :]:  # shorter maps than these are written out
        yield f"memory/{'x'.join(map(str, at))}", partial(compare_memory, *at, device)
    for name, (size, batches) in ({"resnet10t": (64, (2, 2))} if toy else NETWORKS).items():
        for kind in kinds:
            yield f"network/{name}/{kind}", partial(time_network, name, size, batches, kind, device, toy)


if __name__ == "__main__":
    sys.exit(start(units))
