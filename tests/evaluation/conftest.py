import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recast.lab.config import DataConfig
from recast.lab.config.evaluation import Options
from recast.lab.data import Data, load_data
from recast.lab.evaluation import evaluate
from recast.lab.evaluation.context import PixelModel
from recast.lab.evaluation.runner import open_context, score_suites


@pytest.fixture(scope="session")
def digits() -> Data:
    return load_data(DataConfig(num_train=200, num_val=50, img_size=16))


@pytest.fixture(scope="session")
def trained(digits: Data) -> nn.Module:
    """Trained for a second: attacks have something to break."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Dropout(0.5),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    images, labels = digits.train.batch(range(len(digits.train)))
    model = PixelModel(net, digits.mean, digits.std)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net.eval()


@pytest.fixture
def values() -> Any:
    """{metric: value} of a model in suites."""

    def run(model: nn.Module, suites: str | list[str], data: Data, size: int = 20, **options: Any) -> dict[str, float]:
        rows = evaluate({"m": model}, suites, data, batch_size=size, options=Options(**options), progress=False)
        return {row.metric if isinstance(suites, str) else f"{row.suite} {row.metric}": row.value for row in rows}

    return run


class Spy(nn.Module):
    """A linear classifier that remembers what it saw, and may be stopped after some images."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, 10))
        self.record = threading.local()  # of the standard library: no setting, which would make it another model
        self.record.pixels, self.record.limit = [], [10**9]
        self.scale = 1.0

    @property
    def pixels(self) -> list[Tensor]:
        return self.record.pixels

    @property
    def limit(self) -> list[int]:
        return self.record.limit

    @property
    def batches(self) -> list[int]:
        return [len(images) for images in self.pixels]

    @property
    def seen(self) -> int:
        return sum(self.batches)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.layers.training
        if self.seen + len(x) > self.limit[0]:
            raise KeyboardInterrupt
        self.pixels.append(x.detach().clone())
        return self.layers(x) * self.scale


@pytest.fixture
def spy() -> type[Spy]:
    return Spy


@pytest.fixture
def score() -> Any:
    """The scores of a model in a suite, {metric: (n, k)}; raises NotMeasured where its data set is missing."""

    def run(suite: str, model: nn.Module, data: Data, batch_size: int = 20, **options: Any) -> dict[str, np.ndarray]:
        context = open_context({"m": model}, data, batch_size, options=Options(**options))
        scores, missing = score_suites(context, [suite])
        if missing:
            raise missing[0]
        return {metric: array for (_, metric), array in scores[suite].items()}

    return run
