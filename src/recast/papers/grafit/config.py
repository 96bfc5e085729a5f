"""Settings that only Grafit and DINO need: labels of coarse classes, and the task of an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge
from pydantic import model_validator

from recast.config import Classes, Count, FilePath, NotNegative, OneOf, Positive, Rare, Width, clash
from recast.lab.config.recipe import PaperConfig
from recast.lab.config.tasks import OneLabelTask
from recast.lab.config.types import Probability, Share
from recast.lab.evaluation.suites import METRICS, SUITES, Metric, Suite

if TYPE_CHECKING:
    from recast.lab.config.recipe import Groups, Recipe

METRICS |= {
    "weight_decay": Metric("Weight decay, log₁₀", "", meaning="of the linear classifier, chosen on held-out images"),
    "halves": Metric(
        "Random halves separated", meaning="training accuracy of a linear classifier of random halves of every class"
    ),
    "energy": Metric("Energy of the components", meaning="share of the variance in the first components"),
}
METRICS["neighbours"] = Metric("Neighbours", "images", meaning="how many of the nearest images vote")
SUITES |= {
    "retrieval": Suite(
        "Retrieval of training images", "mAP over all training images, also given the coarse class; top-1, chosen k",
        "accuracy", ("map", "top1", "neighbours"), short="Retrieval", module="recast.papers.grafit.retrieval",
    ),
    "linear": Suite(
        "Linear classifier on the features", "logistic regression on the frozen features of the training images",
        "accuracy", ("top1", "weight_decay"), short="Linear classifier", module="recast.papers.grafit.linear",
    ),
    "separability": Suite(
        "Separability of the features", "how well random halves of a class separate; energy of principal components",
        "accuracy", ("halves", "energy"), "{} components", short="Separability", module="recast.papers.grafit.linear",
    ),
}  # fmt: skip


class GrafitConfig(PaperConfig):
    """Grafit: labels of coarse classes"""

    section: ClassVar[str] = "grafit"
    groups_classes: ClassVar[bool] = True
    files: ClassVar[dict[str, str]] = {"coarse_file": "coarse.csv"}
    labels: Annotated[Literal["fine", "coarse"], Rare()] = "fine"
    """Training labels. fine: the data's own classes. coarse: coarse classes, each a group of fine ones."""
    coarse_file: Annotated[FilePath | None, Rare()] = None
    """CSV with the columns fine and coarse, one line per fine class. None: CIFAR-100's 20 superclasses, or `rank`."""
    rank: Annotated[Literal["kingdom", "phylum", "class", "order", "family", "genus"] | None, Rare()] = None
    """Taxonomic rank that defines the coarse classes, from the class names of iNaturalist."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if None not in (self.coarse_file, self.rank):
            raise clash("`coarse_file` and `rank` both say what the coarse classes are; drop one of them")
        return self

    def groups(self, data: str, classes: list[str]) -> Groups | None:
        """Return the coarse classes."""
        from recast.papers.grafit.coarse import coarse_classes

        return coarse_classes(data, classes, self.labels, self.coarse_file, self.rank)

    @property
    def learns_groups(self) -> bool:
        return self.labels == "coarse"

    def with_labels(self, labels: str | None) -> Self:
        return self.replace(labels=labels or "fine")

    def check(self, recipe: Recipe) -> None:
        """Raise `clash` for coarse labels of a task whose images have no single label."""
        if self.labels == "coarse" and not isinstance(recipe.task, OneLabelTask):
            raise clash(f"`papers.grafit.labels` coarse does not apply to `task.kind` {recipe.task.kind}; drop it")


class Projector(OneOf):
    """Head of an embedding, and what it learns from."""

    default: ClassVar[str] = "mlp"

    kind: Annotated[Literal["linear", "mlp", "dino"], Rare()]
    """Head of the embedding. linear: one layer (Grafit FC). mlp: two layers with a ReLU (Grafit). dino: no head; the
    features learn without labels by DINO's loss over dim prototypes."""
    dim: Annotated[Classes, Rare()] = 256
    """Width of the embedding; with dino the number of prototypes."""
    hidden: Annotated[Width, Rare()] = 4096
    """Hidden width of the mlp, and of the predictor of the instance loss."""
    label_weight: Annotated[NotNegative, Rare()] = 0.0
    """Weight of the label loss. 0: the classifier trains as a probe, without gradient to the rest."""
    target_decay: Annotated[Probability, Rare()] = 0.996
    """Initial decay of the moving average of the weights; it rises to 1 by a cosine."""


class Neighbors(Projector):
    """Grafit (Touvron et al. 2021): losses of labels, neighbors (SNCA) and instances (BYOL)."""

    kind: Annotated[Literal["linear", "mlp"], Rare()] = "mlp"
    knn_weight: Annotated[NotNegative, Rare()] = 1.0
    """Weight of the neighbor loss: softmax over all training images, the target is those of the same class (SNCA)."""
    instance_weight: Annotated[NotNegative, Rare()] = 1.0
    """Weight of the instance loss."""
    instance_loss: Annotated[Literal["byol", "triplet"], Rare()] = "byol"
    """Instance loss. byol: embeddings of an image's views predict those of a moving average of the network. triplet:
    they are closer to each other than to views of other images in the batch."""
    views: Annotated[Count, Rare()] = 4
    """Views of each image in an update; label and neighbor loss use the first."""
    sigma: Annotated[Positive, Rare()] = 0.05
    """Temperature of the neighbor loss."""

    @model_validator(mode="after")
    def _learns(self) -> Self:
        if not (self.knn_weight or self.instance_weight):
            raise clash("`knn_weight` and `instance_weight` are both 0, and an embedding learns from them; raise one")
        if self.instance_weight and self.views < 2:
            raise clash("`instance_weight` compares views of an image and requires `views` of 2 or more")
        return self


class Dino(Projector):
    """DINO (Caron et al. 2021): no labels, views agree over prototypes."""

    kind: Annotated[Literal["dino"], Rare()] = "dino"
    views: Annotated[int, Ge(2), Rare()] = 4
    """Views of each image in an update; label and neighbor loss use the first."""
    local_scale: Annotated[tuple[Share, Share], Rare()] = (0.05, 0.4)
    """Range of the crop area, relative to the image, of all views but the first two; they are enlarged to full size."""
    teacher_temperature: Annotated[Positive, Rare()] = 0.04
    """Temperature of the moving average's outputs; that of the network's outputs is 0.1."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.local_scale[0] > self.local_scale[1]:
            raise clash(f"`local_scale` must be (smallest, largest) share of the area, got {self.local_scale}")
        return self


class EmbedConfig(OneLabelTask):
    """An embedding of images, for neighbors and retrieval, with labels or without."""

    kind: Literal["embed"] = "embed"
    unused: ClassVar[tuple[str, ...]] = ("augment.repeats", "schedule.kind")
    projector: Projector = Neighbors()

    @property
    def head(self) -> Neighbors | Dino:
        """The projector, as one of its kinds."""
        assert isinstance(self.projector, Neighbors | Dino)
        return self.projector

    def check(self, recipe: Recipe) -> None:
        """Raise `clash` for settings that an embedding cannot be trained with."""
        super().check(recipe)
        if recipe.regularization.freeze not in ("none", "batch_norm"):
            raise clash("`regularization.freeze` of weights does not apply to `task.kind` embed; drop it")
        if recipe.pool.kind == "per_class":
            raise clash("`pool.kind` per_class does not apply to `task.kind` embed; take single")
