"""Optimiser, learning rate and the sparsity of gates.

Every group of parameters has a peak rate of its own (`recast.surgery.param_groups`); one factor f(t) scales them all:

    f(t) = a + (1 − a)·t/W                          t < W         linear warm-up from a = warmup_lr/lr
    f(t) = e + (1 − e)·(1 + cos π·u)/2              t ≥ W         cosine to e = min_lr/lr, u = (t − W)/(T − 1 − W)

over the updates t = 0 … T − 1 of the whole run. timm's schedulers start and end every group at the same absolute
rate, which would lose the gates' ratio to the base rate; and this one has no state: a resumed run needs only t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import timm.optim
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from recast.config import OptimConfig, Recipe
from recast.device import choose_device
from recast.errors import RecastError, suggest
from recast.surgery import gpsa_layers, param_groups

LINEAR_GATES = "gates"
GATE_GROUPS = (LINEAR_GATES, "sigmoid_gates")


def check_trainable(recipe: Recipe) -> None:
    """Raise RecastError for an optimiser that timm has not, or a number that no training can use."""
    optim = recipe.optim
    for name, value, least in (
        ("data.batch_size", recipe.data.batch_size, 1),
        ("data.workers", recipe.data.workers, 0),
        ("calibrate", recipe.calibrate, 0),
    ):
        if value < least:
            raise RecastError(f"{name} must be {least} or more, got {value}")
    if recipe.amp == "fp16" and choose_device(recipe.device).type != "cuda":
        raise RecastError(f"amp='fp16' needs a CUDA device, got {recipe.device}: use amp='bf16' or amp='off'")
    known = [str(name) for name in timm.optim.list_optimizers()]
    if optim.opt.lower() not in known:
        raise RecastError(f"timm has no optimiser {optim.opt!r}.{suggest(optim.opt, known)}")
    for name in ("lr", "gate_lr", "weight_decay", "warmup_epochs", "warmup_lr", "min_lr", "gate_l1"):
        value = getattr(optim, name)
        if value is not None and not 0 <= value < math.inf:
            raise RecastError(f"optim.{name} must be 0 or a positive number, got {value}")
    if optim.clip_grad is not None and not optim.clip_grad > 0:
        raise RecastError(f"optim.clip_grad must be a positive number, got {optim.clip_grad}")
    if optim.gate_l1 and recipe.recast.gate != "linear":
        raise RecastError("optim.gate_l1 closes the heads of gate='linear'; a sigmoid gate is never closed")
    for name in ("label_smoothing", "ema_decay"):
        value = getattr(recipe, name)
        if value is not None and not 0 <= value < 1:
            raise RecastError(f"{name} must be at least 0 and below 1, got {value}")


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """timm's optimiser `config.opt` over the groups of `param_groups`, each with its peak rate as "peak_lr"."""
    groups = param_groups(model, config.lr, config.gate_lr, config.weight_decay)
    if not groups or not any(group["params"] for group in groups):
        raise RecastError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
    for group in groups:
        group["peak_lr"] = group["lr"]
    return timm.optim.create_optimizer_v2(groups, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay)


@dataclass(frozen=True)
class WarmupCosine:
    """f(t) of the module's docstring: `steps` = T updates, `warmup` = W of them, `start` = a, `end` = e."""

    steps: int
    warmup: int
    start: float
    end: float

    @classmethod
    def of(cls, config: OptimConfig, epochs: int, steps_per_epoch: int) -> WarmupCosine:
        """A base rate of 0 (gates only) starts and ends at 0; a warm-up longer than the run fills it."""
        steps = epochs * steps_per_epoch
        start, end = (min(1.0, rate / config.lr) if config.lr else 0.0 for rate in (config.warmup_lr, config.min_lr))
        return cls(steps, min(steps, round(config.warmup_epochs * steps_per_epoch)), start, end)

    def factor(self, step: int) -> float:
        """Share of the peak rate at update `step`."""
        if step < self.warmup:
            return self.start + (1 - self.start) * step / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Give every group `factor` times its peak rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def learning_rates(optimizer: Optimizer) -> tuple[float, float | None]:
    """The rate of the weights and that of the gates (None without gates), as they are now."""
    rates = {group["name"]: float(group["lr"]) for group in optimizer.param_groups}
    gates = [rates[name] for name in GATE_GROUPS if name in rates]
    weights = [rate for name, rate in rates.items() if name not in GATE_GROUPS]
    return (weights or gates)[0], gates[0] if gates else None


@torch.no_grad()
def shrink_gates_(optimizer: Optimizer, gate_l1: float) -> None:
    """The proximal step of gate_l1·‖(γ, s)‖₁: γ ← sign(γ)·max(|γ| − η·gate_l1, 0), η the gates' rate now; s likewise.

    A gradient step on the penalty would leave gates trembling around 0; this one leaves them at exactly 0.
    """
    for group in optimizer.param_groups:
        if group["name"] == LINEAR_GATES:
            for gate in group["params"]:
                gate.copy_(F.softshrink(gate, group["lr"] * gate_l1))


@torch.no_grad()
def close_averaged_gates_(averaged: nn.Module, model: nn.Module) -> None:
    """Set the gates of the average to 0 where the model's are exactly 0: an average by itself never gets there."""
    layers = gpsa_layers(model)
    for name, layer in gpsa_layers(averaged).items():
        if layer.config.gate == "linear":
            layer.gamma.masked_fill_(layers[name].gamma == 0, 0.0)
            layer.spread.masked_fill_(layers[name].spread == 0, 0.0)
