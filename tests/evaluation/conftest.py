"""A tiny network with a loss surface worth attacking, and a small data set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from recast.data import Data, load_data
from recast.run.config import DataConfig


@pytest.fixture(scope="session")
def digits() -> Data:
    return load_data(DataConfig(num_train=200, num_val=50, img_size=16))


@pytest.fixture
def gray(digits: Data) -> Data:
    """Three images that are all grey: what a model says about them is known."""
    val = digits.val.subset(torch.arange(3))
    return replace(digits, val=replace(val, pixels=torch.full_like(val.pixels, 51)))  # type: ignore[type-var]


def make_net(seed: int = 0, classes: int = 10) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Dropout(0.5),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


@pytest.fixture(scope="session")
def trained(digits: Data) -> nn.Module:
    """Trained for a second: attacks have something to break."""
    net = make_net()
    images, labels = digits.train.batch(range(len(digits.train)))
    mean, std = torch.tensor(digits.mean)[:, None, None], torch.tensor(digits.std)[:, None, None]
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net((images - mean) / std), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net.eval()
