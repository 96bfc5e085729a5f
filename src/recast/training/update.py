"""One update of the weights: this process's share of a batch, in parts, averaged over the processes."""

from __future__ import annotations

from typing import Protocol

import torch
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn

from recast.run.config import Recipe
from recast.training.checkpoint import State
from recast.training.distributed import process_count, process_number, without_sync
from recast.training.inputs import Inputs, seed_step
from recast.training.optim import close_averaged_gates_, set_learning_rate, shrink_gates_

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Objective(Protocol):
    """What training lowers."""

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], images: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of what the network gave (logits, or two heads' logits) for these images and targets."""

    def after_backward(self, model: nn.Module) -> None:
        """Called when all gradients of the batch are there, before the optimiser's step."""


class Update:
    """Forward, backward and the optimiser's step for one batch.

    Every part of every process holds the same number of images B / (w·n), its loss is a mean over them, and the
    gradient is the mean over parts and processes: for any w processes and n parts it is that of the whole batch
    (BatchNorm, which sees one part at a time, excepted).
    """

    def __init__(
        self,
        state: State,
        network: nn.Module,
        recipe: Recipe,
        inputs: Inputs,
        objective: Objective,
    ) -> None:
        self.state, self.network, self.recipe, self.inputs, self.objective = state, network, recipe, inputs, objective

    def __call__(self, pixels: Tensor, labels: Tensor, lr_factor: float) -> Tensor:
        """One update on this process's share; returns its mean loss, a tensor that nobody has waited for."""
        state, recipe, parts = self.state, self.recipe, self.recipe.accumulate
        optimizer, position = state.optimizer, state.position
        set_learning_rate(optimizer, lr_factor)
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.inputs.device)
        for part in range(parts):
            number = process_number() + process_count() * part
            seed_step(recipe.seed, position.epoch, position.step, number)
            images, targets = self.inputs(pixels[part::parts], labels[part::parts])
            if part < parts - 1:
                with without_sync(self.network):
                    total += self._backward(images, targets) / parts
            else:
                total += self._backward(images, targets) / parts
        self.objective.after_backward(state.model)
        self._step()
        return total

    def _backward(self, images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(images.device.type, AMP_DTYPES.get(self.recipe.amp), enabled=self.recipe.amp != "off"):
            outputs = self.network(images)
        loss = self.objective(outputs, images, targets)
        self.state.scaler.scale(loss / self.recipe.accumulate).backward()
        return loss.detach()

    def _step(self) -> None:
        state, optim = self.state, self.recipe.optim
        if optim.clip_grad is not None:
            state.scaler.unscale_(state.optimizer)
            dispatch_clip_grad(state.model.parameters(), optim.clip_grad)
        scale = state.scaler.get_scale()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if optim.gate_l1 and state.scaler.get_scale() >= scale:  # smaller: fp16 overflowed and no step was made
            shrink_gates_(state.optimizer, optim.gate_l1)
        if state.ema is not None:
            state.ema.update(state.model)
            if optim.gate_l1:
                close_averaged_gates_(state.ema.module, state.model)
