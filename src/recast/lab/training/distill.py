"""A teacher beside the labels: soft and hard distillation, with and without a distillation token.

timm's distillation tasks own the loop's model, read the student's normalisation from its configuration, divide the
soft loss by the batch only, and have no hard distillation without a token: so the terms are written here.
Source: Touvron et al. 2021, Training data-efficient image transformers (DeiT), section 4; Hinton et al. 2015 (soft).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError, first_line
from recast.lab.config import DistillConfig
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig
from recast.models.trust import is_function

StudentOutputs = Tensor | tuple[Tensor, Tensor]
"""Logits (B, C), or with a distillation token (class logits, distillation logits), both (B, C)."""

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and std of x = (pixel − mean) / std, per channel, for pixels in [0, 1]."""


def widened(values: Tensor) -> Tensor:
    """`values` in float32 where they are narrower (autocast's logits): exponentials and sums need the digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class Teacher:
    """A trained network that only answers: `teacher(images)` → logits (B, C) in float32, without gradients.

    `images` (B, channels, height, width) are the student's, normalised for it by `student`; they are mapped to the
    teacher's `own` normalisation, x·σ_s/σ_t + (μ_s − μ_t)/σ_t (None: the same), and resized to `size` × `size`
    (None: not) as PIL resizes: bicubic with a = −1/2, averaging over more pixels when shrinking (`antialias=True`),
    values not clipped. `amp` is the autocast type that the student runs in (None: whatever surrounds the call).

    It holds a copy of `model` in eval mode, and is no module: no `train()`, optimiser or state_dict of a student ever
    reaches it, and its BatchNorm statistics never move. Raises RecastError where the two differ in channels.
    """

    def __init__(
        self, model: nn.Module, *, student: Normalisation, own: Normalisation | None = None, size: int | None = None,
        amp: torch.dtype | None = None, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        own, channels = own or student, len(student[0])
        if len(own[0]) != channels:
            raise RecastError(f"the teacher takes {len(own[0])} channels, the student's images have {channels}")
        self.model = copy.deepcopy(model).eval().requires_grad_(False).to(device)
        self.size, self.amp, self.channels = size, amp, channels
        self._map: tuple[Tensor, Tensor] | None = None
        if [*map(tuple, own)] != [*map(tuple, student)]:
            (m_s, d_s), (m_t, d_t) = ((torch.tensor(v).view(-1, 1, 1) for v in both) for both in (student, own))
            self._map = (d_s / d_t).to(device), ((m_s - m_t) / d_t).to(device)

    @torch.no_grad()  # not inference_mode: a loss may keep the logits for its backward pass
    def __call__(self, images: Tensor) -> Tensor:
        if self._map is not None:
            images = images * self._map[0] + self._map[1]
        if self.size is not None and images.shape[-2:] != (self.size, self.size):
            images = F.interpolate(images, (self.size, self.size), mode="bicubic", antialias=True)
        with nullcontext() if self.amp is None else torch.autocast(images.device.type, self.amp):
            return widened(self.model(images))


def build_teacher(
    config: DistillConfig, parent: nn.Module | None, num_classes: int, *, student: Normalisation, img_size: int,
    device: torch.device | str = "cpu", amp: torch.dtype | None = None,
) -> Teacher:  # fmt: skip
    """The teacher that `config` names, on `device`, tried on one black image of the student's `img_size`.

    "parent" is a copy of `parent` as it is now, normalised as the student is: call it before the parent is trained. A
    name is built as a model is, and normalised as timm's configuration of it says; torchvision's fetched weights: as
    for ImageNet; a network that does not say: as the student.

    Raises RecastError for a teacher without weights, with another number of classes, or that cannot take the images.
    """
    name, own = config.name, student
    if name is None:
        raise RecastError("there is no teacher: set distill.name to parent, or to a model's name")
    if name == "parent":
        if config.teacher_checkpoint is not None or config.teacher_pretrained:
            raise RecastError(
                "distill.name=parent is the network that was recast: leave teacher_checkpoint and teacher_pretrained "
                "out, or name a model"
            )
        if parent is None:
            raise RecastError("distill.name=parent needs the network that was recast, got none: name a model")
        model = parent
    else:
        model = _named(name, config, num_classes)
        if (defaults := input_defaults(model)) is not None:
            own = defaults.mean, defaults.std
        elif name.startswith("torchvision:") and config.teacher_pretrained:
            own = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    teacher = Teacher(model, student=student, own=own, size=config.teacher_size, amp=amp, device=device)
    side = teacher.size or img_size
    try:
        logits = teacher(torch.zeros(1, teacher.channels, img_size, img_size, device=device))
    except Exception as error:  # every network has its own way to refuse a size
        reason = f"the teacher {name} cannot take images of side {side} ({first_line(error)})"
        raise RecastError(f"{reason}: set distill.teacher_size to its own") from error
    if logits.shape != (1, num_classes):
        got = f"{logits.shape[1]} classes" if logits.dim() == 2 else f"outputs of shape {tuple(logits.shape[1:])}"
        raise RecastError(
            f"the teacher {name} has {got}, the data have {num_classes} classes: choose one trained on them"
        )
    return teacher


def _named(name: str, config: DistillConfig, num_classes: int) -> nn.Module:
    if config.teacher_checkpoint is None and not config.teacher_pretrained and not is_function(name):
        raise RecastError(
            f"the teacher {name} would have random weights: set distill.teacher_checkpoint or teacher_pretrained"
        )
    # fetched weights keep their own head: asked for another number of classes, timm would put a random one in its place
    classes = num_classes if config.teacher_checkpoint is not None else None
    try:
        wanted = ModelConfig(name, checkpoint=config.teacher_checkpoint, pretrained=config.teacher_pretrained)
        return build(wanted, num_classes=classes)
    except RecastError as error:
        raise RecastError(f"the teacher {name}: {error}") from None


def soft_loss(
    logits: Tensor, teacher_logits: Tensor, temperature: float, reduction: Literal["batchmean", "numel"] = "batchmean"
) -> Tensor:
    """τ²/B Σ_b KL(p_t ‖ p_s), p = softmax(z/τ), for logits (B, C).

    reduction="numel" divides by C too, as DeiT's published code does. KL is Σ_c p_t (log p_t − log p_s), as there;
    DeiT's equation prints the arguments the other way round.
    """
    given, wanted = (F.log_softmax(widened(z) / temperature, dim=-1) for z in (logits, teacher_logits))
    total = F.kl_div(given, wanted, reduction="sum", log_target=True) * temperature**2
    return total / (len(logits) if reduction == "batchmean" else logits.numel())


def hard_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy of logits (B, C) with the class that the teacher decides on, never smoothed (DeiT, Eq. 3)."""
    return F.cross_entropy(widened(logits), teacher_logits.argmax(dim=-1))


class Distillation:
    """(1 − w)·L_label(z_cls, targets) + w·L_teacher(z_dist, teacher(images)), w = `config.teacher_weight`.

    L_teacher is `soft_loss` or `hard_loss`. z_cls and z_dist are the two heads of a network with a distillation token
    (`train_token_`), for any other both are its logits. `images` are what the student saw, mixed and erased. The terms
    are computed in float32 at least. DeiT: hard, w = 0.5; soft, w = 0.1, τ = 3.

    Raises RecastError for a teacher with another number of classes.
    """

    def __init__(self, config: DistillConfig, teacher: Teacher, label_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.config, self.teacher, self.label_loss = config, teacher, label_loss

    def __call__(self, outputs: StudentOutputs, images: Tensor, targets: Tensor) -> Tensor:
        config = self.config
        class_logits, token_logits = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        teacher_logits = self.teacher(images)
        if teacher_logits.shape != token_logits.shape:
            raise RecastError(
                f"the teacher gives {tuple(teacher_logits.shape)} (images, classes), the student "
                f"{tuple(token_logits.shape)}: choose a teacher trained on the same classes"
            )
        if config.targets == "hard":
            taught = hard_loss(token_logits, teacher_logits)
        else:
            taught = soft_loss(token_logits, teacher_logits, config.temperature, config.reduction)
        return (1 - config.teacher_weight) * self.label_loss(class_logits, targets) + config.teacher_weight * taught


def train_token_(model: nn.Module) -> None:
    """Let a network with a distillation token (timm's) give the pair of logits while it trains."""
    if (switch := getattr(model, "set_distilled_training", None)) is not None:
        switch(True)
