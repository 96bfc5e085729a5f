"""A schedule carried out: which layers of a training have left the convolution, what that did, and which come next.

`schedule.json` in the run folder says so for readers; the checkpoint holds the same, so that a resumed run has the
network and the optimiser that it had.

With a learned schedule a layer becomes attention when its gates promise more than the convolutions gain. After an
epoch e that is not the last, each layer i that is still a convolution is recast on a copy, exactly (linear gate,
γ = s = 0) and with the plan's start of queries and keys, so that the copy computes what the network does. The loss L on
a few training images is differentiated with respect to its gates g = (γ, s), a gate of each kind for every head:

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.data import Data
from recast.lab.data.seeding import mix_seed, seeded_on
from recast.lab.data.sources import labelled_images
from recast.lab.experimental.ranking import PART, Batch, Loss, gate_slopes
from recast.lab.records import GateProbe, Measured, Switch, Switching
from recast.lab.training.prepare import WAKING_IMAGES, some_images
from recast.surgery.apply import recast_
from recast.surgery.during_training import recast_during_training_
from recast.surgery.plan import Plan
from recast.surgery.schedule import Schedule
from recast.surgery.wake import wake_
from recast.tracing.examples import Example


@dataclass
class Switches:
    """The plan, its schedule as far as it is decided, and the switches made so far."""

    plan: Plan
    record: Switching

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan | None) -> Switches | None:
        """Those of a recipe; None where nothing is recast during training.

        Raises RecastError for a schedule without a plan, a plan without a schedule, and dates outside of the training.
        """
        name = recipe.schedule.name
        if plan is None:
            if recipe.schedule.is_during:
                raise RecastError(f"schedule={name} recasts during training: pass fit(plan=plan(model, …))")
            return None
        if (schedule := Schedule.of(recipe.schedule, plan, recipe.epochs)) is None:
            raise RecastError("fit(plan=...) is for layers that are recast during training: set recipe.schedule")
        return cls(plan, Switching(schedule=schedule, epochs=recipe.epochs, switches=[], probes=[]))

    def due(self, epoch: int) -> tuple[str, ...]:
        """Layers to swap before `epoch` begins that are not swapped yet."""
        return tuple(layer for layer in self.record.schedule.due(epoch) if layer not in self.record.switched)

    def take_(
        self, epoch: int, before: Measured, model: nn.Module, optimizer: Optimizer, ema: ModelEmaV3 | None,
        recipe: Recipe, data: Data,
    ) -> None:  # fmt: skip
        """Swap what is due before `epoch`; what is random in the new layers follows from (seed, epoch). With
        query_key=images queries and keys are taken from what the layers see now."""
        layers = self.due(epoch)
        averages = [] if ema is None else [ema.module]
        with seeded_on(next(model.parameters()).device, mix_seed("switch", recipe.seed, epoch)):
            recast_during_training_(
                model, optimizer, self.plan, layers, averages=averages, gate_lr=recipe.optim.gate_lr,
                qk_lr=recipe.optim.qk_lr,
            )  # fmt: skip
        if self.plan.config.query_key == "images" and layers:
            images = some_images(data.train.plain(), WAKING_IMAGES, recipe, data, next(model.parameters()).device)
            wake_(model, images, self.plan.config.logit_std, recipe.seed, layers)
            for average in averages:  # of what has had one value only
                for name in layers:
                    for own in ("query", "key"):
                        theirs, ours = (getattr(network.get_submodule(name), own) for network in (average, model))
                        theirs.detach().copy_(ours.detach())
        self.record.switches.append(Switch(epoch, layers, before))

    def replay_(self, saved: dict[str, Any], model: nn.Module, ema: ModelEmaV3 | None) -> None:
        """Give a network that was never recast the form it had when `record` was saved; weights are loaded later."""
        if tuple(saved["layers"]) != self.record.schedule.layers:
            raise RecastError("the state belongs to another plan: its layers are " + ", ".join(saved["layers"]))
        self.record = Switching.from_dict(saved, "the state")
        for switch in self.record.switches:
            for network in [model] if ema is None else [model, ema.module]:
                recast_(network, self.plan, steps=switch.layers)

    def decided(
        self, network: nn.Module, data: Data, recipe: Recipe, loss: Loss, train_loss: float | None, epoch: int,
        reach: float,
    ) -> Switches:  # fmt: skip
        """The same switches, in a learned schedule with the measurement after `epoch` and the dates that follow.

        network: the network as it is; only read. loss: mean over a batch. train_loss: of this epoch, None before the
        first. reach: r, how far a gate can move in an epoch.
        """
        schedule, probes = self.record.schedule, self.record.probes
        waiting = schedule.waiting()
        looks = epoch > 0 if schedule.name == "learned" else epoch + 1 in schedule.slots
        if not waiting or not looks or epoch >= self.record.epochs:
            return self
        halves = probe_halves(data, recipe, next(network.parameters()).device)
        seen = [images for images, _ in halves[0]]
        slopes = [_mean_slopes(network, self.plan, waiting, half, loss, seen) for half in halves]
        promised = {layer: min(1.0, reach) * agreed_slope(slopes[0][layer], slopes[1][layer]) for layer in waiting}
        before = next((probe.train_loss for probe in probes if probe.epoch == epoch - 1), None)
        delivered = None if before is None or train_loss is None else before - train_loss
        cost = {step.name: step.after.macs - step.before.macs for step in self.plan.steps}
        if open_slots := schedule.slots.count(epoch + 1):
            chosen = by_promise(promised, cost)[:open_slots]
        else:
            better = {} if delivered is None else {k: value for k, value in promised.items() if value > delivered}
            chosen = by_promise(better, cost)[:1]
        for layer in chosen:
            schedule = schedule.decided(layer, epoch + 1)
        probe = GateProbe(epoch, train_loss, delivered, promised, chosen)
        return replace(self, record=replace(self.record, schedule=schedule, probes=[*probes, probe]))


def _mean_slopes(
    network: nn.Module, plan: Plan, layers: Sequence[str], half: Sequence[Batch], loss: Loss, seen: Sequence[Example]
) -> dict[str, Tensor]:
    """`gate_slopes` in the mean over the images of a half."""
    slopes = gate_slopes(network, plan, layers, half, loss, seen)
    shares = torch.tensor([len(labels) for _, labels in half], dtype=torch.float)
    shares = shares / shares.sum()
    return {layer: (shares[:, None].to(found) * found).sum(0) for layer, found in slopes.items()}


def probe_halves(data: Data, recipe: Recipe, device: torch.device) -> list[list[Batch]]:
    """`recipe.schedule.probe_images` training images without augmentation, in two halves."""
    size = min(recipe.schedule.probe_images, len(data.train)) // 2
    if size < 1:
        raise RecastError(f"a learned schedule needs at least 2 training images, {data.name} has {len(data.train)}")
    images, labels = labelled_images(data, 2 * size, recipe.seed, recipe.data.bad_image, device)
    halves = zip(images.split(size), labels.split(size), strict=True)
    return [list(zip(part.split(PART), theirs.split(PART), strict=True)) for part, theirs in halves]


def by_promise(promised: dict[str, float], cost: dict[str, int]) -> list[str]:
    """The layers, those first that promise most per added multiply-add."""
    return sorted(promised, key=lambda layer: promised[layer] / max(1, cost[layer]), reverse=True)


def agreed_slope(one: Tensor, other: Tensor) -> float:
    """Σ min(|a|, |b|) over the entries whose signs agree."""
    same = one * other > 0
    return float((torch.minimum(one.abs(), other.abs()) * same).sum())
