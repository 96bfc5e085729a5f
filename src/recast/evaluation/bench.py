"""Models and images, ready to be measured: every suite takes a `Bench` and yields measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from recast.data import Data, loader
from recast.errors import RecastError


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


class Measurement(NamedTuple):
    """A number about one model; `n` images are behind it."""

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
    eps: tuple[float, ...]
    """Budgets of the attacks in 1/255."""
    advance: Callable[[int], None] = lambda images: None
    """Called with the images that one model was done with, for a progress bar."""

    def batches(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index of the first image, pixels (B, C, H, W), labels (B,)) over the validation images, in order."""
        first = 0
        for images, labels in loader(self.data.val, self.batch_size):
            yield first, images.to(self.device), labels.to(self.device)
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
        if logits.isnan().any():
            raise RecastError(f"model {name!r} gives NaN on images of {self.data.name}: its accuracy means nothing")
        return logits.float()


def count_correct(logits: Tensor, labels: Tensor, k: int = 1) -> int:
    """Images whose label is among the k largest logits."""
    return int((logits.topk(k, dim=1).indices == labels[:, None]).sum())


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
