"""What a suite works with: the models as functions of pixels, the images batch by batch, and the options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError
from recast.lab.config.evaluation import Options
from recast.lab.data import Data, Loader
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.seeding import choose_balanced
from recast.lab.suites import SUITES
from recast.models.build import check_logits
from recast.tracing.outputs import answer_of

Images = TypeVar("Images", bound=LabelledImages)


class PixelModel(nn.Module):
    """x ↦ model((x - mean) / std) for pixels x (B, C, H, W) in [0, 1]: attacks and corruptions work on pixels.

    The normalisation is computed in the dtype of the pixels and handed on in that of the model's parameters. Of an
    output that holds logits (`answer_of`) it returns these.
    """

    def __init__(self, model: nn.Module, mean: Iterable[float], std: Iterable[float]) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, tuple(mean), tuple(std)

    def forward(self, pixels: Tensor) -> Any:
        normalised = normalize(pixels, self.mean, self.std)
        parameter = next(self.model.parameters(), normalised)
        return answer_of(self.model(normalised.to(parameter.dtype)))


class NotMeasured(RecastError):
    """A suite cannot be measured here, as its data set is not there or has other classes; the other suites go on.

    The message says how to get the data, or what to do.
    """


def sampled(images: Images, most: int | None) -> Images:
    """`most` images, class-balanced, or all there are."""
    if most is None or most >= len(images):
        return images
    return images.subset(choose_balanced(images.labels, most, "num_images"))


@dataclass(frozen=True)
class Source:
    """Images that a suite goes over."""

    images: LabelledImages
    part: str = ""
    """Which part of the suite, such as gaussian_noise/1 or 160x160; empty where there is one only."""
    columns: Tensor | None = None
    """The classes that count, of a set that has some of them only: labels are positions in `columns`."""
    answers: Tensor | None = None
    """(N, A) int64: the labels that are right for each image, filled up with -1; None: the one of the data set."""
    depends: tuple[LabelledImages, ...] = ()
    """Other images that the scores depend on."""


class Score(NamedTuple):
    """A number, or k numbers, for each image of a batch: what a metric is the mean of."""

    model: str
    metric: str
    values: Tensor
    """(B,) or (B, k)."""


@dataclass(frozen=True)
class Context:
    """What is measured, and on what. All models see the same pixels, batch by batch."""

    models: dict[str, PixelModel]
    data: Data
    batch_size: int
    device: torch.device
    options: Options = Options()
    workers: int = 0
    epochs: Sequence[tuple[str, int, Callable[[], nn.Module]]] = ()
    """Kept weights: name of a model, epoch, function that loads the model of that epoch."""
    untaught: frozenset[str] = frozenset()
    """Models whose classifier is new: what it says of an image means nothing."""
    store: dict[Any, Any] = field(default_factory=dict)
    """What a suite keeps from one batch to the next, such as the features of the training images."""
    told: Callable[[float], object] = lambda share: None
    """What a table calls with the share of it that is done."""

    @property
    def validation(self) -> Source:
        """The validation images of the data."""
        return Source(self.data.val)

    def dataset(self, suite: str) -> str:
        """The name of the data set that a suite looks at."""
        return suite if SUITES[suite].needs else self.data.name

    def batches(self, source: Source | None = None, start: int = 0) -> Iterator[Batch]:
        """The batches of a source (None: the validation images) in order, from batch number `start` on."""
        source = source or self.validation
        first = start * self.batch_size
        for images, labels in Loader(source.images, self.batch_size, start=start, workers=self.workers):
            yield Batch(self, source, first, images.to(self.device), labels.to(self.device))
            first += len(labels)

    def logits(self, name: str, images: Tensor) -> Tensor:
        """Outputs (B, classes) without gradient; RecastError if they are not one finite number per class."""
        with torch.no_grad():
            logits = self.models[name](images)
        check_logits(logits, len(images), len(self.data.classes), self.data.name, f"model {name!r}")
        if not logits.isfinite().all():
            raise RecastError(
                f"model {name!r} gives NaN or infinite logits on images of {self.data.name}: its accuracy means nothing"
            )
        return logits.float()


class Batch:
    """Images of a source, and the models to score on them. What several suites need is computed once for each model."""

    def __init__(self, context: Context, source: Source, first: int, images: Tensor, labels: Tensor) -> None:
        self.context, self.source = context, source
        self.models = context.models
        self.options = context.options
        self.first = first
        """The index of the first image."""
        self.images, self.labels = images, labels
        self._logits: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def indices(self) -> range:
        return range(self.first, self.first + len(self))

    def logits(self, name: str, images: Tensor | None = None) -> Tensor:
        """(B, classes that count) of the images as they are, or of these in their place."""
        is_own = images is None or images is self.images
        if is_own and name in self._logits:
            return self._logits[name]
        logits = self.context.logits(name, self.images if images is None else images)
        if self.source.columns is not None:
            logits = logits[:, self.source.columns]
        if is_own:
            self._logits[name] = logits
        return logits

    def is_correct(self, name: str, images: Tensor | None = None, k: int = 1) -> Tensor:
        """(B,) float: 1 where the label, or one of the source's answers, is among the k largest logits."""
        answers = self.source.answers
        right = self.labels if answers is None else answers[self.indices].to(self.labels.device)
        return is_correct(self.logits(name, images), right, k)

    def top1(self, metric: str, images: Tensor | None = None) -> Iterator[Score]:
        """Which of the images, or of these in their place, each model has right."""
        for name in self.models:
            yield Score(name, metric, self.is_correct(name, images))

    def gradient(self, name: str) -> Tensor:
        """∇ₓ of the cross-entropy at the images as they are, (B, C, H, W)."""
        if name not in self._gradients:
            self._gradients[name] = loss_gradient(self.models[name], self.images, self.labels)
        return self._gradients[name]


def loss_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """∇ₓ of the summed cross-entropy: no image's gradient depends on its batch, none is left in the parameters."""
    with torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        loss = F.cross_entropy(model(pixels).float(), labels, reduction="sum")
        return torch.autograd.grad(loss, pixels)[0]


def is_correct(logits: Tensor, answers: Tensor, k: int = 1) -> Tensor:
    """(B,) float: 1 where the label (B,), or one of several (B, A), is among the k largest logits."""
    best = logits.topk(k, dim=1).indices
    return (best[:, :, None] == answers.reshape(len(best), 1, -1)).flatten(1).any(1).float()
