"""A network, data and a recipe so small that an epoch takes milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recast.config import DataConfig, ModelConfig, OptimConfig, RecastConfig, Recipe
from recast.data import Data
from recast.data.datasets import ImageTensors
from recast.planning import plan
from recast.surgery import recast_

CLASSES = 3


def _images(count: int, seed: int) -> ImageTensors:
    """Noise, brighter in the channel that is the label: easy to learn, not learnt at the start."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    pixels = torch.randint(0, 120, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), labels] += 60
    return ImageTensors(pixels, labels)


@pytest.fixture
def data() -> Data:
    train, val = _images(40, seed=1).augmented("crop"), _images(18, seed=2)
    return Data("noise", train, val, ["red", "green", "blue"], (0.3,) * 3, (0.2,) * 3, 8, "crop")


@pytest.fixture
def parent() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES),
    )  # fmt: skip


@pytest.fixture
def make_child(parent: nn.Module) -> Callable[..., nn.Module]:
    def make(**config: Any) -> nn.Module:
        torch.manual_seed(1)
        return recast_(parent, plan(parent, torch.zeros(1, 3, 8, 8), RecastConfig(**config), where=["4"]))

    return make


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    """A recipe of 3 epochs of 5 batches; `optim` and other fields as keywords."""

    def make(optim: dict[str, Any] | None = None, **fields: Any) -> Recipe:
        return Recipe(
            **{
                "model": ModelConfig("tests:tiny"),
                "data": DataConfig("digits", batch_size=8),
                "optim": OptimConfig(**{"lr": 1e-2, **(optim or {})}),
                "epochs": 3,
                "device": "cpu",
                **fields,
            }
        )

    return make
