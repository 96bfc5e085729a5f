"""How much attention is enough, and what does it bring in equal time?

    python studies/price.py odd_digit sweep --out runs/price                    # goes on where it was stopped
    RECAST_DATA=DIR python studies/price.py cifar sweep --out runs/price        # CIFAR-10 ResNet-20 → CIFAR-100
    python studies/price.py odd_digit times --out runs/price                    # on an idle machine
    python studies/price.py odd_digit rates --out runs/price                    # each arm's learning rate
    python studies/price.py odd_digit compare --out runs/price --seeds 0 1 2    # after times and rates
    python studies/price.py odd_digit table --out runs/price                    # writes results/price_*.csv
    RECAST_DATA=DIR python studies/price.py converged compare --out runs/price --seeds 0 1 2    # after times of cifar

sweep: content heads × width × Gaussians × W_val × rates × start, on held-out images: canvases of 300 digits of the
training part (odd_digit), a tenth of train.zip (cifar). It fixes the defaults; no test image is read.

times: seconds of a training step and of inference of every arm, by turns, one thread.

rates: every arm at the learning rates of `RATES`, seed 0, on the held-out images of the sweep; compare takes its best.

converged: the CIFAR-10 ResNet-20 as published (91.9 %), trained on with images that it was trained with, so that more
updates should bring nothing; every arm at 1e-4, T-CNN's rate. The network is that of cifar, and so are its times.

compare, on test images, stated before they were looked at. Arms (`arms`): the parent; fine-tuned for as many updates
as one wide head; fine-tuned for as many seconds, by the measured step times; nine heads, the former default, for as
many seconds; one wide head, the new default; and, added after the last stage and started at zero, a 1×1 block of the
new default's multiply-adds, timm's non-local block, its global context. One parent; seeds change the order of images
and new parameters. A difference to one wide head is shown if 0 is outside its 95 % interval, t(seeds − 1) ·
√(s²/seeds + v/images): s² of the seeds' differences, v of the images' mean differences. The smallest visible effect is
what this sees with 80 % probability.
"""

from __future__ import annotations

import argparse
import copy
import csv
import io
import math
import os
import random
import statistics
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy.special import stdtrit
from timm.layers import GlobalContext, NonLocalAttn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import recast
import recast.papers.networks  # registers the networks
from recast.lab.analysis.wakefulness import wakefulness
from recast.lab.data.digits import as_rgb, draw_canvases, draw_classes, read_digits
from recast.lab.data.seeding import choose_balanced, hold_out
from recast.lab.records import Wakefulness

ONE = {"content_heads": "middle", "gaussian_heads": "none", "head_dim": 32, "gate_ratio": 50}
NARROW = {"content_heads": "all", "gaussian_heads": "all"}
CHOICES = (
    "block", "content_heads", "gaussian_heads", "head_dim", "project_values", "query_key", "gate_ratio", "qk_ratio",
    "epochs",
)  # fmt: skip
COLUMNS = ("task", *CHOICES, "seed", "top1", "awake", "content", "macs", "parameters", "cpu_seconds")
START = {"odd_digit": "zero", "cifar": "images", "converged": "images"}
"""Queries and keys at the start, the former default of the task's recipe."""
EPOCHS = {"odd_digit": 10, "cifar": 5, "converged": 6}
LR = {"odd_digit": 2e-3, "cifar": 5e-3, "converged": 1e-4}
"""Of the sweep, and of the comparison where no other was tried."""
RATES = (5e-3, 2e-2, 1e-3)


def settings(task: str) -> list[dict[str, Any]]:
    """The grid, the most telling runs first."""
    one = ONE | {"epochs": EPOCHS[task], "query_key": "zero"}
    bare = one | {"project_values": False}
    if task == "cifar":
        grid = [
            {}, bare, bare | {"query_key": "images"}, bare | {"gate_ratio": 10}, NARROW, one,
            {"block": "non-local", "gate_ratio": 50},
        ]  # fmt: skip
        return [{"epochs": EPOCHS[task]} | setting for setting in grid]
    short = one | {"epochs": 5}
    return [
        {}, NARROW, NARROW | {"gate_ratio": 50}, short | {"gate_ratio": 10}, short | {"gate_ratio": 10, "head_dim": 64},
        short, short | {"head_dim": 64}, one, short | {"qk_ratio": 5}, short | {"project_values": False}, bare,
        {"block": "non-local", "gate_ratio": 50, "epochs": 10}, bare | {"query_key": "images"},
        bare | {"gate_ratio": 200},
        short | {"content_heads": "3", "head_dim": 16}, bare | {"head_dim": 64}, bare | {"gaussian_heads": "middle"},
        bare | {"gate_ratio": 10},
    ]  # fmt: skip


def arms(task: str) -> dict[str, dict[str, Any]]:
    """The arms of the comparison: a setting, and `as_long_as`, the arm whose seconds it trains for."""
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


def filled(task: str, setting: dict[str, Any]) -> dict[str, Any]:
    """A setting with every choice."""
    common = {"epochs": 5, "gate_ratio": 10, "qk_ratio": 1, "project_values": True, "query_key": START[task]}
    return dict.fromkeys(CHOICES, "") | common | setting


def digits(name: str, count: int, held_out: str, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Canvases to train on and others of other digits, dev or test: images normalised, answers."""
    grey, labels, is_test = read_digits()
    is_dev = torch.zeros(len(labels), dtype=torch.bool)
    is_dev[(~is_test).nonzero().flatten()[choose_balanced(labels[~is_test], 300, "the held-out part")]] = True
    parts: list[Tensor] = []
    for which, number in ((~is_dev & ~is_test, count), (is_dev if held_out == "dev" else is_test, size)):
        generator = torch.Generator().manual_seed(100 + len(parts))
        classes, answers = draw_classes(name, number, generator)
        images = as_rgb(draw_canvases(grey[which, 0], labels[which], classes, generator), answers)
        pixels = torch.stack([torch.as_tensor(images[i][0]) for i in range(number)])
        parts += [(pixels - 0.057) / 0.202, answers]
    return parts[0], parts[1], parts[2], parts[3]


def read_cifar(path: Path, classes: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Images and labels of a zip."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB")) for n in names])
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - mean) / std
    return images, torch.tensor([classes[name.split("/")[0]] for name in names])


def cifar(folder: Path, held_out: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 9,000 balanced images of CIFAR-100 and others, held out or of its test set; CIFAR-10 and its test set."""
    classes = {name: label for label, name in enumerate((folder / "classes.txt").read_text().split())}
    images, labels = read_cifar(folder / "train.zip", classes)
    if len(classes) == 10:
        return images, labels, *read_cifar(folder / "test.zip", classes)
    keep, dev = hold_out(labels, 0.1)
    keep = keep[choose_balanced(labels[keep], 9000, "the training part")]
    others = (images[dev], labels[dev]) if held_out == "dev" else read_cifar(folder / "test.zip", classes)
    return images[keep], labels[keep], *others


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Padded by 4, cut anywhere, half of them mirrored: each image for itself."""
    n = len(images)
    row, column = torch.randint(0, 9, (2, n), generator=generator)
    flip = torch.rand(n, generator=generator) < 0.5
    padded = F.pad(images, [4] * 4)
    at = torch.arange(32)
    columns = column[:, None] + torch.where(flip[:, None], 31 - at, at)
    image, rows = torch.arange(n)[:, None, None], (row[:, None] + at)[:, :, None]
    return padded.permute(0, 2, 3, 1)[image, rows, columns[:, None]].permute(0, 3, 1, 2)


class Residual(nn.Sequential):
    """x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def add_block(model: nn.Module, block: str, extra: float, pixels: int) -> None:
    """Put a block after the last stage that adds nothing at the start, of `extra` multiply-adds a pixel if it can."""
    width = model.num_features
    made: nn.Module
    if block == "non-local":
        made = NonLocalAttn(width, rd_channels=round(extra / (4 * width + 2 * pixels)))
    elif block == "context":
        made = GlobalContext(width, fuse_add=True, fuse_scale=False, rd_ratio=0.5)
        nn.init.zeros_(made.mlp_add.fc2.bias)
    else:
        hidden = round(extra / (2 * width))
        made = Residual(nn.Conv2d(width, hidden, 1), nn.ReLU(), nn.Conv2d(hidden, width, 1))
        nn.init.zeros_(made[2].weight)
        nn.init.zeros_(made[2].bias)
    model.layer3 = nn.Sequential(model.layer3, made)


def build(parent: nn.Module, setting: dict[str, Any], images: Tensor, seed: int) -> nn.Module:
    """The parent, recast or with a block, by the setting."""
    torch.manual_seed(seed)
    model = copy.deepcopy(parent)
    if setting["content_heads"]:
        names = ("content_heads", "gaussian_heads", "project_values", "query_key")
        config = recast.RecastConfig(**{n: setting[n] for n in names}, head_dim=setting["head_dim"] or None)
        recast.recast_(model, recast.plan(parent, images[:2], config))
        if config.query_key == "images":
            recast.wake_(model, images[:256], seed=seed)
    elif setting["block"]:
        wide = copy.deepcopy(parent)
        config = recast.RecastConfig(**{n: ONE[n] for n in ONE if n != "gate_ratio"}, project_values=False)
        recast.recast_(wide, recast.plan(parent, images[:2], config))
        pixels = parent.forward_features(images[:1])[0, 0].numel()  # type: ignore[operator]
        add_block(model, setting["block"], (macs_of(wide, images) - macs_of(parent, images)) / pixels, pixels)
    return model


@torch.no_grad()
def macs_of(model: nn.Module, images: Tensor) -> float:
    """Multiply-adds of an image with every map open."""
    with FlopCounterMode(display=False) as counter:
        copy.deepcopy(model).train()(images[:2])
    return counter.get_total_flops() / 4


def groups_of(model: nn.Module, lr: float, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups; the non-local block's normalisation, which starts at zero, learns as fast as gates."""
    ratio, qk_ratio = setting["gate_ratio"], setting["qk_ratio"]
    groups = recast.param_groups(model, lr=lr, gate_lr=lr * ratio, qk_lr=lr * qk_ratio, weight_decay=0.05)
    for norm in (block.norm.weight for block in model.modules() if isinstance(block, NonLocalAttn)):
        for group in groups:
            group["params"] = [p for p in group["params"] if p is not norm]
        groups.append({"name": "gates", "params": [norm], "lr": lr * ratio, "weight_decay": 0.0})
    return groups


def train(
    model: nn.Module, data: tuple[Tensor, ...], groups: list[dict[str, Any]], epochs: float, seed: int, augment: bool
) -> None:
    """AdamW, cosine to 1e-5, batches of 64 (128 with augmentation), a twentieth of warm-up."""
    images, labels = data[:2]
    batch = 128 if augment else 64
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    per_epoch = len(images) // batch
    total = round(epochs * per_epoch)
    warm = max(1, total // 20)
    model.train()
    for step in range(total):
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        factor = min(1.0, (step + 1) / warm) * (0.5 + 0.5 * math.cos(math.pi * step / total))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = max(rate * factor, 1e-5)
        at = order[step % per_epoch * batch :][:batch]
        x = shifted(images[at], generator) if augment else images[at]
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels[at]).backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """True where the answer is right."""
    model.eval()
    return torch.cat([model(part).argmax(1) for part in images.split(250)]).eq(labels)


def load(task: str, held_out: str, out: Path) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The parent and the images."""
    torch.manual_seed(0)
    if task == "odd_digit":
        data, weights = digits("odd_digit", 5000, held_out, 2000), out / "parent_odd_digit.pt"
        parent = timm.create_model("digits_resnet", num_classes=10)
        if not weights.exists():
            groups = recast.param_groups(parent, lr=2e-3, weight_decay=0.05)
            train(parent, digits("one_digit", 5000, "dev", 500), groups, 3, 0, False)
            torch.save(parent.state_dict(), weights)
        parent.load_state_dict(torch.load(weights, weights_only=True))
    else:
        root = Path(os.environ["RECAST_DATA"])
        data = cifar(root / ("cifar10" if task == "converged" else "cifar100"), held_out)
        parent = timm.create_model("cifar_resnet20_a", num_classes=10)
        parent.load_state_dict(load_file(root / "weights/cifar10_resnet20_akamaster.safetensors"))
        if task == "cifar":
            torch.manual_seed(0)
            parent.reset_classifier(100)
    return parent.eval(), data


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a table that may not exist yet."""
    return list(csv.DictReader(path.open())) if path.exists() else []


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row, with the names before the first."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(row, flush=True)


def sweep(task: str, out: Path, seeds: list[int], first: int | None) -> None:
    """Every setting of the first ones that the table lacks."""
    path = out / f"price_{task}.csv"
    parent, data = load(task, "dev", out)
    size, parameters = macs_of(parent, data[0]), sum(p.numel() for p in parent.parameters())
    for seed in seeds:
        for setting in (filled(task, setting) for setting in settings(task)[:first]):
            key = {"task": task} | {n: str(v) for n, v in setting.items()} | {"seed": str(seed)}
            if any(all(row[name] == value for name, value in key.items()) for row in read(path)):
                continue
            started = time.process_time()
            model = build(parent, setting, data[0], seed)
            train(model, data, groups_of(model, LR[task], setting), setting["epochs"], seed, task != "odd_digit")
            seconds = time.process_time() - started
            awake = Wakefulness.of(wakefulness(model, data[2][:64]))
            append(path, key | {
                "top1": f"{100 * float(right(model, *data[2:]).float().mean()):.2f}",
                "awake": awake.awake if awake else 0, "content": awake.heads if awake else 0,
                "macs": f"{macs_of(model, data[0]) / size:.3f}",
                "parameters": f"{sum(p.numel() for p in model.parameters()) / parameters:.3f}",
                "cpu_seconds": f"{seconds:.0f}",
            })  # fmt: skip


def by_turns(calls: list[tuple[Callable[[], None], ...]], rounds: int = 15) -> list[list[list[float]]]:
    """Return the seconds of every call of every arm, by turns, after a round that does not count."""
    seconds: list[list[list[float]]] = [[[] for _ in kinds] for kinds in calls]
    shuffle = random.Random(0).sample  # a fixed order would favour the arms that follow a small one
    for number in range(rounds + 1):
        for arm in shuffle(range(len(calls)), len(calls)):
            for call, values in zip(calls[arm], seconds[arm], strict=True):
                started = time.perf_counter()
                call()
                if number:
                    values.append(time.perf_counter() - started)
    return seconds


def calls_of(
    model: nn.Module, groups: list[dict[str, Any]], images: Tensor, answers: Tensor
) -> tuple[Callable[[], None], ...]:
    """Return what is timed: a step, inference of one image and of all, with random gates: closed ones are skipped."""
    optimizer, tested = torch.optim.AdamW(groups), copy.deepcopy(model)
    for name, parameter in tested.named_parameters():
        if name.endswith(("gamma", "spread")):
            nn.init.constant_(parameter, 0.1)
    recast.refresh_gates_(tested.eval())

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model.train()(images), answers).backward()
        optimizer.step()

    @torch.no_grad()
    def infer(count: int) -> None:
        tested(images[:count])

    return step, partial(infer, 1), partial(infer, len(images))


def times(task: str, out: Path, rounds: int = 15) -> None:
    """Medians of a step and of inference, by turns."""
    parent, data = load(task, "dev", out)
    batch = 64 if task == "odd_digit" else 128
    names, calls = [], []
    for name, setting in arms(task).items():
        setting = filled(task, setting)
        model = build(parent, setting, data[0], 0)
        names.append((name, macs_of(model, data[0])))
        calls.append(calls_of(model, groups_of(model, LR[task], setting), data[0][:batch], data[1][:batch]))
    seconds = by_turns(calls, rounds)
    (out / f"times_{task}.csv").unlink(missing_ok=True)
    for (name, macs), of_arm in zip(names, seconds, strict=True):
        pairs = zip(of_arm, seconds[0], strict=True)
        ratios = [statistics.median(a / b for a, b in zip(*pair, strict=True)) for pair in pairs]
        append(out / f"times_{task}.csv", {
            "task": task, "arm": name, "macs": f"{macs / names[0][1]:.3f}",
            "step_ms": f"{1000 * statistics.median(of_arm[0]):.1f}", "step": f"{ratios[0]:.3f}",
            "inference_1": f"{ratios[1]:.3f}", "inference_batch": f"{ratios[2]:.3f}",
        })  # fmt: skip


def rates(task: str, out: Path, only: list[str] | None) -> None:
    """Every arm and rate that the table lacks, on held-out images; equal seconds take the rate of equal updates."""
    path = out / f"rates_{task}.csv"
    parent, data = load(task, "dev", out)
    for lr in RATES:
        for name, setting in arms(task).items():
            done = any((row["arm"], float(row["lr"])) == (name, lr) for row in read(path))
            if done or name in ("parent", "fine-tuned, equal seconds") or (only and name not in only):
                continue
            setting = filled(task, {n: v for n, v in setting.items() if n != "as_long_as"})
            model = build(parent, setting, data[0], 0)
            train(model, data, groups_of(model, lr, setting), setting["epochs"], 0, task == "cifar")
            top1 = 100 * float(right(model, *data[2:]).float().mean())
            append(path, {"task": task, "arm": name, "lr": lr, "top1": f"{top1:.2f}"})


def best_rate(task: str, out: Path, arm: str) -> float:
    """Return the rate with the highest held-out accuracy of an arm."""
    arm = arm.replace("equal seconds", "equal updates") if arm.startswith("fine-tuned") else arm
    tried = [row for row in read(out / f"rates_{task}.csv") if row["arm"] == arm]
    return float(max(tried, key=lambda row: float(row["top1"]))["lr"]) if tried else LR[task]


def compare(task: str, out: Path, seeds: list[int], only: list[str] | None) -> None:
    """Every run of the comparison that the table lacks; keeps which test images were right."""
    parent, data = load(task, "test", out)
    cost = {row["arm"]: float(row["step"]) for row in read(out / f"times_{task.replace('converged', 'cifar')}.csv")}
    path = out / f"compare_{task}.csv"
    for seed in seeds:
        for name, setting in arms(task).items():
            done = any((row["arm"], row["seed"]) == (name, str(seed)) for row in read(path))
            if done or (only and name not in only):
                continue
            epochs = setting["epochs"]
            if other := setting.get("as_long_as"):
                epochs *= cost[other] / cost[name]
            setting = filled(task, {n: v for n, v in setting.items() if n != "as_long_as"})
            model, lr = build(parent, setting, data[0], seed), best_rate(task, out, name)
            train(model, data, groups_of(model, lr, setting), epochs, seed, task != "odd_digit")
            hits = right(model, *data[2:])
            (out / "right").mkdir(exist_ok=True)
            np.save(out / "right" / f"{task}_{name}_{seed}.npy", np.packbits(hits.numpy()))
            awake = Wakefulness.of(wakefulness(model, data[2][:64]))
            append(path, {
                "task": task, "arm": name, "seed": seed, "lr": lr, "epochs": f"{epochs:.2f}",
                "top1": f"{100 * float(hits.float().mean()):.2f}",
                "awake": f"{awake.awake}/{awake.heads}" if awake else "",
            })  # fmt: skip


def interval(mean: float, variance: float, seeds: int) -> dict[str, str]:
    """Return the 95 % interval of a mean difference, and the smallest one seen with 80 % probability."""
    half, seen = (float(stdtrit(seeds - 1, q)) * math.sqrt(variance) for q in (0.975, 0.8))
    values = {"low_95": mean - half, "high_95": mean + half, "smallest_visible": half + seen}
    return {name: f"{value:.2f}" for name, value in values.items()}


def table(task: str, out: Path, results: Path) -> None:
    """Write results/price_TASK.csv (the sweep) and results/price_compare_TASK.csv (means and differences)."""
    for kind in ("price", "times", "rates"):
        if (source := out / f"{kind}_{task}.csv").exists():
            (results / f"price_{kind}_{task}.csv".replace("price_price", "price")).write_text(source.read_text())
    rows = read(out / f"compare_{task}.csv")
    path = results / f"price_compare_{task}.csv"
    path.unlink(missing_ok=True)

    def hits(arm: str) -> dict[str, np.ndarray[Any, Any]]:
        files = {row["seed"]: out / "right" / f"{task}_{arm}_{row['seed']}.npy" for row in rows if row["arm"] == arm}
        return {seed: np.unpackbits(np.load(file)).astype(float) for seed, file in files.items()}

    count = 2000 if task == "odd_digit" else 5000
    ours = hits("one wide head")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of_arm = [row for row in rows if row["arm"] == arm]
        theirs = hits(arm)
        shared = [seed for seed in ours if seed in theirs]
        difference = 100 * np.stack([(ours[seed] - theirs[seed])[:count] for seed in shared])
        n, mean = len(shared), float(difference.mean())
        row = {
            "task": task, "arm": arm, "seeds": n, "lr": of_arm[0]["lr"], "epochs": of_arm[0]["epochs"],
            "top1": f"{statistics.mean(float(r['top1']) for r in of_arm):.2f}",
            "top1_of_seeds": " ".join(r["top1"] for r in of_arm), "awake": " ".join(r["awake"] for r in of_arm),
        }  # fmt: skip
        if n > 1 and arm != "one wide head":
            spread = difference.mean(1).var(ddof=1) / n + difference.mean(0).var(ddof=1) / count
            row |= {"one_wide_head_minus_arm": f"{mean:.2f}"} | interval(mean, spread, n)
        else:
            row |= dict.fromkeys(("one_wide_head_minus_arm", "low_95", "high_95", "smallest_visible"), "")
        append(path, row)


def main() -> None:
    """Run a part of the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("odd_digit", "cifar", "converged"))
    parser.add_argument("part", choices=("sweep", "times", "rates", "compare", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--first", type=int, help="of sweep: so many settings")
    parser.add_argument("--only", nargs="+", help="of rates and compare: these arms")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "sweep":
        sweep(options.task, options.out, options.seeds, options.first)
    elif options.part == "times":
        times(options.task, options.out)
    elif options.part == "rates":
        rates(options.task, options.out, options.only)
    elif options.part == "compare":
        compare(options.task, options.out, options.seeds, options.only)
    else:
        table(options.task, options.out, Path(__file__).parents[1] / "results")


if __name__ == "__main__":
    main()
