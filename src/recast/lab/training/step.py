"""One update of the weights: the loss of a recipe, and its gradient over parts and processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms.v2.functional import normalize

from recast.lab.config import ClassifyConfig, Recipe, TaskConfig
from recast.lab.config.tasks import Teaching
from recast.lab.data import Data
from recast.lab.data.class_order import order_classes_
from recast.lab.data.images import in_unit
from recast.lab.data.seeding import mix_seed, seed_cpu
from recast.lab.task import Setting, task_of
from recast.lab.training.checkpoint import State
from recast.lab.training.distill import Distillation, build_teacher, train_token_
from recast.lab.training.distributed import process_count, process_number
from recast.lab.training.optim import close_averaged_gates_, set_learning_rate, shrink_gates_

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore every buffer after the block: blocks that are computed again would count a batch twice in BatchNorm."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)


class Objective:
    """The loss of a task, with a teacher if it has one. `parent` is that of `task.teacher.kind=parent`."""

    def __init__(
        self, config: TaskConfig, data: Data, student: nn.Module, parent: nn.Module | None, setting: Setting
    ) -> None:
        self.task, teaching = task_of(config), getattr(config, "teacher", None)
        self.label_loss = self.task.loss(config, data)
        self.stateful = self.task.stateful_loss(config, data, student, self.label_loss, setting)
        self.distillation: Distillation | None = None
        if isinstance(teaching, Teaching):
            size, norm = data.img_size, (data.mean, data.std)
            teacher = build_teacher(
                teaching, parent, len(data.classes), student=norm, img_size=size, device=setting.device, amp=setting.amp
            )
            order_classes_(teacher.model, data, "the teacher", remedy="choose a teacher trained on them")
            train_token_(student)
            self.distillation = Distillation(teaching, teacher, self.label_loss)

    def __call__(self, outputs: Any, images: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the images of a part."""
        if self.stateful is not None:
            return self.stateful(outputs, images, targets)
        if self.distillation is not None:
            return self.distillation(outputs, images, targets)
        return self.label_loss(outputs, targets)


class Update:
    """Forward, backward and the optimiser's step for one batch.

    Every part of every process holds the same number of images B / (w·n), its loss is a mean over them, and the
    gradient is the mean over parts and processes. For any w processes and n parts it equals that of the whole batch,
    except for BatchNorm, which sees one part at a time. Random erasing, Mixup and CutMix are timm's.
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
                task.mixup,
                task.cutmix,
                prob=task.mix_prob,
                label_smoothing=task.label_smoothing,
                num_classes=len(data.classes),
            )

    def __call__(self, pixels: Tensor, labels: Tensor, lr_factor: float) -> Tensor:
        """Update the weights by this process's share of a batch; returns its mean loss, a tensor on the device."""
        state, parts = self.state, self.recipe.accumulate
        # with several processes, gradients stay in each for all parts of the batch except the last
        averaging = self.network if isinstance(self.network, DistributedDataParallel) else None
        set_learning_rate(state.optimizer, lr_factor)
        state.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for part in range(parts):
            self._seed(part)
            images, targets = self.inputs(pixels[part::parts], labels[part::parts])
            with nullcontext() if averaging is None or part == parts - 1 else averaging.no_sync():
                total += self._backward(images, targets) / parts
        self._step()
        if state.loss is not None:
            state.loss.after_step(state.model)
        return total

    def _seed(self, part: int) -> None:
        """Seed erasing, mixing, dropout and stochastic depth by (seed, epoch, step, part) alone.

        A resumed run draws what it would have drawn, without the state of a generator.
        """
        number = process_number() + process_count() * part
        position = self.state.position
        seed = mix_seed("step", self.recipe.seed, position.epoch, position.step, number)
        torch.manual_seed(seed)  # on every device
        seed_cpu(seed)

    def inputs(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images and targets on the network's device.

        Args:
            pixels: (B, 3, H, W), bytes or in [0, 1]; several views of each image, (B, T, 3, H, W), become (B·T, ...).
            labels: (B,). Targets are the labels, or (B, classes) when mixed.
        """
        pixels = pixels.flatten(0, -4)
        pixels = pixels.to(self.device, non_blocking=True, memory_format=self.memory_format)
        images = normalize(in_unit(pixels), self.mean, self.std)
        labels = labels.to(self.device, non_blocking=True)
        if self.erase is not None:
            images = self.erase(images)
        return (images, labels) if self.mix is None else self.mix(images, labels)

    def _backward(self, images: Tensor, targets: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # memory of the last part may be written again
        with torch.autocast(images.device.type, AMP_DTYPES.get(self.recipe.amp), enabled=self.recipe.amp != "off"):
            outputs = self.network(*self.objective.task.inputs(images, targets))
        loss = self.objective(outputs, images, targets)
        with unchanged_buffers(self.state.model) if self.recipe.grad_checkpointing else nullcontext():
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
