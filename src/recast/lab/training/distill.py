"""Distillation, soft and hard, with and without a distillation token.

timm's distillation tasks hold the loop's model and have no hard distillation without a token.
Source: Touvron et al. 2021, Training data-efficient image transformers (DeiT), section 4; Hinton et al. 2015 (soft).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn import functional as F

from recast.errors import RecastError, first_line
from recast.lab.config.tasks import ModelTeacher, SoftTargets, Teaching
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig
from recast.models.register import Stats
from recast.models.trust import is_function

StudentOutputs = Tensor | tuple[Tensor, Tensor]
"""Logits (B, C), or with a distillation token (class logits, distillation logits), both (B, C)."""

TEACH = "train the teacher on these classes first"


def widened(values: Tensor) -> Tensor:
    """Return half-precision values (autocast's logits) in float32, for exponentials and sums."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class Teacher:
    """A trained network without gradients: `teacher(images)` → logits (B, C) in float32.

    `images` (B, channels, height, width) have the normalisation `student`. They are mapped to the teacher's `norm` by
    x·σ_s/σ_t + (μ_s − μ_t)/σ_t (None: the same). `amp` is the student's autocast type (None: that of the caller).

    It holds a copy of `model` in eval mode and is no module: `train()` and state_dict of a student do not reach it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        student: Stats,
        norm: Stats | None = None,
        amp: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        norm = norm or student
        self.model = copy.deepcopy(model).eval().requires_grad_(False).to(device)
        self.amp, self.channels = amp, len(student[0])
        self._map: tuple[Tensor, Tensor] | None = None
        if [*map(tuple, norm)] != [*map(tuple, student)]:
            (m_s, d_s), (m_t, d_t) = ((torch.tensor(v).view(-1, 1, 1) for v in both) for both in (student, norm))
            self._map = (d_s / d_t).to(device), ((m_s - m_t) / d_t).to(device)

    @torch.no_grad()  # not inference_mode: a loss may keep the logits for its backward pass
    def __call__(self, images: Tensor) -> Tensor:
        if self._map is not None:
            images = images * self._map[0] + self._map[1]
        with nullcontext() if self.amp is None else torch.autocast(images.device.type, self.amp):
            return widened(self.model(images))


def build_teacher(
    config: Teaching, parent: nn.Module | None, num_classes: int, *, student: Stats, img_size: int,
    device: torch.device | str = "cpu", amp: torch.dtype | None = None,
) -> Teacher:  # fmt: skip
    """Return the teacher of `config` on `device`, tried on one image of the student's `img_size`.

    A `ParentTeacher` copies the present weights of `parent`: call this before the parent is trained. Other networks
    have the normalisation of timm's configuration, torchvision's weights that of ImageNet, all others the student's.

    Raises RecastError for a teacher without weights, with another number of classes, or that does not support the size.
    """
    name, norm = "parent", student
    if not isinstance(config, ModelTeacher):
        if parent is None:
            raise RecastError("task.teacher.kind=parent requires the parent of the recast network; use kind=model")
        model = parent
    else:
        name, model = config.teacher_model, _named(config, num_classes, len(student[0]))
        if (defaults := input_defaults(model)) is not None and len(defaults.mean) == len(student[0]):
            norm = defaults.mean, defaults.std
        elif name.startswith("torchvision:") and config.teacher_pretrained:
            norm = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    teacher = Teacher(model, student=student, norm=norm, amp=amp, device=device)
    try:
        logits = teacher(torch.zeros(1, teacher.channels, img_size, img_size, device=device))
    except Exception as error:  # networks raise different errors for a size
        raise RecastError(f"the teacher {name} cannot take images of side {img_size} ({first_line(error)})") from error
    if logits.shape != (1, num_classes):
        got = f"{logits.shape[1]} classes" if logits.dim() == 2 else f"outputs of shape {tuple(logits.shape[1:])}"
        raise RecastError(
            f"the teacher {name} has {got}, the data have {num_classes} classes: choose a teacher trained on them"
        )
    return teacher


def _named(config: ModelTeacher, num_classes: int, channels: int) -> nn.Module:
    name, checkpoint = config.teacher_model, config.teacher_checkpoint
    if checkpoint is None and not config.teacher_pretrained and not is_function(name):
        raise RecastError(
            f"the teacher {name} would have random weights: set --teacher-checkpoint or --teacher-pretrained"
        )
    # downloaded weights keep their head: for another number of classes timm would replace it by a random one
    classes = num_classes if checkpoint is not None else None
    in_chans = None if channels == 3 else channels
    try:
        model = ModelConfig(name, checkpoint, pretrained=config.teacher_pretrained, in_chans=in_chans)
        return build(model, num_classes=classes, advice=TEACH)
    except RecastError as error:
        raise RecastError(f"the teacher {name}: {error}") from None


def soft_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return τ²/B Σ_b KL(p_t ‖ p_s), p = softmax(z/τ), for logits (B, C).

    DeiT's published code also divides by C, which a `teacher_weight` of w/C does here. KL is
    Σ_c p_t (log p_t − log p_s), as there; DeiT's equation prints the arguments in the other order.
    """
    student, teacher = (F.log_softmax(widened(z) / temperature, dim=-1) for z in (logits, teacher_logits))
    total = F.kl_div(student, teacher, reduction="sum", log_target=True) * temperature**2
    return total / len(logits)


def hard_loss(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the cross-entropy of logits (B, C) with the teacher's class, without smoothing (DeiT, Eq. 3)."""
    return F.cross_entropy(widened(logits), teacher_logits.argmax(dim=-1))


class Distillation:
    """(1 − w)·L_label(z_cls, targets) + w·L_teacher(z_dist, teacher(images)), w = `config.teacher_weight`.

    L_teacher is `soft_loss` or `hard_loss`. z_cls and z_dist are the two heads of a network with a distillation token
    (`train_token_`), for any other network both are its logits. `images` are the student's, mixed and erased. The terms
    are computed in float32 or more. DeiT: hard, w = 0.5; soft, w = 0.1, τ = 3.
    """

    def __init__(self, config: Teaching, teacher: Teacher, label_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.config, self.teacher, self.label_loss = config, teacher, label_loss

    def __call__(self, outputs: StudentOutputs, images: Tensor, targets: Tensor) -> Tensor:
        config = self.config
        class_logits, token_logits = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        teacher_logits = self.teacher(images)
        if isinstance(config.targets, SoftTargets):
            teacher_loss = soft_loss(token_logits, teacher_logits, config.targets.temperature)
        else:
            teacher_loss = hard_loss(token_logits, teacher_logits)
        label_loss = self.label_loss(class_logits, targets)
        return (1 - config.teacher_weight) * label_loss + config.teacher_weight * teacher_loss


def train_token_(model: nn.Module) -> None:
    """Make a network of timm with a distillation token return both logits in training mode."""
    if (set_training := getattr(model, "set_distilled_training", None)) is not None:
        set_training(True)
