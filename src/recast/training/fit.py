"""`fit`: the training loop, for a recast model and for a plain one alike."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn import functional as F

from recast.config import Recipe
from recast.data import Data, loader
from recast.data.loading import mix_seed, seeded
from recast.device import choose_device
from recast.errors import RecastError
from recast.io import save
from recast.models.build import constructor
from recast.models.weights import load_weights_, read_weights
from recast.surgery import gpsa_layers, refresh_gates_
from recast.training.checkpoint import Interrupted, Position, State, restore_, save_state, shielded, state_path
from recast.training.metrics import MetricsLog, gates_and_spans, measure, normalise
from recast.training.optim import (
    WarmupCosine,
    check_trainable,
    close_averaged_gates_,
    learning_rates,
    make_optimizer,
    set_learning_rate,
    shrink_gates_,
)
from recast.training.progress import Display

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def fit(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    name: str | None = None,
) -> list[dict[str, Any]]:
    """Train `model` on `data` for `recipe.epochs` into the folder `out`; returns the rows of its metrics.jsonl.

    Writes `metrics.jsonl` (a row per epoch, epoch 0 before any training), `resume/` after every epoch and on Ctrl-C,
    and `weights.safetensors` at the end. The model is left with the weights that were saved, in eval mode. With
    `resume` the training in `out` goes on where it stopped; one that is finished is left alone. `name` is what the
    progress bar says.

    Raises RecastError for a folder that already holds a training, a state of another recipe, or a loss that is not
    finite (epoch and step named, the state after the last whole epoch stays in `resume/`); Interrupted after Ctrl-C.
    """
    out, weights = Path(out), Path(out) / "weights.safetensors"
    log = MetricsLog(out / "metrics.jsonl")
    if not resume and (log.path.exists() or state_path(out).exists() or weights.exists()):
        raise RecastError(f"{out} already holds a training: choose another folder, or resume it")
    if resume and weights.exists():  # written last: the training is finished
        load_weights_(model, read_weights(weights), weights)
        refresh_gates_(model.eval())
        return log.rows()
    check_trainable(recipe)
    device = choose_device(recipe.device)
    batches = len(loader(data.train, recipe.data.batch_size, shuffle_seed=recipe.seed))
    schedule = WarmupCosine.of(recipe.optim, recipe.epochs, batches)
    state = _new_state(model.to(device), recipe, device)
    out.mkdir(parents=True, exist_ok=True)
    name = name or ("recast" if gpsa_layers(model) else "parent")
    with seeded(0), Display(name, recipe.epochs, batches, progress) as display:
        torch.manual_seed(mix_seed("fit", recipe.seed))  # dropout and the like, on every device
        if resume and state_path(out).exists():
            restore_(state, recipe, out)
        log.keep_before(state.position.epoch)
        try:
            if state.position.epoch == 0:
                _end_epoch(state, data, recipe, out, log, display)
            while state.position.epoch <= recipe.epochs:
                model.train()
                epoch, step = state.position.epoch, state.position.step
                display.start_epoch(epoch, step)
                source = loader(
                    data.train, recipe.data.batch_size, shuffle_seed=recipe.seed, epoch=epoch, start=step,
                    workers=recipe.data.workers,
                )  # fmt: skip
                started = time.perf_counter()
                for images, labels in source:
                    with shielded():
                        set_learning_rate(state.optimizer, schedule.factor((epoch - 1) * batches + state.position.step))
                        loss = _step(state, normalise(images.to(device), data), labels.to(device), recipe)
                        state.position.step += 1
                        state.position.images += len(labels)
                        state.position.loss_sum += loss * len(labels)
                        state.position.seconds += time.perf_counter() - started
                        started = time.perf_counter()
                    display.step(loss, learning_rates(state.optimizer)[0])
                _end_epoch(state, data, recipe, out, log, display)
        except KeyboardInterrupt:
            with shielded():
                save_state(state, recipe, out)
            raise Interrupted(
                f"interrupted: state saved in {state_path(out).parent}; fit(..., resume=True) goes on"
            ) from None
    if state.ema is not None:
        model.load_state_dict(state.ema.module.state_dict())
    refresh_gates_(model.eval())
    save(model, weights, constructor=constructor(recipe.model, num_classes=len(data.classes)))
    return log.rows()


def _new_state(model: nn.Module, recipe: Recipe, device: torch.device) -> State:
    ema = None if recipe.ema_decay is None else ModelEmaV3(model, decay=recipe.ema_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=recipe.amp == "fp16")
    return State(model, make_optimizer(model, recipe.optim), scaler, ema, Position())


def _step(state: State, images: Tensor, labels: Tensor, recipe: Recipe) -> float:
    """One update on normalised images (B, C, H, W) and labels (B,); returns the loss. Raises if it is not finite."""
    optimizer, scaler, optim = state.optimizer, state.scaler, recipe.optim
    with torch.autocast(images.device.type, AMP_DTYPES.get(recipe.amp), enabled=recipe.amp != "off"):
        logits = state.model(images)
    loss = F.cross_entropy(logits.float(), labels, label_smoothing=recipe.label_smoothing)
    value = loss.item()  # waits for the device: the price of stopping at the step that went wrong
    if not math.isfinite(value):
        raise _diverged(state, f"loss is {value} at epoch {state.position.epoch}, step {state.position.step + 1}")
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    if optim.clip_grad is not None:
        scaler.unscale_(optimizer)
        dispatch_clip_grad(state.model.parameters(), optim.clip_grad)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if optim.gate_l1 and scaler.get_scale() >= scale:  # a smaller scale: fp16 overflowed and no step was made
        shrink_gates_(optimizer, optim.gate_l1)
    if state.ema is not None:
        state.ema.update(state.model)
        if optim.gate_l1:
            close_averaged_gates_(state.ema.module, state.model)
    return value


def _end_epoch(state: State, data: Data, recipe: Recipe, out: Path, log: MetricsLog, display: Display) -> None:
    """Measure, write the row, move on to the next epoch and save the state, in this order."""
    position, evaluated, started = state.position, state.evaluated, time.perf_counter()
    trained = position.epoch > 0
    refresh_gates_(evaluated.eval())
    loss, top1 = measure(
        evaluated, data, recipe.data.batch_size, next(evaluated.parameters()).device, recipe.data.workers
    )
    if not math.isfinite(loss):
        raise _diverged(state, f"validation loss is {loss} after epoch {position.epoch}")
    lr, gate_lr = learning_rates(state.optimizer)
    row = {
        "epoch": position.epoch,
        "train_loss": position.loss_sum / position.images if trained else None,
        "val_loss": loss,
        "val_top1": top1,
        "lr": lr if trained else None,
        "gate_lr": gate_lr if trained else None,
        "seconds": position.seconds + time.perf_counter() - started,
        "layers": gates_and_spans(evaluated),
    }
    with shielded():
        log.append(row)
        state.position = Position(epoch=position.epoch + 1)
        save_state(state, recipe, out)
    display.row(row)


def _diverged(state: State, what: str) -> RecastError:
    before = state.position.epoch - 1
    kept = f"; the state after epoch {before} is kept in resume/" if before >= 0 else ""
    return RecastError(f"the {what}: lower optim.lr or optim.gate_lr, or set optim.clip_grad{kept}")
