"""Features of images, computed once, the same for every arm; in half precision in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recast.lab.data import Data, Loader
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.seeding import epoch_order
from recast.lab.trial.split import Split

PART = 32
"""Images of one pass through the trunk."""
HALF = 1e4
"""Features with larger magnitudes are kept in single precision: half precision ends at 65,504."""


@dataclass(frozen=True)
class Bank:
    """Features of images, and their labels.

    views: features (N, …) of each augmented view. labels: (N,). images: positions of the images that count.
    """

    views: tuple[Tensor, ...]
    labels: Tensor
    images: Tensor

    @classmethod
    def of(
        cls, split: Split, data: Data, images: LabelledImages, views: int, device: torch.device,
        advance: Callable[[int], None],
    ) -> Bank:  # fmt: skip
        """Compute the features of images in so many views."""
        features = []
        for view in range(views):
            parts = []
            for pixels, _ in Loader(images, PART, epoch=view):
                parts.append(narrowed(split.features(data.normalised(pixels, device))).cpu())
                advance(len(pixels))
            features.append(torch.cat(parts))
        return cls(tuple(features), images.labels.clone(), torch.arange(len(images)))

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, places: Tensor) -> Bank:
        """Return some of the images."""
        return replace(self, images=self.images[places])

    def training(self, size: int, updates: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (features (B, …), labels (B,)), which follow from seed and number of the update alone."""
        size = min(size, len(self))
        for update in range(updates):
            epoch, at = divmod(update, len(self) // size)
            chosen = self.images[epoch_order(len(self), seed, epoch)[at * size : (at + 1) * size]]
            # an image goes through all of its views before one comes again
            yield self._batch(chosen, (chosen + epoch) % len(self.views), device)

    def spread(self, count: int) -> Bank:
        """Return at most `count` images, evenly spread: files come class by class."""
        return self.subset(torch.arange(0, len(self), math.ceil(len(self) / count)))

    def whole(self) -> Bank:
        """Return all images of the views."""
        return replace(self, images=torch.arange(len(self.labels)))

    def plain(self, size: int, device: torch.device, view: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all images in order, in one view."""
        for chosen in self.images.split(size):
            yield self._batch(chosen, torch.full_like(chosen, view), device)

    def _batch(self, images: Tensor, views: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = [self.views[view][image] for view, image in zip(views.tolist(), images.tolist(), strict=True)]
        return torch.stack(rows).float().to(device), self.labels[images].to(device)


def narrowed(features: Tensor) -> Tensor:
    """Return features in half precision if it can hold them."""
    return features.half() if float(features.abs().max()) < HALF else features
