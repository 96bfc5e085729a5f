"""One update of the weights: this process's share of a batch, in parts, averaged over the processes."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms.v2.functional import normalize

from recast.lab.config import ClassifyConfig, Recipe
from recast.lab.data import Data
from recast.lab.data.seeding import mix_seed, seed_cpu
from recast.lab.training.checkpoint import State
from recast.lab.training.distributed import process_count, process_number
from recast.lab.training.objective import AMP_DTYPES, Objective
from recast.lab.training.optim import close_averaged_gates_, set_learning_rate, shrink_gates_


class Update:
    """Forward, backward and the optimiser's step for one batch.

    Every part of every process holds the same number of images B / (w·n), its loss is a mean over them, and the
    gradient is the mean over parts and processes: for any w processes and n parts it is that of the whole batch
    (BatchNorm, which sees one part at a time, excepted). Random erasing, Mixup and CutMix are timm's.
    """

    def __init__(
        self, state: State, network: nn.Module, recipe: Recipe, data: Data, objective: Objective, device: torch.device
    ) -> None:
        self.state, self.network, self.recipe, self.objective, self.device = state, network, recipe, objective, device
        # tensors on the device: copying them there at every step would make the processor wait for it
        self.mean, self.std = (torch.tensor(values, device=device) for values in (data.mean, data.std))
        self.memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
        task, erasing = recipe.task, recipe.augmentation.erasing
        self.erase = RandomErasing(erasing, mode="pixel", device=device) if erasing else None
        self.mix: Mixup | None = None
        if isinstance(task, ClassifyConfig) and task.mixes:
            self.mix = Mixup(
                task.mixup, task.cutmix, prob=task.mix_prob, label_smoothing=task.label_smoothing,
                num_classes=len(data.classes),
            )  # fmt: skip

    def __call__(self, pixels: Tensor, labels: Tensor, lr_factor: float) -> Tensor:
        """One update on this process's share; returns its mean loss, a tensor that nobody has waited for."""
        state, recipe, parts = self.state, self.recipe, self.recipe.accumulate
        # of several processes: gradients stay in each for all parts of the batch but the last
        sharing = self.network if isinstance(self.network, DistributedDataParallel) else None
        set_learning_rate(state.optimizer, lr_factor)
        state.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            # Erasing, mixing, dropout and stochastic depth follow from (seed, epoch, step, part) alone: a resumed run
            # draws what it would have drawn, and no generator's state is ever saved.
            number = process_number() + process_count() * part
            seed = mix_seed("step", recipe.seed, state.position.epoch, state.position.step, number)
            torch.manual_seed(seed)  # on every device
            seed_cpu(seed)
            images, targets = self.inputs(pixels[part::parts], labels[part::parts])
            with nullcontext() if sharing is None or part == parts - 1 else sharing.no_sync():
                total += self._backward(images, targets) / parts
        self._step()
        if state.loss is not None:
            state.loss.after_step(state.model)
        return total

    def inputs(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels (B, 3, H, W) in [0, 1] and labels (B,) → normalised images and targets on the network's device:
        labels (B,), or (B, classes) when mixed. Several views of each image (B, T, 3, H, W) come side by side."""
        pixels = pixels.flatten(0, -4)
        pixels = pixels.to(self.device, non_blocking=True, memory_format=self.memory_format)
        images = normalize(pixels, self.mean, self.std)
        labels = labels.to(self.device, non_blocking=True)
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)

    def _backward(self, images: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(images.device.type, AMP_DTYPES.get(self.recipe.amp), enabled=self.recipe.amp != "off"):
            outputs = self.network(*self.objective.task.inputs(images, targets))
        loss = self.objective(outputs, images, targets)
        self.state.scaler.scale(loss / self.recipe.accumulate).backward()
        return loss.detach()

    def _step(self) -> None:
        state, optim = self.state, self.recipe.optim
        if optim.clip_grad is not None:
            state.scaler.unscale_(state.optimizer)
            dispatch_clip_grad(self.objective.task.clipped(state.model), optim.clip_grad)
        scale = state.scaler.get_scale()
        state.scaler.step(state.optimizer)
        state.scaler.update()
        if optim.gate_l1 and state.scaler.get_scale() >= scale:  # smaller: fp16 overflowed and no step was made
            shrink_gates_(state.optimizer, optim.gate_l1)
        if state.ema is not None:
            state.ema.update(state.model)
            if optim.gate_l1:
                close_averaged_gates_(state.ema.module, state.model)
