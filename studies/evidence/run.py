"""Train and evaluate the networks of jobs, side by side: one process per core, or several that share a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from archives import is_finished
from images import crop_and_flip, moved, read
from measure import Data, balanced_part, corrupted, measure, measure_pool, top1
from networks import Prepared, fold_all, parent_of, plan_for, wake
from safetensors.torch import save_model
from studies import Job
from timm.layers import set_fused_attn
from torch import nn

import recast
from recast.analysis.wakefulness import wakefulness
from recast.files import replaced
from recast.lab.analysis.fourier import fourier
from recast.lab.config import OptimConfig
from recast.lab.data.datasets import ImageTensors
from recast.lab.data.seeding import choose_balanced, hold_out
from recast.lab.training.optim import WarmupDecay, make_optimizer, set_learning_rate
from recast.layers.pool_config import PoolConfig
from recast.surgery.schedule import Schedule
from recast.tracing.hooks import full_precision

HELD_OUT = 0.1
"""Share of the training images to choose rates on, the same for every run."""
NUM_PROBED = 32
"""Images that wakefulness is measured on."""
NUM_TRAIN_SCORED = 1000
"""Training images whose accuracy shows whether training has converged."""


class Setup(NamedTuple):
    """Folders and device of all runs, and the number of test images that are corrupted and attacked."""

    root: Path
    out: Path
    num_few: int
    device: str


@cache
def load_images(name: str, setup: Setup) -> Data:
    """Return the images of a study, read once per process."""
    images, test = read(setup.root / name)
    few = balanced_part(test, setup.num_few)
    parts = [*map(images.subset, hold_out(images.labels, HELD_OUT)), test, few]
    by_kind = corrupted(few, setup.out / "corrupted" / name)
    to_device = partial(moved, device=torch.device(setup.device))
    return Data(*map(to_device, parts), {kind: to_device(images) for kind, images in by_kind.items()})


def train(job: Job, model: Prepared, images: ImageTensors, device: torch.device) -> dict[str, Any]:
    """Train in place; return the final loss, the seconds and when layers became attention."""
    ends = {"warmup_epochs": 0.05, "warmup_lr": 1e-3 * job.lr, "min_lr": 1e-3 * job.lr}
    optim = OptimConfig(lr=job.lr, gate_lr=job.gate_lr, qk_lr=job.qk_lr, weight_decay=job.weight_decay, **ends)
    if job.pool != "none":
        pool = PoolConfig(job.pool, start=job.pool_start, init_values=job.pool_init)
        recast.attention_pool_(model.network, config=pool)
    plan, schedule = plan_for(job, model), None
    if plan is not None and job.schedule == "at_once":
        schedule = Schedule.at_once(plan, 1 + round(job.convolution * job.num_updates))
    elif plan is not None:
        schedule = Schedule.progressive(plan, job.num_updates, job.schedule)
    torch.manual_seed(job.seed)
    if schedule is not None and (first := schedule.due(1)):
        recast.recast_(model.network, plan, steps=first)
        wake(job, model, images, first)
    before = wakefulness(model, images.pixels[:NUM_PROBED].float() / 255)
    optimizer = make_optimizer(model.network, optim, job.batch_size)
    decay = WarmupDecay(optim, 1, job.num_updates, job.batch_size)
    generator = torch.Generator().manual_seed(job.seed)
    torch.manual_seed(job.seed)
    loss_of = nn.CrossEntropyLoss()
    model.train()
    order, at, losses, started = torch.empty(0, dtype=torch.long), 0, [], time.perf_counter()
    for update in range(job.num_updates):
        if schedule is not None and update and (due := schedule.due(update + 1)):
            recast.recast_during_training_(model.network, optimizer, plan, due, gate_lr=job.gate_lr, qk_lr=job.qk_lr)
            wake(job, model, images, due)
            model.train()
        if at + job.batch_size > len(order):
            order, at = torch.randperm(len(images), generator=generator), 0
        index = order[at : at + job.batch_size].to(images.pixels.device)
        at += job.batch_size
        pixels = crop_and_flip(images.pixels[index], generator).float() / 255
        set_learning_rate(optimizer, decay.factor(update))
        with torch.autocast(device.type, torch.bfloat16, enabled=job.bf16 or device.type == "cuda"):
            logits = model(pixels)
        loss = loss_of(logits.float(), images.labels[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    tail = losses[-max(1, job.num_updates // 20) :]
    row: dict[str, Any] = {"train_loss": float(torch.stack(tail).float().mean()) if tail else float("nan")}
    row |= {"seconds": time.perf_counter() - started, "dates": dict(schedule.dates) if schedule else {}}
    row |= {"wakefulness_before": before}
    return row


@full_precision()  # for the evaluation; on a GPU training is in bf16
def run(job: Job, setup: Setup) -> str:
    """Train and evaluate a network with one thread, store its record, and return a line about it."""
    torch.set_num_threads(1)
    set_fused_attn(setup.device != "cpu")  # a plain ViT in bf16 on a CPU: 95 ms an update instead of 239
    device, folder, data = torch.device(setup.device), setup.out / job.folder, load_images(job.data, setup)
    images = data.train.subset(
        choose_balanced(data.train.labels.cpu(), job.num_train, "num_train", job.seed).to(device)
    )
    model = parent_of(job, setup.out, setup.root).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    record: dict[str, Any] = {"job": asdict(job)} | train(job, model, images, device)
    record["wakefulness"] = wakefulness(model, images.pixels[:NUM_PROBED].float() / 255)
    model.eval()
    record["train_top1"] = top1(model, images.subset(torch.arange(min(NUM_TRAIN_SCORED, len(images)), device=device)))
    folder.mkdir(parents=True, exist_ok=True)
    if job.tuning:
        record["held_out_top1"] = top1(model, data.held_out)
    else:
        if job.measured == "fourier":
            curves = fourier(model.network, [model.prepare(data.few.pixels.float() / 255)]).curves
            record["fourier"] = [[curve.block, curve.depth, curve.delta[-1]] for curve in curves]
        scores = measure(model, data, is_attacked=job.measured == "all")
        record["scores"] = {name: round(100 * float(values.mean()), 3) for name, values in scores.items()}
        np.savez_compressed(folder / "right.npz", **scores)
        if job.pool != "none":
            record["pool"] = measure_pool(model, data.test)
        save_model(model, str(folder / "weights.safetensors"))
        if job.where is not None and job.gate == "linear" and job.measured == "all":
            fold_all(model, images)
            np.savez_compressed(folder / "folded.npz", **measure(model, data))
    with replaced(folder / "result.json") as temporary:
        temporary.write_text(json.dumps(record))
    return f"{job.folder}: {record.get('scores', record.get('held_out_top1'))}, {record['seconds']:.0f} s"


def run_all(jobs: Iterable[Job], setup: Setup, workers: int) -> None:
    """Run the unfinished jobs, `workers` at a time."""
    unfinished = [job for job in jobs if not is_finished(setup.out, job)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for line in pool.map(partial(run, setup=setup), unfinished):
            print(line, flush=True)
