"""Execution of a schedule: layers that were recast during a training, with the measurements before and after.

`schedule.json` in the run folder and the checkpoint hold the same record: a resumed run rebuilds its network from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import Optimizer

from recast.errors import RecastError
from recast.lab.config import OptimConfig, ScheduleConfig
from recast.lab.data.seeding import mix_seed, seeded_on
from recast.lab.folder.records import Measured, Switch, Switching
from recast.surgery.apply import recast_
from recast.surgery.during_training import recast_during_training_
from recast.surgery.plan import Plan
from recast.surgery.wake import wake_

WAKING_IMAGES = 512
"""Number of training images that queries and keys are taken from with query_key=images."""


@dataclass
class Switches:
    """The plan, its schedule, and the switches made so far."""

    plan: Plan
    record: Switching

    @classmethod
    def of(cls, config: ScheduleConfig, epochs: int, plan: Plan | None) -> Switches | None:
        """Return the switches of a schedule; None if nothing is recast during training.

        Raises RecastError for a schedule without a plan, a plan without a schedule, and dates outside of the training.
        """
        if plan is None:
            if config.is_during:
                raise RecastError(f"schedule={config.kind} recasts during training: pass fit(plan=plan(model, …))")
            return None
        if (schedule := config.dated(plan, epochs)) is None:
            raise RecastError("fit(plan=...) is for layers that are recast during training: set recipe.schedule")
        return cls(plan, Switching(schedule=schedule, epochs=epochs, switches=[]))

    def due(self, epoch: int) -> tuple[str, ...]:
        """Return the layers to recast before `epoch` that are still convolutions."""
        return tuple(layer for layer in self.record.schedule.due(epoch) if layer not in self.record.switched)

    def take_(
        self,
        epoch: int,
        before: Measured,
        model: nn.Module,
        optimizer: Optimizer,
        averages: list[nn.Module],
        rates: OptimConfig,
        seed: int,
        images: Iterator[Tensor],
    ) -> None:
        """Recast the layers that are due before `epoch`. Random numbers of the new layers are seeded by (seed, epoch).

        With query_key=images, queries and keys are computed from the inputs of the layers for `images`.
        """
        layers, device = self.due(epoch), next(model.parameters()).device
        with seeded_on(device, mix_seed("switch", seed, epoch)):
            recast_during_training_(
                model, optimizer, self.plan, layers, averages=averages, gate_lr=rates.gate_lr, qk_lr=rates.qk_lr
            )
        if self.plan.config.query_key == "images" and layers:
            wake_(model, images, self.plan.config.logit_std, seed, layers, averages=averages)
        self.record.switches.append(Switch(epoch, layers, before))

    def replay_(self, saved: dict[str, Any], model: nn.Module, ema: ModelEmaV3 | None) -> None:
        """Recast the layers that were recast when `record` was saved; their weights are loaded later."""
        if tuple(saved["layers"]) != self.record.schedule.layers:
            raise RecastError("the state belongs to another plan: its layers are " + ", ".join(saved["layers"]))
        self.record = Switching.from_dict(saved, "the state")
        for switch in self.record.switches:
            for network in [model] if ema is None else [model, ema.module]:
                recast_(network, self.plan, steps=switch.layers)
