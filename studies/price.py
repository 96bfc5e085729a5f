"""How much attention is enough, and what does it bring in equal time?

    python studies/price.py odd_digit sweep --out runs/price                    # continues where it was stopped
    RECAST_DATA=DIR python studies/price.py cifar sweep --out runs/price        # CIFAR-10 ResNet-20 → CIFAR-100
    python studies/price.py odd_digit times --out runs/price                    # on an idle machine
    python studies/price.py odd_digit rates --out runs/price                    # each arm's learning rate
    python studies/price.py odd_digit compare --out runs/price --seeds 0 1 2    # after times and rates
    python studies/price.py odd_digit table --out runs/price                    # writes results/price_*.csv
    RECAST_DATA=DIR python studies/price.py converged compare --out runs/price --seeds 0 1 2    # after times of cifar

sweep: content heads × width × Gaussians × W_val × rates × start, on held-out images: canvases of 300 digits of the
training part (odd_digit), a tenth of train.zip (cifar). It fixed the defaults of that time; no test image is read.

times: seconds of a training step and of inference of every arm, by turns, one thread.

rates: every arm at the learning rates of `RATES`, seed 0, on the held-out images of the sweep; compare takes its best.

converged: the CIFAR-10 ResNet-20 as published (91.9 %), trained further on images that it was trained with, so that
more updates should bring nothing; every arm at 1e-4, T-CNN's rate. Network and times are those of cifar.

compare, on test images, stated before they were read. Arms (`arms`): the parent; fine-tuned for as many updates as one
wide head; fine-tuned for as many seconds, by the measured step times; nine heads, the default then, for as many
seconds; one wide head, the default after them; and, added after the last stage and started at zero, a 1×1 block of one
wide head's multiply-adds, timm's non-local block, its global context. One parent; seeds change the order of images and
new parameters. A difference to one wide head is shown if 0 is outside its 95 % interval over
seeds and images (`recast.lab.evaluation.intervals`). The smallest visible effect is the one that this shows with 80 %
probability.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from evidence.csv_files import RESULTS, append, has_row, read
from evidence.images import crop_and_flip
from evidence.images import read as read_images
from torch import Tensor, nn
from trainings import (
    add_block,
    awake_heads,
    cifar10_network,
    columns,
    correct,
    cosine,
    groups_of,
    macs_of,
    main,
    missing_runs,
    normalised,
    store,
    stored,
    top1,
    train,
    write_tables,
    write_times,
)

import recast
import recast.papers.networks  # registers the networks
from recast.analysis.wakefulness import wakefulness
from recast.lab.data.digits import as_rgb, draw_canvases, draw_classes, read_digits
from recast.lab.data.seeding import choose_balanced, hold_out
from recast.lab.evaluation.intervals import POINTS, interval
from recast.lab.folder.records import Wakefulness
from recast.tracing.cost import count_parameters

ONE = {"content_heads": 1, "gaussian_heads": "none", "head_dim": 32, "gate_ratio": 50}
NARROW = {"content_heads": "all", "gaussian_heads": "all"}
CHOICES = "block content_heads gaussian_heads head_dim project_values query_key gate_ratio qk_ratio epochs".split()
START = {"odd_digit": "zero", "cifar": "images", "converged": "images"}
"""Task → start of queries and keys in nine heads, as its recipe had it."""
EPOCHS = {"odd_digit": 10, "cifar": 5, "converged": 6}
LR = {"odd_digit": 2e-3, "cifar": 5e-3, "converged": 1e-4}
"""Task → learning rate of the sweep, and of the comparison if no other was tried."""
BATCH = {"odd_photo": 32, "odd_digit": 64, "cifar": 128, "converged": 128}
RATES = (5e-3, 2e-2, 1e-3)


def settings(task: str) -> list[dict[str, Any]]:
    """Return the settings of the sweep."""
    wide = ONE | {"epochs": EPOCHS[task], "query_key": "zero"}
    bare = wide | {"project_values": False}
    if task == "cifar":
        grid = [{}, bare, bare | {"query_key": "images"}, bare | {"gate_ratio": 10}, NARROW, wide]
        grid += [{"block": "non-local", "gate_ratio": 50}]
        return [{"epochs": EPOCHS[task]} | setting for setting in grid]
    short = wide | {"epochs": 5}
    rows = [{}, NARROW, NARROW | {"gate_ratio": 50}, short | {"gate_ratio": 10}]
    rows += [short | {"gate_ratio": 10, "head_dim": 64}, short, short | {"head_dim": 64}, wide, short | {"qk_ratio": 5}]
    rows += [short | {"project_values": False}, bare, {"block": "non-local", "gate_ratio": 50, "epochs": 10}]
    return rows


def arms(task: str) -> dict[str, dict[str, Any]]:
    """Return the arms of the comparison: a setting, and `as_long_as`, the arm that sets its training time."""
    new = ONE | {"project_values": False, "epochs": EPOCHS[task]}
    old = NARROW | {"query_key": START[task], "epochs": EPOCHS[task]}
    return {
        "parent": {"epochs": 0},
        "one wide head": new,
        "fine-tuned, equal updates": {"epochs": EPOCHS[task]},
        "fine-tuned, equal seconds": {"epochs": EPOCHS[task], "as_long_as": "one wide head"},
        "nine heads, equal seconds": old | {"as_long_as": "one wide head"},
        "non-local": {"block": "non-local", "epochs": EPOCHS[task], "gate_ratio": 50},
        "1×1 block": {"block": "1×1", "epochs": EPOCHS[task], "gate_ratio": 50},
        "global context": {"block": "context", "epochs": EPOCHS[task], "gate_ratio": 50},
    }


def complete(task: str, setting: dict[str, Any]) -> dict[str, Any]:
    """Return a setting with a value for every choice."""
    common = {"epochs": 5, "gate_ratio": 10, "qk_ratio": 1, "project_values": True, "query_key": START[task]}
    return {name: (common | setting).get(name, "") for name in CHOICES}


def digits(name: str, count: int, held_out: str, size: int) -> tuple[Tensor, ...]:
    """Return normalised canvases and answers: to train on, and others of the dev or test digits."""
    grey, labels, is_test = read_digits()
    is_dev = torch.zeros(len(labels), dtype=torch.bool)
    is_dev[(~is_test).nonzero().flatten()[choose_balanced(labels[~is_test], 300, "the held-out part")]] = True
    parts: list[Tensor] = []
    for is_used, number in ((~is_dev & ~is_test, count), (is_dev if held_out == "dev" else is_test, size)):
        generator = torch.Generator().manual_seed(100 + len(parts))
        classes, answers = draw_classes(name, number, generator)
        images = as_rgb(draw_canvases(grey[is_used, 0], labels[is_used], classes, generator), answers)
        pixels = torch.stack([torch.as_tensor(images[i][0]) for i in range(number)])
        parts += [(pixels - 0.057) / 0.202, answers]
    return tuple(parts)


def cifar(folder: Path, held_out: str) -> tuple[Tensor, ...]:
    """Return normalised images and labels: to train on, and others.

    CIFAR-100: 9,000 balanced images, and held-out or test images. CIFAR-10: all images, and test images.
    """
    train, evaluated = read_images(folder)
    if folder.name == "cifar100":
        train, dev = map(train.subset, hold_out(train.labels, 0.1))
        train = train.subset(choose_balanced(train.labels, 9000, "the training part"))
        evaluated = dev if held_out == "dev" else evaluated
    return normalised(train.pixels), train.labels, normalised(evaluated.pixels), evaluated.labels


def build(parent: nn.Module, setting: dict[str, Any], images: Tensor, seed: int) -> nn.Module:
    """Return the parent, recast or with a block, by the setting."""
    torch.manual_seed(seed)
    model = copy.deepcopy(parent)
    if setting["content_heads"]:
        names = ("content_heads", "gaussian_heads", "project_values", "query_key")
        choices = {name: setting[name] for name in names}
        config = recast.RecastConfig("linear", **choices, head_dim=setting["head_dim"] or None)
        recast.recast_(model, recast.plan(parent, images[:2], config, max_tokens=None))
        if config.query_key == "images":
            recast.wake_(model, images[:256], seed=seed)
    elif setting["block"]:
        wide = copy.deepcopy(parent)
        config = recast.RecastConfig(
            gate="linear", **{n: ONE[n] for n in ONE if n != "gate_ratio"}, project_values=False
        )
        recast.recast_(wide, recast.plan(parent, images[:2], config))
        pixels = parent.forward_features(images[:1])[0, 0].numel()  # type: ignore[operator]
        add_block(model, setting["block"], (macs_of(wide, images) - macs_of(parent, images)) / pixels, pixels)
    return model


def train_on(
    task: str, model: nn.Module, data: tuple[Tensor, ...], setting: dict[str, Any], lr: float, epochs: float, seed: int
) -> float:
    """Train by a cosine to 1e-5; images of CIFAR are cropped and flipped. Return the seconds of the processor."""
    batch, augment = BATCH[task], crop_and_flip if task in ("cifar", "converged") else None
    updates = round(epochs * (len(data[0]) // batch))
    groups = groups_of(model, lr, setting)
    return train(model, *data[:2], groups, updates, seed, batch, cosine(updates), 1e-5, augment=augment)


def load(task: str, held_out: str, out: Path) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the parent and the images."""
    torch.manual_seed(0)
    if task == "odd_digit":
        data, weights = digits("odd_digit", 5000, held_out, 2000), out / "parent_odd_digit.pt"
        parent = timm.create_model("digits_resnet", num_classes=10)
        if not weights.exists():
            train_on(task, parent, digits("one_digit", 5000, "dev", 500), complete(task, {}), 2e-3, 3, 0)
            torch.save(parent.state_dict(), weights)
        parent.load_state_dict(torch.load(weights, weights_only=True))
    else:
        folder = "cifar10" if task == "converged" else "cifar100"
        data, parent = cifar(Path(os.environ["RECAST_DATA"]) / folder, held_out), cifar10_network()
        if task == "cifar":
            torch.manual_seed(0)
            parent.reset_classifier(100)
    return parent.eval(), data


def sweep(options: argparse.Namespace) -> None:
    """Train the settings that the table lacks."""
    task, path = options.task, options.out / f"price_{options.task}.csv"
    parent, data = load(task, "dev", options.out)
    parent_macs, parameters = macs_of(parent, data[0]), count_parameters(parent)
    for setting in (complete(task, setting) for setting in settings(task)):
        labels = {"task": task, **setting, "seed": 0}
        if has_row(path, **labels):
            continue
        started = time.process_time()
        model = build(parent, setting, data[0], 0)
        train_on(task, model, data, setting, LR[task], setting["epochs"], 0)
        seconds = time.process_time() - started
        attention = Wakefulness.of(wakefulness(model, data[2][:64]))
        row = labels | {"top1": top1(correct(model, *data[2:])), "awake": attention.awake if attention else 0}
        row |= {"content": attention.heads if attention else 0, "macs": f"{macs_of(model, data[0]) / parent_macs:.3f}"}
        row |= {"parameters": f"{count_parameters(model) / parameters:.3f}", "cpu_seconds": f"{seconds:.0f}"}
        append(path, row)


def times(options: argparse.Namespace) -> None:
    """Time a step and inference of every arm, by turns."""
    task = options.task
    parent, data = load(task, "dev", options.out)
    first, timed = [part[: BATCH[task]] for part in data[:2]], {}
    for arm, setting in arms(task).items():
        setting = complete(task, setting)
        model = build(parent, setting, data[0], 0)
        timed[arm] = model, groups_of(model, LR[task], setting), *first
    write_times(options.out / f"times_{task}.csv", task, timed, "parent")


def rates(options: argparse.Namespace) -> None:
    """Train the arms and rates that the table lacks; equal seconds take the rate of equal updates."""
    task, path = options.task, options.out / f"rates_{options.task}.csv"
    parent, data = load(task, "dev", options.out)
    for lr in RATES:
        for arm, setting in arms(task).items():
            is_skipped = arm in ("parent", "fine-tuned, equal seconds") or (options.only and arm not in options.only)
            if is_skipped or has_row(path, arm=arm, lr=lr):
                continue
            setting = complete(task, setting)
            model = build(parent, setting, data[0], 0)
            train_on(task, model, data, setting, lr, setting["epochs"], 0)
            append(path, {"task": task, "arm": arm, "lr": lr, "top1": top1(correct(model, *data[2:]))})


def best_rate(task: str, out: Path, arm: str) -> float:
    """Return the rate with the highest held-out accuracy of an arm."""
    arm = arm.replace("equal seconds", "equal updates") if arm.startswith("fine-tuned") else arm
    rows = [row for row in read(out / f"rates_{task}.csv") if row["arm"] == arm]
    return float(max(rows, key=lambda row: float(row["top1"]))["lr"]) if rows else LR[task]


def compare(options: argparse.Namespace) -> None:
    """Train the arms that the table lacks; store which test images were right."""
    task, out = options.task, options.out
    parent, data = load(task, "test", out)
    cost = {row["arm"]: float(row["step"]) for row in read(out / f"times_{task.replace('converged', 'cifar')}.csv")}
    path = out / f"compare_{task}.csv"
    for seed, arm in missing_runs(options, path, arms(task)):
        setting = arms(task)[arm]
        epochs = setting["epochs"]
        if as_long_as := setting.get("as_long_as"):
            epochs *= cost[as_long_as] / cost[arm]
        setting = complete(task, setting)
        model, lr = build(parent, setting, data[0], seed), best_rate(task, out, arm)
        train_on(task, model, data, setting, lr, epochs, seed)
        hits = correct(model, *data[2:])
        store(out / "right" / f"{task}_{arm}_{seed}.npy", hits)
        row = {"task": task, "arm": arm, "seed": seed, "lr": lr, "epochs": f"{epochs:.2f}", "top1": top1(hits)}
        append(path, row | {"awake": awake_heads(model, data[2][:64])})


def table(options: argparse.Namespace) -> None:
    """Write results/price_TASK.csv (the sweep) and results/price_compare_TASK.csv (means and differences)."""
    task, out = options.task, options.out
    for kind in ("price", "times", "rates"):
        if (source := out / f"{kind}_{task}.csv").exists():
            name = f"price_{kind}_{task}.csv".replace("price_price", "price")
            (RESULTS / name).write_text(source.read_text())
    runs, rows = read(out / f"compare_{task}.csv"), []

    count = 2000 if task == "odd_digit" else 5000
    ours = [run["seed"] for run in runs if run["arm"] == "one wide head"]
    for arm in dict.fromkeys(run["arm"] for run in runs):
        arm_runs = [run for run in runs if run["arm"] == arm]
        shared = [seed for seed in ours if seed in [run["seed"] for run in arm_runs]]
        seeds = len(shared)
        row = {"task": task, "arm": arm, "seeds": seeds, "lr": arm_runs[0]["lr"], "epochs": arm_runs[0]["epochs"]}
        row |= {"top1": f"{statistics.mean(float(run['top1']) for run in arm_runs):.2f}"}
        row |= {"top1_of_seeds": " ".join(run["top1"] for run in arm_runs)}
        row |= {"awake": " ".join(run["awake"] for run in arm_runs)}
        row |= dict.fromkeys(("one_wide_head_minus_arm", "low_95", "high_95", "smallest_visible"), "")
        if seeds > 1 and arm != "one wide head":
            both = (stored(out / "right" / f"{task}_{name}", shared, count) for name in ("one wide head", arm))
            row |= columns("one_wide_head_minus_arm", interval(100 * np.subtract(*both), POINTS))
        rows.append(row)
    write_tables("price", {f"_compare_{task}": rows})


if __name__ == "__main__":
    parts = {"sweep": sweep, "times": times, "rates": rates, "compare": compare, "table": table}
    main(__doc__, ("odd_digit", "cifar", "converged"), parts)
