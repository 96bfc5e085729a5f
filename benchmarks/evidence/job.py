"""One training run of a study: what it is, as plain data, and how it is carried out."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images import Augment, Labelled
from measure import Data, measure, right
from safetensors.torch import save_model
from timm.data import Mixup
from torch import nn
from torchvision.transforms.v2.functional import normalize

import recast
from recast.analysis.wakefulness import wakefulness
from recast.data.seeding import choose_balanced
from recast.models.build import build
from recast.run.config import ModelConfig, OptimConfig, RecastConfig
from recast.run.config.attention import QueryKey
from recast.training.optim import WarmupCosine, make_optimizer, set_learning_rate
from recast.training.prepare import WAKING_IMAGES

NORMALISATION = {
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and standard deviation that the weights know, by what they were trained on."""


@dataclass(frozen=True)
class Job:
    """A run: parent, images, arm and rates. Its name is its folder."""

    study: str
    arm: str
    seed: int
    parent: str
    """Weights in $RECAST_DATA/weights."""
    trained_on: str
    data: str
    num_train: int
    updates: int
    lr: float = 1e-3
    batch_size: int = 64
    gate_lr: float = 1e-2
    qk_lr: float | None = None
    weight_decay: float = 0.05
    where: str | None = None
    """What is recast; None: nothing, the fine-tuned arm."""
    gate: str = "linear"
    query_key: QueryKey = "zero"
    logit_std: float = 1.5
    augment: str = "basic"
    longer: int = 1
    """Times the updates: what the other arm's time would buy."""
    stride: str = "keep"
    """remove: the last stage at stride 1, the compute of attention without attention."""
    tuning: bool = False
    """Judged on the 10 % that are held out, not on the test images."""

    @property
    def folder(self) -> str:
        """STUDY/ARM-SEED, and the rates where they are being chosen."""
        rates = f"-lr{self.lr:g}-gates{self.gate_lr:g}-qk{self.qk_lr}" if self.tuning else ""
        return f"{self.study}/{self.arm.replace(' ', '_')}-{self.seed}{rates}"


def parent_of(job: Job, root: Path, classes: int) -> nn.Module:
    """The trained parent; with other classes its head is new, drawn by the seed: the same in all arms of a seed."""
    own = {"cifar10": 10, "cifar100": 100}[job.trained_on]
    depth = "56" if "resnet56" in job.parent else "20"
    shortcut = "_a" if "akamaster" in job.parent else ""
    config = ModelConfig(f"cifar_resnet{depth}{shortcut}", str(root / "weights" / job.parent), new_head=own != classes)
    torch.manual_seed(job.seed)
    return build(config, num_classes=classes)


def recast_arm(model: nn.Module, job: Job, train: Labelled, device: torch.device) -> nn.Module:
    """The arm's network, from the parent that it takes over."""
    if job.stride == "remove":
        for name, module in model.named_modules():
            if name.startswith("layer3") and isinstance(module, nn.Conv2d):
                module.stride = (1, 1)
    if job.where is None:
        return model
    mean, std = NORMALISATION[job.trained_on]
    example = torch.zeros(1, 3, 32, 32, device=device)
    torch.manual_seed(job.seed)
    config = RecastConfig(gate=job.gate, query_key=job.query_key, logit_std=job.logit_std)
    recast.recast_(model, recast.plan(model, example, config, where=job.where))
    if job.query_key == "images":
        chosen = choose_balanced(train.labels.cpu(), WAKING_IMAGES, "waking images", job.seed).to(train.pixels.device)
        batches = (normalize(train.pixels[at].float() / 255, list(mean), list(std)) for at in chosen.split(128))
        recast.wake_(model, batches, job.logit_std, job.seed)
    return model


def train(job: Job, model: nn.Module, images: Labelled, device: torch.device) -> dict[str, Any]:
    """Train in place; returns the losses' course and the seconds."""
    mean, std = (list(values) for values in NORMALISATION[job.trained_on])
    optim = OptimConfig(
        lr=job.lr, gate_lr=job.gate_lr, qk_lr=job.qk_lr, weight_decay=job.weight_decay,
        warmup_epochs=0.05, warmup_lr=1e-3 * job.lr, min_lr=1e-3 * job.lr,
    )  # fmt: skip
    optimizer = make_optimizer(model, optim, job.batch_size)
    updates = job.longer * job.updates
    schedule = WarmupCosine(optim, 1, updates, job.batch_size)
    augment, generator = Augment(job.augment), torch.Generator().manual_seed(job.seed)
    torch.manual_seed(job.seed)
    classes = int(images.labels.max()) + 1
    mixup = Mixup(0.8, 1.0, label_smoothing=0.1, num_classes=classes) if job.augment == "deit" else None
    loss_of = nn.CrossEntropyLoss()
    model.train()
    order, at, losses, started = torch.empty(0, dtype=torch.long), 0, [], time.perf_counter()
    for update in range(updates):
        if at + job.batch_size > len(order):
            order, at = torch.randperm(len(images), generator=generator), 0
        chosen = order[at : at + job.batch_size].to(images.pixels.device)
        at += job.batch_size
        pixels, targets = augment(images.pixels[chosen], generator), images.labels[chosen]
        if mixup is not None:
            pixels, targets = mixup(pixels, targets)
        set_learning_rate(optimizer, schedule.factor(update))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(normalize(pixels, mean, std).contiguous(memory_format=torch.channels_last))
        loss = loss_of(logits.float(), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    course = torch.stack(losses).float().cpu()
    tail = max(1, updates // 20)
    return {"train_loss": float(course[-tail:].mean()), "seconds": time.perf_counter() - started}


def fold_all(model: nn.Module, images: Labelled, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """The convolutions that are left of a trained network without its attention, in place.

    All gates are closed, however far they were open, and BatchNorm's statistics are estimated again.
    """
    recast.fold_(model, tol=float("inf"))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean of all batches
    model.train()
    with torch.no_grad():
        for pixels in images.pixels[:2048].split(256):
            model(normalize(pixels.float() / 255, list(mean), list(std)))


def run(job: Job, out: Path, root: Path, data: Data, device: torch.device) -> Path:
    """Carry a job out, or leave it alone where its result lies already."""
    folder = out / job.folder
    if (folder / "result.json").is_file():
        return folder
    classes = int(data.test.labels.max()) + 1
    images = data.train.take(choose_balanced(data.train.labels.cpu(), job.num_train, "num_train", job.seed).to(device))
    model = parent_of(job, root, classes).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = recast_arm(model, job, images, device)
    probe = normalize(images.pixels[:32].float() / 255, *(list(v) for v in NORMALISATION[job.trained_on]))
    record: dict[str, Any] = {"job": asdict(job), "wakefulness_before": wakefulness(model, probe)}
    record |= train(job, model, images, device)
    record["wakefulness"] = wakefulness(model, probe)
    mean, std = NORMALISATION[job.trained_on]
    if job.tuning:
        model.eval()
        scored = right(lambda pixels: model(normalize(pixels, list(mean), list(std))), data.held_out)
        record["held_out_top1"] = 100 * float(scored.float().mean())
    else:
        started = time.perf_counter()
        found = measure(model, mean, std, data.test, data.few, data.corrupted)
        record["scores"] = {name: round(100 * float(values.mean()), 3) for name, values in found.items()}
        record["evaluation_seconds"] = time.perf_counter() - started
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "right.npz", **found)
        save_model(model, str(folder / "weights.safetensors"))
        if job.where is not None:
            fold_all(model, images, mean, std)
            found = measure(model, mean, std, data.test, data.few, data.corrupted)
            np.savez_compressed(folder / "folded.npz", **found)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / "result.part"
    temporary.write_text(json.dumps(record))
    temporary.replace(folder / "result.json")
    return folder
