"""Part `speed`: the ratios of docs/speed.md on a GPU, by turns as there.

layer    benchmarks/layer.py: convolution, our forms, the papers' formula, timm's attention layers
memory   peak of a pass with all heads open, also over that of the dense form, which must be larger
tune     benchmarks/tune.py: choices of `recast.tune_`; measured again they must not be slower than the forms before
network  benchmarks/model.py: T-ResNet-RS beside the same network without attention
peers    benchmarks/peers.py: recast networks beside timm's networks with attention; compiled too, without and with CUDA
         graphs (reduce-overhead)

fp32: TF32 off. bf16: autocast and channels_last. Quantities are columns of those scripts.
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
from part import Row, Unit, precision, row, start

from recast.lab.evaluation.cost import peak_memory
from recast.surgery.tuning import FORMS

MAPS = ((8, 512, 32), (14, 512, 32), (28, 256, 16), (56, 128, 2))
"""Side, channels and images: four times as many as on a CPU, if the naive form's maps allow it."""
NETWORKS = {"resnetrs50": (224, (64, 64)), "resnetrs152": (320, (16, 16))}
"""Network → image size, images of an inference pass and of a training step."""
COMPILED = ("recast", "recast, after the blocks", "non-local")
"""Arms that are compiled beside their parent: each takes a minute."""
PRECISIONS = ("bf16", "fp32")
ROUNDS = 5
SLOWER = 1.1
"""Largest time of a tuned form over that of the form before: more is not noise."""
LABELS = frozenset(("arm", "side", "channels", "batch", "format", "family", "img_size", "pass", "machine"))
"""Columns that are in the unit's name, or the same for all rows."""


@contextmanager
def computing(name: str, device: torch.device) -> Iterator[torch.memory_format]:
    """Set the precision and yield its memory format. Weights are cast at each use, as in training: autocast's cache
    would last for all rounds."""
    is_bf16 = name == "bf16"
    with precision("ieee"), torch.autocast(device.type, torch.bfloat16, enabled=is_bf16, cache_enabled=False):
        torch.backends.cudnn.deterministic = False  # the fastest algorithm: no numbers are compared
        yield torch.channels_last if is_bf16 else torch.contiguous_format


def melted(rows: list[dict[str, Any]]) -> list[Row]:
    """Return a row per measured value."""
    return [
        row(f"{columns['pass']}, {columns['arm']}", name, value if isinstance(value, str) else float(value))
        for columns in rows
        for name, value in columns.items()
        if name not in LABELS and value != ""
    ]


def time_layer(size: tuple[int, int, int], kind: str, device: torch.device) -> list[Row]:
    """Time the layers at one map."""
    with computing(kind, device) as memory_format:
        return melted(layer.measure(*size, ROUNDS, memory_format, device))


def compare_memory(side: int, channels: int, images: int, device: torch.device) -> list[Row]:
    """Measure a forward pass with all heads open, and on a GPU a training step."""
    torch.manual_seed(0)
    x, peaks = torch.randn(images, channels, side, side, device=device), {}
    for backend in ("auto", "merged", "dense"):
        gpsa = layer.opened(channels, 9, 9, fold=False, backend=backend).to(device)
        peak_memory(gpsa, x)  # the first pass includes the libraries' workspaces
        peaks[backend, "forward"] = peak_memory(gpsa, x)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            gpsa(x.requires_grad_()).square().sum().backward()
            peaks[backend, "training step"] = torch.cuda.max_memory_allocated(device) - before
            x = x.detach()
        del gpsa
    rows = [row(backend, f"peak MiB, {kind}", peak / 2**20) for (backend, kind), peak in peaks.items()]
    return rows + [
        row(backend, f"{kind}, over dense", peak / peaks["dense", kind], 1)
        for (backend, kind), peak in peaks.items()
        if backend != "dense"
    ]


def time_choices(name: str, heads: str, kind: str, device: torch.device, toy: bool) -> list[Row]:
    """Time each form of a network's layers, with enough images to keep a GPU busy."""
    rows = []
    with computing(kind, device):
        for columns in tune.measure(name, heads, device, 0.01 if toy else 0.3, 2 if toy else 64):
            arm = f"{columns['mode']}, {columns['layers']}"
            rows += [
                row(arm, f"{form} ms", columns[f"{form}_ms"]) for form in FORMS if columns[f"{form}_ms"] is not None
            ]
            quantity, limit = f"{columns['chosen']} over {columns['before']}, again", None if toy else SLOWER
            rows.append(row(arm, quantity, columns["again"], limit))
    return rows


def time_network(
    name: str, size: int, batches: tuple[int, int], kind: str, device: torch.device, toy: bool
) -> list[Row]:
    """Time inference of a family, and a training step of some arms."""
    rows = []
    with computing(kind, device) as memory_format:
        arms = model.family(name, size, model.IN_TRAINING[:2] if toy else model.ARMS)
        arms = {arm: network.to(device, memory_format=memory_format) for arm, network in arms.items()}  # type: ignore[call-overload]
        rows += melted(model.measure(name, arms, size, batches[0], False, ROUNDS))
        arms = {arm: network for arm, network in arms.items() if arm in model.IN_TRAINING}
        rows += melted(model.measure(name, arms, size, batches[1], True, ROUNDS))
    return rows


def time_peers(name: str, kind: str, device: torch.device, toy: bool, mode: str | None = None) -> list[Row]:
    """Time inference and a training step of a family; or of some arms, compiled in a mode of `torch.compile`."""
    size, batch, rows = peers.SIZE, 1 if toy else 64, []
    with computing(kind, device) as memory_format:
        arms = {arm: build for arm, build in peers.arms_of(name, size).items() if not mode or arm in (name, *COMPILED)}
        models = {arm: build().to(device) for arm, build in arms.items()}
        for network in models.values():
            layer.set_memory_format_(network, memory_format)
        images = torch.randn(batch, 3, size, size, device=device).to(memory_format=memory_format)
        for training in (False, True):
            rows += melted(peers.measure(models, images, training, ROUNDS, mode))
    return rows


def units(device: torch.device, toy: bool) -> Iterator[Unit]:
    """Yield the most important units first."""
    maps, kinds = (((7, 16, 1),), PRECISIONS[:1]) if toy else (MAPS, PRECISIONS)
    for kind in kinds:
        for size in maps:
            yield f"layer/{'x'.join(map(str, size))}/{kind}", partial(time_layer, size, kind, device)
        for name in () if toy else peers.FAMILIES:
            yield f"peers/{name}/{kind}", partial(time_peers, name, kind, device, toy)
            for mode in ("default", "reduce-overhead") if kind == "bf16" else ():
                yield f"peers/{name}/{kind}/compiled, {mode}", partial(time_peers, name, kind, device, toy, mode)
        for name, heads in (("cifar_resnet20", "one"),) if toy else (("resnet26t", "one"), ("resnet50", "all")):
            yield f"tune/{name}/{heads}/{kind}", partial(time_choices, name, heads, kind, device, toy)
    for size in maps[not toy :]:  # shorter maps are written out
        yield f"memory/{'x'.join(map(str, size))}", partial(compare_memory, *size, device)
    for name, (size, batches) in ({"resnet10t": (64, (2, 2))} if toy else NETWORKS).items():
        for kind in kinds:
            yield f"network/{name}/{kind}", partial(time_network, name, size, batches, kind, device, toy)


if __name__ == "__main__":
    sys.exit(start(units))
