"""A schedule carried out: which layers of a training have left the convolution, and what that did.

`schedule.json` in the run folder says so for readers; the checkpoint holds the same, so that a resumed run has the
network and the optimiser that it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer

from recast.errors import RecastError
from recast.lab.config import Recipe
from recast.lab.data import Data
from recast.lab.data.seeding import mix_seed, seeded_on
from recast.lab.records import Measured, Switch, Switching
from recast.lab.training.prepare import WAKING_IMAGES, some_images
from recast.surgery.apply import recast_
from recast.surgery.during_training import recast_during_training_
from recast.surgery.plan import Plan
from recast.surgery.wake import wake_


@dataclass
class Switches:
    """The plan, its schedule, and the switches made so far."""

    plan: Plan
    record: Switching

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan | None) -> Switches | None:
        """Those of a recipe; None where nothing is recast during training.

        Raises RecastError for a schedule without a plan, a plan without a schedule, and dates outside of the training.
        """
        name = recipe.schedule.kind
        if plan is None:
            if recipe.schedule.is_during:
                raise RecastError(f"schedule={name} recasts during training: pass fit(plan=plan(model, …))")
            return None
        if (schedule := recipe.schedule.dated(plan, recipe.epochs)) is None:
            raise RecastError("fit(plan=...) is for layers that are recast during training: set recipe.schedule")
        return cls(plan, Switching(schedule=schedule, epochs=recipe.epochs, switches=[]))

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
