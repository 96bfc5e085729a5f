"""Input of a suite: models as functions of pixels, images batch by batch, and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from recast.lab.data.images import in_unit
from recast.lab.data.seeding import choose_stratified, random_states, seeded_on
from recast.lab.evaluation.suites import SUITES
from recast.tracing.outputs import answer_of

Images = TypeVar("Images", bound=LabelledImages)


class PixelModel(nn.Module):
    """Module x ↦ model((x - mean) / std) of pixels x (B, C, H, W) in [0, 1], for attacks and corruptions.

    Normalisation is computed in the dtype of the pixels and cast to that of the model's parameters. If an output holds
    logits (`answer_of`), these are returned.

    Example:
        >>> model = recast.lab.evaluation.PixelModel(nn.Identity(), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> model(torch.ones(1, 3, 1, 1)).flatten().tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, model: nn.Module, mean: Iterable[float], std: Iterable[float]) -> None:
        super().__init__()
        self.model, self.mean, self.std = model, tuple(mean), tuple(std)

    def forward(self, pixels: Tensor) -> Any:
        normalised = normalize(pixels, self.mean, self.std)
        parameter = next(self.model.parameters(), normalised)
        return answer_of(self.model(normalised.to(parameter.dtype)))


class NotMeasured(RecastError):
    """Raised if a suite cannot be measured, for lack of its data set or package, or for other classes.

    Other suites are still measured. The message says how to get the data, or what to do.
    """


def sampled(images: Images, most: int | None) -> Images:
    """Return `most` images with the class shares of all, or all if there are fewer."""
    if most is None or most >= len(images):
        return images
    return images.subset(choose_stratified(images.labels, most, "num_images"))


@dataclass(frozen=True)
class Source:
    """Images that a suite measures."""

    images: LabelledImages
    part: str = ""
    """Part of the suite, such as gaussian_noise/1 or 160x160; empty if there is only one."""
    columns: Tensor | None = None
    """Classes of a set that has only some of them: labels are positions in `columns`."""
    answers: Tensor | None = None
    """(N, A) int64: all right labels of each image, padded with -1; None: the label of the data set."""
    depends: tuple[LabelledImages, ...] = ()
    """Other images that the scores depend on."""


class Score(NamedTuple):
    """One or k numbers for each image of a batch, whose mean gives a metric."""

    model: str
    metric: str
    values: Tensor
    """(B,) or (B, k)."""


@dataclass(frozen=True)
class Context:
    """Models and data of an evaluation. All models see the same pixels, batch by batch."""

    models: dict[str, PixelModel]
    data: Data
    batch_size: int
    device: torch.device
    options: Options = Options()
    workers: int = 0
    with_new_classifier: frozenset[str] = frozenset()
    """Models with a new, untrained classifier, whose predictions are meaningless."""
    store: dict[Any, Any] = field(default_factory=dict)
    """Results that a suite stores between batches, such as features of the training images."""
    process: int = 0
    """Number of this process among the `processes` that take turns at the batches."""
    processes: int = 1

    @property
    def validation(self) -> Source:
        """Return the validation images of the data."""
        return Source(self.data.val)

    def dataset(self, suite: str) -> str:
        """Return the name of the data set that a suite measures."""
        return suite if SUITES[suite].needs else self.data.name

    def batches(self, source: Source | None = None, start: int = 0, every: int = 1) -> Iterator[Batch]:
        """Yield every N-th batch of a source (None: the validation images), from batch number `start` on."""
        source = source or self.validation
        loader = Loader(source.images, self.batch_size, start=start, every=every, workers=self.workers)
        for number, (images, labels) in zip(loader.numbers, loader, strict=True):
            first = number * self.batch_size
            yield Batch(self, source, first, in_unit(images.to(self.device)), labels.to(self.device))

    def logits(self, name: str, images: Tensor) -> Tensor:
        """Return outputs (B, classes) without gradient. Raises RecastError for other shapes and numbers not finite."""
        with torch.no_grad():
            return self.checked(name, images, self.models[name](images))

    def checked(self, name: str, images: Tensor, logits: Any) -> Tensor:
        """Return a model's outputs for images as float32. Raises as `logits` does."""
        self.data.check_logits(logits, len(images), f"model {name!r}", "measure images of its classes")
        if not logits.isfinite().all():
            raise RecastError(
                f"model {name!r} outputs NaN or infinite logits for images of {self.data.name}: its accuracy is "
                "meaningless"
            )
        return logits.float()


@dataclass(eq=False)
class Batch:
    """Images of a source and the models to score on them. Suites share the logits and gradients of each model.

    If an attack needs the gradient, logits come from its pass instead of one of their own. Before, both passes are
    compared on an eighth of the first batch of each shape (`same_with_gradient`).
    """

    context: Context
    source: Source
    first: int
    """The index of the first image."""
    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        self.models, self.options = self.context.models, self.context.options
        self.attacked: frozenset[str] = frozenset()
        """Models whose gradient a suite needs on this batch."""
        self._logits: dict[str, Tensor] = {}
        self._gradients: dict[str, tuple[Tensor, Tensor]] = {}
        """With the logits of the same pass."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def number(self) -> int:
        """Return the number of the batch in its source."""
        return self.first // self.context.batch_size

    def logits(self, name: str, images: Tensor | None = None) -> Tensor:
        """Return logits (B, classes of the source) of the batch, or of these images in its place."""
        if images is not None and images is not self.images:
            return self._of_source(self.context.logits(name, images))
        if name not in self._logits and name in self.attacked and self.same_with_gradient(name):
            self.gradient(name)
            self._logits[name] = self.context.checked(name, self.images, self._gradients[name][1])
        if name not in self._logits:
            self._logits[name] = self.context.logits(name, self.images)
        return self._of_source(self._logits[name])

    def same_with_gradient(self, name: str) -> bool:
        """Return True if a model's logits are bitwise the same in a pass that needs a gradient, and it draws no number.

        A network may take other ways with gradients: skip closed maps, say, or torch's fused encoder layers.
        """
        key = "same with gradient", name, self.images.shape
        if key not in self.context.store:
            part, device = self.images[: max(2, len(self) // 8)], self.images.device
            with seeded_on(device, 0):
                before = random_states(device)
                logits = self.context.logits(name, part)
                _, of_gradient = _with_graph(self.models[name], part)
                is_same = torch.equal(logits, of_gradient.detach())
                self.context.store[key] = is_same and random_states(device) == before
        return bool(self.context.store[key])

    def _of_source(self, logits: Tensor) -> Tensor:
        return logits if self.source.columns is None else logits[:, self.source.columns]

    def is_correct(self, name: str, images: Tensor | None = None, k: int = 1) -> Tensor:
        """Return (B,) float: 1 if the label, or an answer of the source, is among the k largest logits."""
        answers = self.source.answers
        of_batch = slice(self.first, self.first + len(self))
        labels = self.labels if answers is None else answers[of_batch].to(self.labels.device)
        return is_correct(self.logits(name, images), labels, k)

    def top1(self, metric: str, images: Tensor | None = None) -> Iterator[Score]:
        """Score 1 for every image of the batch (or of these in its place) that a model classifies correctly."""
        for name in self.models:
            yield Score(name, metric, self.is_correct(name, images))

    def gradient(self, name: str) -> Tensor:
        """Return ∇ₓ of the cross-entropy at the images, (B, C, H, W)."""
        if name not in self._gradients:
            self._gradients[name] = _gradient(self.models[name], self.images, self.labels)
        return self._gradients[name][0]


def loss_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return ∇ₓ of the summed cross-entropy, independent of the batch; parameters get no gradient."""
    return _gradient(model, images, labels)[0]


def _gradient(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return `loss_gradient`, and the logits of its forward pass."""
    with torch.enable_grad():
        pixels, logits = _with_graph(model, images)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return torch.autograd.grad(loss, pixels)[0], logits.detach()


def _with_graph(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return pixels that require a gradient, and a model's logits of them."""
    with torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        return pixels, model(pixels).float()


def is_correct(logits: Tensor, answers: Tensor, k: int = 1) -> Tensor:
    """Return (B,) float: 1 if the label (B,), or one of several (B, A), is among the k largest logits."""
    best = logits.topk(k, dim=1).indices
    return (best[:, :, None] == answers.reshape(len(best), 1, -1)).flatten(1).any(1).float()
