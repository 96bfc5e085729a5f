"""Part `speed`: the ratios of docs/speed.md on a GPU, by turns as there.

layer    benchmarks/layer.py: convolution, our forms, the papers' formula, timm's attention layers
chunks   the streaming operator by how many numbers of a map, and of what heads gather, it holds at a time
         (`stream.MAP_NUMBERS`, `VALUE_NUMBERS`): 2^22 to 2^28, one of the two changed at a time
memory   peak of a pass with all heads open, and of it over that of the dense form, which must be larger
tune     benchmarks/tune.py: what `recast.tune_` chooses; measured again it must not be slower than what ran before
network  benchmarks/model.py: T-ResNet-RS beside the same network without attention

fp32: TF32 off. bf16: autocast and channels_last. Quantities are the columns of those scripts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import layer
import model
import torch
import tune
from part import precision, start
from rows import Row, Unit, row
from timing import by_turns, ratio, spread
from torch import Tensor

from recast.lab.evaluation.cost import peak_memory
from recast.layers.functional.streaming import stream
from recast.surgery.tuning import FORMS

MAPS = ((14, 512, 32), (28, 256, 16), (56, 128, 2))
"""Side and channels of a map, images: four times as many as on a CPU, as far as the naive form's maps allow."""
CHUNKED = ((14, 512, 256), (28, 256, 64), (56, 128, 16), (112, 64, 2))
NETWORKS = {"resnetrs50": (224, (64, 64)), "resnetrs152": (320, (16, 16))}
"""Image size, images of an inference pass and of a training step."""
SIZES = tuple(2**power for power in range(22, 29))
PRECISIONS = ("fp32", "bf16")
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


def timed(seconds: Mapping[str, list[float]], first: str) -> list[Row]:
    """Median, spread, and time over that of the arm `first`."""
    rows = []
    for name, of in seconds.items():
        rows.append(row(name, "median_ms", 1e3 * statistics.median(of)))
        rows += [row(name, "spread", spread(of)), row(name, f"over {first}", ratio(of, seconds[first]))]
    return rows


def in_chunks(table: dict[str, int], numbers: int, call: Callable[[], object]) -> Callable[[], None]:
    """The call with another size of chunks, on whichever device."""

    def run() -> None:
        before = dict(table)
        table.update(dict.fromkeys(table, numbers))
        call()
        table.update(before)

    return run


def time_chunks(
    at: tuple[int, int, int], kind: str, training: bool, device: torch.device, sizes: tuple[int, ...]
) -> list[Row]:
    """All heads open, both maps; and the memory of a pass."""
    side, channels, batch = at
    torch.manual_seed(0)
    rows = []
    with computing(kind, device) as memory_format:
        gpsa = layer.opened(channels, 9, 9, fold=False, backend="merged").train(training)  # the operator, on a GPU too
        gpsa = gpsa.to(device, memory_format=memory_format)  # type: ignore[call-overload]
        gpsa.refresh_gates()
        x = torch.randn(batch, channels, side, side, device=device).to(memory_format=memory_format)
        gradient: Tensor | None = torch.randn_like(x) if training else None
        call = layer.call(gpsa, x.requires_grad_(training), gradient)
        tables = {"maps": stream.MAP_NUMBERS, "values": stream.VALUE_NUMBERS}
        arms = {f"{name} {size}": in_chunks(t, size, call) for name, t in tables.items() for size in sizes}
        arms = {"as it is": call, **arms}
        for name, run in arms.items() if device.type == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(device)
            run()
            rows.append(row(name, "peak MiB", torch.cuda.max_memory_allocated(device) / 2**20))
        return rows + timed(by_turns(arms, ROUNDS), "as it is")


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


def units(device: torch.device, toy: bool) -> Iterator[Unit]:
    """What says most first."""
    maps, arms, kinds = (((7, 16, 1),), ("3 open",), PRECISIONS[1:]) if toy else (MAPS, (), PRECISIONS)
    for kind in kinds:
        for at in maps:
            yield f"layer/{'x'.join(map(str, at))}/{kind}", partial(time_layer, at, kind, device, arms)
    for at in maps:
        yield f"memory/{'x'.join(map(str, at))}", partial(compare_memory, *at, device)
    for name, heads in (("cifar_resnet20", "one"),) if toy else (("resnet26t", "one"), ("resnet50", "all")):
        for kind in kinds:
            yield f"tune/{name}/{heads}/{kind}", partial(time_choices, name, heads, kind, device, toy)
    for training in (False, True):
        for kind in kinds:
            for at in maps if toy else CHUNKED:
                unit = f"chunks/{'x'.join(map(str, at))}/{kind}/{'forward+backward' if training else 'forward'}"
                yield unit, partial(time_chunks, at, kind, training, device, SIZES[:2] if toy else SIZES)
    for name, (size, batches) in ({"resnet10t": (64, (2, 2))} if toy else NETWORKS).items():
        for kind in kinds:
            yield f"network/{name}/{kind}", partial(time_network, name, size, batches, kind, device, toy)


if __name__ == "__main__":
    sys.exit(start(units))
