"""Learned schedules: a layer becomes attention when its gates promise more than the convolutions gain.

After an epoch e that is not the last, each layer i that is still a convolution is recast on a copy, exactly (linear
gate, γ = s = 0), so that the copy computes what the network does, and the loss L on a few training images is
differentiated with respect to its gates g = (γ, s), a gate of each kind for every head:

    promised_i  = r · Σ_g min(|∂L₁/∂g|, |∂L₂/∂g|) · [same sign]        L₁, L₂: the loss on two halves of the images
    delivered   = training loss of epoch e − 1  −  training loss of epoch e

r = min(1, gates' rate × updates of an epoch) is how far a gate can move in an epoch, at most from the convolution to
its whole content or Gaussian map: `promised` is the first-order fall of the loss in one epoch of open gates. What two
halves of the images do not agree on is noise and does not count. Of the layers that promise more than the last epoch
delivered, the one that promises most per added multiply-add becomes attention in the next epoch. With the dates of PRS
and a learned order (`Schedule.progressive(order="learned")`) the one that promises most per added multiply-add becomes
attention at each date, whatever was delivered. These rules are this library's own; PRS leaves a learned schedule to the
future (Lee et al. 2022, Sec. 7).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from recast.data import Data, loader
from recast.data.seeding import seeded
from recast.errors import RecastError
from recast.run.config import RecastConfig, Recipe
from recast.run.records import Probe
from recast.run.schedule import Schedule
from recast.surgery.apply import gpsa_layers, recast_
from recast.surgery.plan import Plan
from recast.tracing.hooks import in_eval
from recast.training.metrics import normalise
from recast.training.switches import Switches

PART = 64
"""Images of one pass: content maps of every head are held for the gradient."""

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


def to_be_decided(schedule: Schedule, epoch: int, epochs: int) -> bool:
    """Whether there is something to measure after `epoch` of `epochs`."""
    if not schedule.waiting() or epoch >= epochs:
        return False
    return epoch > 0 if schedule.name == "learned" else epoch + 1 in schedule.slots


def decide(
    switches: Switches, network: nn.Module, halves: Sequence[Sequence[Batch]], loss: Loss, train_loss: float | None,
    epoch: int, reach: float,
) -> Switches:  # fmt: skip
    """The same switches with the measurement after `epoch`, and the dates that follow from it.

    network: the network as it is; only read. halves: two lists of (normalised images, labels). loss: mean over a batch.
    train_loss: of this epoch, None before the first. reach: r, how far a gate can move in an epoch.
    """
    schedule, waiting = switches.schedule, switches.schedule.waiting()
    slopes = [gate_slopes(network, switches.plan, waiting, half, loss) for half in halves]
    promised = {layer: min(1.0, reach) * agreement(slopes[0][layer], slopes[1][layer]) for layer in waiting}
    before = next((probe.train_loss for probe in switches.probes if probe.epoch == epoch - 1), None)
    delivered = None if before is None or train_loss is None else before - train_loss
    cost, open_slots = added_macs(switches.plan), schedule.slots.count(epoch + 1)
    if open_slots:
        chosen = ranked(promised, cost)[:open_slots]
    else:
        better = {} if delivered is None else {k: value for k, value in promised.items() if value > delivered}
        chosen = ranked(better, cost)[:1]
    for layer in chosen:
        schedule = schedule.decided(layer, epoch + 1)
    probe = Probe(epoch, train_loss, delivered, promised, chosen)
    return replace(switches, schedule=schedule, probes=[*switches.probes, probe])


def probe_halves(data: Data, recipe: Recipe, device: torch.device) -> list[list[Batch]]:
    """`recipe.schedule.probe_images` training images without augmentation, in two halves."""
    size = min(recipe.schedule.probe_images, len(data.train)) // 2
    if size < 1:
        raise RecastError(f"a learned schedule needs at least 2 training images, {data.name} has {len(data.train)}")
    source = loader(data.train.plain(), size, shuffle_seed=recipe.seed, bad_image=recipe.data.bad_image, drop_last=True)
    halves = [(normalise(images.to(device), data), labels.to(device)) for images, labels in islice(source, 2)]
    return [list(zip(images.split(PART), labels.split(PART), strict=True)) for images, labels in halves]


def ranked(promised: dict[str, float], cost: dict[str, int]) -> list[str]:
    """The layers, those first that promise most per added multiply-add."""
    return sorted(promised, key=lambda layer: promised[layer] / max(1, cost[layer]), reverse=True)


def agreement(one: Tensor, other: Tensor) -> float:
    """Σ min(|a|, |b|) over the entries whose signs agree."""
    same = one * other > 0
    return float((torch.minimum(one.abs(), other.abs()) * same).sum())


def added_macs(plan: Plan) -> dict[str, int]:
    """Multiply-adds per image that a step adds."""
    return {step.name: step.after.macs - step.before.macs for step in plan.steps}


def gate_slopes(
    network: nn.Module, plan: Plan, layers: Sequence[str], batches: Sequence[Batch], loss: Loss
) -> dict[str, Tensor]:
    """∂L/∂(γ, s) of `layers`, (2·heads,) each, where the network computes what it does; L is the mean over the batches.

    Raises RecastError for a plan whose stride goes: the network would not be the same function there.
    """
    if plan.config.stride != "keep":
        raise RecastError("a learned schedule needs stride='keep': its gates are measured where the function is exact")
    probe = copy.deepcopy(network)
    exact = RecastConfig(head_dim=plan.config.head_dim)
    done = getattr(probe, "recast_plan", None)
    if isinstance(done, Plan):  # a plan goes on with its own settings: layers that are recast keep theirs
        probe.recast_plan = replace(done, config=exact)  # type: ignore[assignment]
    with seeded(0):  # W_qry is random, and with W_key = 0 of no effect
        recast_(probe, replace(plan, config=exact), steps=layers)
    found = gpsa_layers(probe)
    gates = {name: (found[name].gamma, found[name].spread) for name in layers}
    probe.requires_grad_(False)
    for pair in gates.values():
        for gate in pair:
            gate.requires_grad_(True)
    images = sum(len(labels) for _, labels in batches)
    with in_eval(probe), torch.enable_grad():
        for pixels, labels in batches:
            outputs = probe(pixels)
            (loss(outputs, labels) * (len(labels) / images)).backward()
    return {name: torch.cat([_slope(gate) for gate in pair]) for name, pair in gates.items()}


def _slope(gate: nn.Parameter) -> Tensor:
    return torch.zeros_like(gate) if gate.grad is None else gate.grad.detach()
