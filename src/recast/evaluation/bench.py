"""What a suite gets: the models as functions of pixels, the images, and what it was told to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.data import Data, loader
from recast.data.datasets import LabelledImages
from recast.errors import RecastError
from recast.run.records import Table


class PixelModel(nn.Module):
    """x ↦ model((x - mean) / std) for pixels x (B, C, H, W) in [0, 1]: attacks and corruptions work on pixels.

    The normalisation is computed in float32 and handed on in the dtype of the model's parameters.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Iterable[float], std: Iterable[float]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(tuple(mean)).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(tuple(std)).view(-1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        normalised = (pixels - self.mean) / self.std
        parameter = next(self.model.parameters(), normalised)
        return self.model(normalised.to(parameter.dtype))


class NotMeasured(RecastError):
    """A suite cannot be measured here, as its data set is not there or has other classes; the other suites go on.

    The message says how to get the data, or what to do.
    """


@dataclass(frozen=True)
class Options:
    """What the suites can be told."""

    eps: tuple[float, ...] = (1.0, 4.0)
    """Budgets of the attacks in 1/255 of a [0, 1] pixel."""
    steps: int = 5
    """Steps of PGD."""
    step_size: float | None = None
    """Step size of PGD in 1/255. None: 2.5·ε/steps."""
    restarts: int = 1
    """PGD is started so many times, and an image counts as correct if all fail. From the second on: random starts."""
    random_start: bool = False
    """The first start of PGD is a random point of the ball too."""
    sizes: tuple[str, ...] = ()
    """Test sizes of `resolution`: 160, or 128x192 (height x width). Empty: sizes around the model's own."""
    neighbours: tuple[int, ...] = (1, 5, 10, 20)
    """k of the `knn` suite."""
    sets: Path | None = None
    """The folder that holds imagenet-c/, imagenet-a/ and so on."""
    num_samples: int | None = None
    """Measure on this many images of every data set, class-balanced."""
    seed: int = 0
    """Of the corruptions, of random starts and of the bootstrap."""


@dataclass(frozen=True)
class Source:
    """Images that a suite goes over."""

    part: str
    """Which part of the suite, such as gaussian_noise/1 or 160x160; empty where there is one only."""
    images: LabelledImages
    dataset: str
    """The name of the data set."""
    columns: Tensor | None = None
    """The classes that count, of a set that has some of them only: labels are positions in `columns`."""
    depends: tuple[LabelledImages, ...] = ()
    """Other images that the scores depend on."""


class Score(NamedTuple):
    """A number, or k numbers, for each image of a batch: what a metric is the mean of."""

    model: str
    metric: str
    values: Tensor
    """(B,) or (B, k)."""


class Measurement(NamedTuple):
    """A number about one model that is no mean over images, such as its speed; `n` images are behind it."""

    model: str
    metric: str
    value: float
    n: int


@dataclass(frozen=True)
class Bench:
    """What a suite measures, and on what. All models see the same pixels, batch by batch."""

    models: dict[str, PixelModel]
    data: Data
    batch_size: int
    device: torch.device
    options: Options = Options()
    workers: int = 0
    store: dict[Any, Any] = field(default_factory=dict)
    """What a suite keeps from one batch to the next, such as the features of the training images."""

    def batches(self, source: Source | None = None, start: int = 0) -> Iterator[Batch]:
        """The batches of a source (None: the validation images) in order, from batch number `start` on."""
        source = source or Source("", self.data.val, self.data.name)
        first = start * self.batch_size
        for images, labels in loader(source.images, self.batch_size, start=start, workers=self.workers):
            yield Batch(self, source, first, images.to(self.device), labels.to(self.device))
            first += len(labels)

    def logits(self, name: str, images: Tensor) -> Tensor:
        """Outputs (B, classes) without gradient; RecastError if they are not one finite number per class."""
        with torch.no_grad():
            logits = self.models[name](images)
        classes = len(self.data.classes)
        if not isinstance(logits, Tensor) or logits.shape != (len(images), classes):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise RecastError(
                f"model {name!r} must give logits of shape {(len(images), classes)} (images, classes of "
                f"{self.data.name}), got {got}. Set num_classes, or choose the data the model was trained on"
            )
        if not logits.isfinite().all():
            raise RecastError(
                f"model {name!r} gives NaN or infinite logits on images of {self.data.name}: its accuracy means nothing"
            )
        return logits.float()


class Batch:
    """Images of a source. What several suites need of them is computed once for each model."""

    def __init__(self, bench: Bench, source: Source, first: int, images: Tensor, labels: Tensor) -> None:
        self.bench, self.source = bench, source
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

    def logits(self, name: str) -> Tensor:
        """(B, classes that count) of the images as they are."""
        if name not in self._logits:
            logits = self.bench.logits(name, self.images)
            self._logits[name] = logits if self.source.columns is None else logits[:, self.source.columns]
        return self._logits[name]

    def gradient(self, name: str) -> Tensor:
        """∇ₓ of the cross-entropy at the images as they are, (B, C, H, W)."""
        if name not in self._gradients:
            self._gradients[name] = loss_gradient(self.bench.models[name], self.images, self.labels)
        return self._gradients[name]


def loss_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """∇ₓ of the summed cross-entropy: no image's gradient depends on its batch, none is left in the parameters."""
    with torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        loss = F.cross_entropy(model(pixels).float(), labels, reduction="sum")
        return torch.autograd.grad(loss, pixels)[0]


def is_correct(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """(B,) float: 1 where the label is among the k largest logits."""
    return (logits.topk(k, dim=1).indices == labels[:, None]).any(1).float()


@dataclass(frozen=True)
class Suite:
    """A way to measure models: by per-image scores, by numbers that are no mean over images, or into a table.

    A metric's value is statistic(mean over images of its scores); the statistic is 100 times the mean, a percentage,
    where `statistics` names no other. So every suite gets intervals, paired differences, a cache and resumption alike.
    """

    score: Callable[[Bench, Batch], Iterator[Score]] | None = None
    measure: Callable[[Bench], Iterator[Measurement]] | None = None
    tabulate: Callable[[Bench], Table] | None = None
    sources: Callable[[Bench], Sequence[Source]] | None = None
    """The images. None: the validation images, in a pass that all such suites share."""
    derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """More metrics from the scores of a model over all sources: {metric: array (n, k)} → the further ones."""
    statistics: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    """{metric: (..., k) means → (...)}."""
    uses: tuple[str, ...] = ()
    """The fields of `Options` that change its scores."""


@contextmanager
def ready(models: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Eval mode, on `device`; afterwards every module's training flag and the models' devices are as before."""
    models = list(models)
    training = [(module, module.training) for model in models for module in model.modules()]
    devices = [next(model.parameters(), torch.empty(0)).device for model in models]
    try:
        for model in models:
            model.eval().to(device)
        yield
    finally:
        for model, device in zip(models, devices, strict=True):
            model.to(device)
        for module, flag in training:
            module.training = flag
