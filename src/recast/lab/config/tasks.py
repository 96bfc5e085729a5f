"""Tasks, and the settings that only one task has."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from recast.config import FilePath, NotNegative, OneOf, Positive, Rare, clash
from recast.lab.config.types import BelowOne, Probability

if TYPE_CHECKING:
    from recast.lab.config.recipe import Recipe


class TaskConfig(OneOf):
    """Task

    A subclass with a kind of its own is a task that recipes can name.
    """

    default: ClassVar[str] = "classify"
    data_sets: ClassVar[tuple[str, ...]] = ()
    """Data sets of this task alone. They choose the task if a recipe does not."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Dotted names of fields of the shared sections that this task does not use."""

    kind: str
    """Task, chosen by the data set if possible. multilabel: any number of classes per image (csv). embed: Grafit, DINO.
    """

    def check(self, recipe: Recipe) -> None:
        """Raise `clash` for settings of the recipe that the task cannot use."""
        for name in self.unused:
            if attrgetter(name)(recipe) != attrgetter(name)(type(recipe)()):
                raise clash(f"`{name}` does not apply to `task.kind` {self.kind}; drop it")


class LabelLoss(OneOf):
    """Loss of labels"""

    default: ClassVar[str] = "ce"

    kind: Literal["ce", "bce"]
    """Loss on the labels. ce: softmax cross-entropy. bce: binary cross-entropy of every class (RSB, DeiT III)."""


class CrossEntropy(LabelLoss):
    """Softmax cross-entropy."""

    kind: Literal["ce"] = "ce"


class BinaryCrossEntropy(LabelLoss):
    """Binary cross-entropy of every class (RSB, DeiT III)."""

    kind: Literal["bce"] = "bce"
    bce_threshold: Annotated[BelowOne | None, Rare()] = None
    """Threshold above which targets become 1, others 0 (DeiT III: 0, so that both mixed classes count fully)."""


class Targets(OneOf):
    """Distillation term"""

    default: ClassVar[str] = "soft"

    kind: Literal["soft", "hard"]
    """Distillation loss. soft: KL divergence to the teacher's outputs at a temperature. hard: cross-entropy with the
    teacher's predicted class."""


class SoftTargets(Targets):
    """KL divergence to the teacher."""

    kind: Literal["soft"] = "soft"
    temperature: Annotated[Positive, Rare()] = 3.0
    """Temperature τ of both distributions; the term is scaled by τ²."""


class HardTargets(Targets):
    """Cross-entropy with the class that the teacher predicts."""

    kind: Literal["hard"] = "hard"


class TeacherConfig(OneOf):
    """A teacher beside the labels (DeiT, Touvron et al. 2021); it sees the images as the student does."""

    default: ClassVar[str] = "none"

    kind: Literal["none", "parent", "model"]
    """Teacher for distillation. parent: the network before recasting. model: the network teacher_model."""


class NoTeacher(TeacherConfig):
    """Labels alone."""

    kind: Literal["none"] = "none"


class Teaching(TeacherConfig):
    """Settings of every teacher."""

    targets: Targets = SoftTargets()
    teacher_weight: Probability = 0.5
    """Share of the distillation loss; the rest is the loss of the labels. With a distillation token each loss has its
    own head."""


class ParentTeacher(Teaching):
    """The network that was recast."""

    kind: Literal["parent"] = "parent"


class ModelTeacher(Teaching):
    """Another network, given by name."""

    kind: Literal["model"] = "model"
    teacher_model: Annotated[str, Rare()]  # type: ignore[misc]  # options have names
    """Name of the teacher, as model.name."""
    teacher_checkpoint: Annotated[FilePath | None, Rare()] = None
    """Weights of the teacher, .safetensors or .pth."""
    teacher_pretrained: Annotated[bool, Rare()] = False
    """Let timm or torchvision fetch the teacher's weights."""


class WholeImageTask(TaskConfig):
    """Settings of tasks with labels of whole images."""

    auto_augment: str | None = None
    """Policy of timm (rand-m9-mstd0.5-inc1, 3a, original, augmix-m3-w3), or ta_wide for TrivialAugment."""
    erasing: Probability = 0.0
    """Probability of random erasing (one box of noise, timm's mode pixel)."""


class OneLabelTask(WholeImageTask):
    """Settings of tasks with one label for an image."""

    label_smoothing: BelowOne = 0.0
    """Label smoothing: share of the target spread over all classes."""
    loss: LabelLoss = CrossEntropy()


class ClassifyConfig(OneLabelTask):
    """One class for each image."""

    kind: Literal["classify"] = "classify"
    mixup: NotNegative = 0.0
    """Mixup's α. 0: off."""
    cutmix: NotNegative = 0.0
    """CutMix's α. 0: off."""
    mix_prob: Annotated[Probability, Rare()] = 1.0
    """Probability that a batch is mixed."""
    teacher: TeacherConfig = NoTeacher()
    class_weights: Annotated[Literal["balanced"] | None, Rare()] = None
    """Class weights in the loss. balanced: every class counts equally. None: every image counts equally."""
    sampler: Annotated[Literal["balanced"] | None, Rare()] = None
    """Images of an epoch. balanced: every class equally often, images of rare classes repeated. None: every image once.
    """

    @model_validator(mode="after")
    def _weighs_cross_entropy(self) -> Self:
        if self.class_weights is not None and self.sampler is not None:
            raise clash("`class_weights` and `sampler` balanced both make classes count equally; drop one of them")
        if self.class_weights is not None and self.loss.kind != "ce":
            raise clash("`class_weights` requires `loss` ce")
        return self

    @property
    def mixes(self) -> bool:
        """True if images of a batch are mixed."""
        return self.mixup > 0 or self.cutmix > 0


class MultiLabelConfig(WholeImageTask):
    """Any number of classes for each image."""

    data_sets: ClassVar[tuple[str, ...]] = ("csv_multilabel",)
    kind: Literal["multilabel"] = "multilabel"
