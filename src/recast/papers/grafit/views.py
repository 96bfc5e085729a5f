"""Several views of each training image, as Grafit and DINO compare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recast.lab.data.datasets import LabelledImages
from recast.lab.data.seeding import mix_seed
from recast.lab.evaluation.derived_images import DerivedImages

WHOLE_VIEWS = 2
"""Number of views at full size, before the smaller ones."""


@dataclass(eq=False)
class ManyViews(DerivedImages):
    """Images of `base`, each augmented several times: batches are (B, views, C, S, S)."""

    views: int
    local: LabelledImages | None = None
    """The same images, cut smaller: the source of views after the second (DINO's multi-crop)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.augment = self.base.augment

    def load(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return images and labels; every view has its own seeds, the first view those of a single one."""
        images, labels = self.base.load(indices, seeds)
        batches = [images]
        for view in range(1, self.views):
            source = self.base if view < WHOLE_VIEWS or self.local is None else self.local
            batches.append(source.load(indices, [mix_seed("view", view, seed) for seed in seeds or ()])[0])
        return torch.stack(batches, 1), labels
