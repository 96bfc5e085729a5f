"""How much attention is enough? Content heads × width × Gaussians × W_val × gate rate × start, on held-out images.

    python studies/price.py odd_digit --out runs/price                          # goes on where it was stopped
    RECAST_DATA=DIR python studies/price.py cifar --out runs/price              # CIFAR-10 ResNet-20 → CIFAR-100

Held out: canvases of 300 digits of the training part (odd_digit), a tenth of train.zip (cifar). No test image is read.
Writes OUT/price_TASK.csv, a row a run: the setting, seed, epochs, top-1, heads awake, multiply-adds over the parent's.
"""

from __future__ import annotations

import argparse
import copy
import csv
import io
import math
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import recast
import recast.papers  # registers the networks
from recast.analysis.records import Wakefulness
from recast.analysis.wakefulness import wakefulness
from recast.lab.data.digits import as_rgb, draw_canvases, draw_classes, read_digits
from recast.lab.data.seeding import choose_balanced, hold_out

ONE = {"content_heads": "middle", "gaussian_heads": "none"}
NARROW = {"content_heads": "all", "gaussian_heads": "all"}
COLUMNS = (
    "task", "content_heads", "gaussian_heads", "head_dim", "project_values", "query_key", "lr", "gate_ratio",
    "qk_ratio", "epochs", "seed", "top1", "awake", "content", "macs", "parameters", "cpu_seconds",
)  # fmt: skip


def settings(task: str) -> list[dict[str, Any]]:
    """The grid, the most telling runs first."""
    start = {"odd_digit": "zero", "cifar": "images"}[task]
    grid: list[dict[str, Any]] = [{"content_heads": ""}, NARROW, NARROW | {"gate_ratio": 50}]
    epochs = {"odd_digit": (5, 10), "cifar": (10,)}[task]
    for count in epochs:
        for ratio in (10, 50, 200):
            grid += [ONE | {"head_dim": width, "gate_ratio": ratio, "epochs": count} for width in (32, 64)]
        grid.append(ONE | {"gate_ratio": 50, "epochs": count, "project_values": False})
        grid.append(ONE | {"gate_ratio": 50, "epochs": count, "query_key": "images" if start == "zero" else "zero"})
        grid.append({"content_heads": "middle", "gaussian_heads": "all", "gate_ratio": 50, "epochs": count})
    grid += [ONE | {"content_heads": "3", "gate_ratio": 50, "head_dim": width} for width in (10, 16)]
    grid.append(NARROW | {"gaussian_heads": "none", "gate_ratio": 50})
    grid.append(ONE | {"head_dim": 16, "gate_ratio": 50})
    grid += [ONE | {"gate_ratio": 50, "qk_ratio": 10}, ONE | {"gate_ratio": 50, "qk_ratio": 3}]
    common = {
        "query_key": start, "epochs": epochs[0], "gate_ratio": 10, "qk_ratio": 1, "project_values": True,
        "head_dim": "",
    }  # fmt: skip
    return [common | setting for setting in grid]


def digits(name: str, count: int, dev: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Canvases to train on and held-out ones, of other digits: images in [0, 1] normalised, answers."""
    grey, labels, is_test = read_digits()
    grey, labels = grey[~is_test], labels[~is_test]
    is_dev = torch.zeros(len(labels), dtype=torch.bool)
    is_dev[choose_balanced(labels, 300, "the held-out part")] = True
    parts: list[Tensor] = []
    for which, size in ((~is_dev, count), (is_dev, dev)):
        generator = torch.Generator().manual_seed(100 + len(parts))
        classes, answers = draw_classes(name, size, generator)
        images = as_rgb(draw_canvases(grey[which, 0], labels[which], classes, generator), answers)
        pixels = torch.stack([torch.as_tensor(images[i][0]) for i in range(size)])
        parts += [(pixels - 0.057) / 0.202, answers]
    return parts[0], parts[1], parts[2], parts[3]


def cifar(root: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CIFAR-100's training images, a tenth held out."""
    folder = root / "cifar100"
    classes = {name: label for label, name in enumerate((folder / "classes.txt").read_text().split())}
    with zipfile.ZipFile(folder / "train.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".png"))
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(n))).convert("RGB")) for n in names])
    labels = torch.tensor([classes[name.split("/")[0]] for name in names])
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - mean) / std
    keep, held_out = hold_out(labels, 0.1)
    return images[keep], labels[keep], images[held_out], labels[held_out]


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


def train(
    model: nn.Module, data: tuple[Tensor, ...], lr: float, gate_ratio: float, qk_ratio: float, epochs: int, seed: int,
    augment: bool,
) -> None:  # fmt: skip
    """AdamW, cosine to 1e-5, batches of 64 (128 with augmentation), no warm-up but of a twentieth."""
    images, labels = data[:2]
    batch = 128 if augment else 64
    generator = torch.Generator().manual_seed(seed)
    groups = recast.param_groups(model, lr=lr, gate_lr=lr * gate_ratio, qk_lr=lr * qk_ratio, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in optimizer.param_groups]
    per_epoch = len(images) // batch
    total = epochs * per_epoch
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
def top1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """In percent."""
    model.eval()
    return 100 * float(torch.cat([model(part).argmax(1) for part in images.split(250)]).eq(labels).float().mean())


def main() -> None:
    """Every setting that the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("odd_digit", "cifar"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", type=int, help="the first so many settings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"price_{options.task}.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    if not rows:
        path.write_text(",".join(COLUMNS) + "\n")
    if options.task == "odd_digit":
        data, lr, augment = digits("odd_digit", 5000, 2000, 0), 2e-3, False
        weights = options.out / "parent_odd_digit.pt"
        torch.manual_seed(0)
        parent = timm.create_model("digits_resnet", num_classes=10)
        if weights.exists():
            parent.load_state_dict(torch.load(weights, weights_only=True))
        else:
            train(parent, digits("one_digit", 5000, 500, 0), 2e-3, 1, 1, 3, 0, False)
            torch.save(parent.state_dict(), weights)
    else:
        root = Path(os.environ["RECAST_DATA"])
        data, lr, augment = cifar(root), 1e-3, True
        parent = timm.create_model("cifar_resnet20_a", num_classes=10)
        parent.load_state_dict(load_file(root / "weights/cifar10_resnet20_akamaster.safetensors"))
        torch.manual_seed(0)
        parent.reset_classifier(100)
    parent.eval()
    for seed in options.seeds:
        for setting in settings(options.task)[: options.only]:
            key = {name: str(setting.get(name, "")) for name in COLUMNS[1:10]}
            key |= {"task": options.task, "lr": str(lr), "seed": str(seed)}
            if any(all(row[name] == value for name, value in key.items()) for row in rows):
                continue
            torch.manual_seed(seed)
            model, macs, parameters = copy.deepcopy(parent), 1.0, 1.0
            started = time.process_time()
            if setting["content_heads"]:
                config = recast.RecastConfig(
                    content_heads=setting["content_heads"], gaussian_heads=setting["gaussian_heads"],
                    head_dim=setting["head_dim"] or None, project_values=setting["project_values"],
                    query_key=setting["query_key"],
                )  # fmt: skip
                plan = recast.plan(parent, data[0][:2], config)
                macs, parameters = (getattr(plan.after, n) / getattr(plan.before, n) for n in ("macs", "parameters"))
                recast.recast_(model, plan)
                if config.query_key == "images":
                    recast.wake_(model, data[0][:256], seed=seed)
            train(model, data, lr, setting["gate_ratio"], setting["qk_ratio"], setting["epochs"], seed, augment)
            seconds = time.process_time() - started
            awake = Wakefulness.of(wakefulness(model, data[2][:64]))
            row = key | {
                "top1": f"{top1(model, *data[2:]):.2f}", "awake": awake.awake if awake else 0,
                "content": awake.heads if awake else 0,
                "macs": f"{macs:.3f}", "parameters": f"{parameters:.3f}", "cpu_seconds": f"{seconds:.0f}",
            }  # fmt: skip
            rows.append({name: str(value) for name, value in row.items()})
            with path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
