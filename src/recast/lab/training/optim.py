"""Optimizer, learning rate and the sparsity of gates.

Every group of parameters has a peak rate of its own (`recast.param_groups`); one factor f(t) scales them all over the
updates t = 0 … T − 1 of the run:

    f(t) = a + (1 − a)·t/W                          t < W         linear warm-up from a = warmup_lr/lr
    f(t) = e + (1 − e)·(1 + cos π·u)/2              t ≥ W         cosine to e = min_lr/lr
    f(t) = e + (1 − e)·(1 − u)^0.9                  t ≥ W         decay=poly (DeepLab, Chen et al. 2017); linear: ^1
    f(t) = e + (1 − e)·0.1^([u ≥ 3/4] + [u ≥ 11/12])  t ≥ W       decay=steps (COCO's 3×: epochs 27 and 33 of 36)

With `warmup_prefix` u = (t − W)/(T − 1 − W): the decay begins at the end of the warm-up and ends at the last update.
Without it u = t/T, as in timm and DeiT (Touvron et al. 2021), which keep the rate constant within an epoch; here it
changes at every update. timm's schedulers start and end every group at the same absolute rate, which does not keep the
gates' ratio to the base rate, and they have a state.

With `base_batch` the lr above is lr × batch_size / base_batch (Goyal et al. 2017). gate_lr, qk_lr, pool_lr, warmup_lr
and min_lr are absolute, never scaled. By default gates have 50 × the scaled rate; pooling, queries and keys have the
scaled rate.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import timm.optim
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from recast.errors import RecastError, suggest
from recast.lab.config import OptimConfig
from recast.lab.data.device import choose_device
from recast.layers.cmhsa import gated_layers
from recast.surgery.parameters import param_groups

RATES = {"gates": "gates", "sigmoid_gates": "gates", "pool_decay": "pool", "pool_no_decay": "pool"}
RATES |= {"queries_keys": "keys"}
"""Rate of each kind of group (its name before the slash); other groups have that of the weights."""
POWERS = {"poly": 0.9, "linear": 1.0}
STEPS = 27 / 36, 33 / 36


def check_trainable(config: OptimConfig, amp: str, device: str) -> None:
    """Raise RecastError for an optimizer timm does not provide, or an invalid value."""
    optimizer_options(config)
    if amp == "fp16" and choose_device(device).type != "cuda":
        raise RecastError(f"amp='fp16' requires a CUDA device, got {device}: use amp='bf16' or amp='off'")


def optimizer_options(config: OptimConfig) -> dict[str, Any]:
    """Return those of momentum, betas and eps that the optimizer `config.opt` takes, as keyword arguments.

    Raises RecastError for an optimizer timm does not provide, and for an option that it does not take.
    """
    name, default = config.opt.lower(), OptimConfig()
    names = list(map(str, timm.optim.list_optimizers()))
    if name not in names:
        raise RecastError(f"timm has no optimizer {config.opt!r}.{suggest(config.opt, names)}")
    info = timm.optim.get_optimizer_info(name)
    if info.second_order:
        raise RecastError(f"optimizer {config.opt} needs second derivatives: choose another optim.opt")
    options: dict[str, Any] = {}
    for option, is_used in (("momentum", info.has_momentum), ("betas", info.has_betas), ("eps", info.has_eps)):
        value = getattr(config, option)
        if not is_used and value != getattr(default, option):
            raise RecastError(f"optim.{option} is {value}, but optimizer {config.opt} has no {option}: drop it")
        if is_used and value is not None:
            options[option] = value
    if "lamb" in name:
        options["max_grad_norm"] = None  # by default LAMB clips the gradient's norm at 1
    return options


def peak_lr(config: OptimConfig, batch_size: int) -> float:
    """Return the peak rate of the weights for `batch_size` images an update: lr, or lr × batch_size / base_batch."""
    return config.lr if config.base_batch is None else config.lr * batch_size / config.base_batch


def make_optimizer(model: nn.Module, config: OptimConfig, batch_size: int) -> Optimizer:
    """Return timm's optimizer `config.opt` over the groups of `param_groups`, each with its peak rate as "peak_lr".

    `batch_size`: images an update, over all processes and accumulated parts. Raises RecastError for a network without
    trainable parameters or, with layer decay, without layers.
    """
    lr, options = peak_lr(config, batch_size), optimizer_options(config)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "every recast layer is frozen")  # a recipe says what it freezes
        rates: dict[str, Any] = {"pool_lr": config.pool_lr, "qk_lr": config.qk_lr}
        groups = param_groups(model, lr, config.gate_lr, config.weight_decay, config.layer_decay, **rates)
    if not groups:
        raise RecastError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
    for group in groups:
        group["peak_lr"] = group["lr"]
    return timm.optim.create_optimizer_v2(groups, config.opt, lr, config.weight_decay, **options)


class WarmupDecay:
    """f(t) of the module's docstring.

    A base rate of 0 (gates only) starts and ends at 0. A warm-up longer than the run fills it.
    """

    def __init__(self, config: OptimConfig, epochs: int, steps_per_epoch: int, batch_size: int) -> None:
        lr = peak_lr(config, batch_size)
        self.start, self.end = (min(1.0, rate / lr) if lr else 0.0 for rate in (config.warmup_lr, config.min_lr))
        self.steps = epochs * steps_per_epoch
        self.warmup = min(self.steps, round(config.warmup_epochs * steps_per_epoch))
        self.falling = (self.warmup, self.steps - 1) if config.warmup_prefix else (0, self.steps)
        self.decay = config.decay

    def factor(self, step: int) -> float:
        """Return the share of the peak rate at update `step`."""
        if step < self.warmup:
            return self.start + (1 - self.start) * step / self.warmup
        first, last = self.falling
        done = min(1.0, (step - first) / max(1, last - first))
        if self.decay == "steps":
            share = 0.1 ** sum(done >= part for part in STEPS)
        elif self.decay == "cosine":
            share = (1 + math.cos(math.pi * done)) / 2
        else:
            share = (1 - done) ** POWERS[self.decay]
        return self.end + (1 - self.end) * share


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set the rate of every group to `factor` times its peak rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def learning_rates(optimizer: Optimizer) -> tuple[float, float | None]:
    """Return the present rates of the weights and of the gates (None without gates); with layer decay, the head's.

    If no weights train, the first is the rate of the pooling, of queries and keys, or of the gates.
    """
    rates: dict[str, float] = {}
    for group in optimizer.param_groups:
        kind = RATES.get(str(group["name"]).partition("/")[0], "weights")
        rates[kind] = max(float(group["lr"]), rates.get(kind, 0.0))
    return next(rates[kind] for kind in ("weights", "pool", "keys", "gates") if kind in rates), rates.get("gates")


@torch.no_grad()
def shrink_gates_(optimizer: Optimizer, gate_l1: float) -> None:
    """Take a proximal step of gate_l1·‖(γ, s)‖₁: γ ← sign(γ)·max(|γ| − η·gate_l1, 0), η the gates' rate; s likewise.

    Gates stop at exactly 0, around which gradient steps on the penalty would oscillate.
    """
    for group in optimizer.param_groups:
        if str(group["name"]).partition("/")[0] == "gates":
            for gate in group["params"]:
                gate.copy_(F.softshrink(gate, group["lr"] * gate_l1))


@torch.no_grad()
def close_averaged_gates_(averaged: nn.Module, model: nn.Module) -> None:
    """Set the gates of the average to 0 where the model's are exactly 0, which an average does not reach."""
    layers = gated_layers(model)
    for name, layer in gated_layers(averaged).items():
        for gate in ("gamma", "spread"):
            if (average := layer._parameters.get(gate)) is not None:
                average.masked_fill_(layers[name].get_parameter(gate) == 0, 0.0)
