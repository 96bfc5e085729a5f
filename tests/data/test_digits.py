"""The embedded tasks: what a canvas shows, and that held-out digits are never trained on."""

import pytest
import torch
from torch import Tensor

from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data

pytest.importorskip("sklearn")


def canvases(data: Data, part: str, count: int) -> Tensor:
    """The first canvases in grey levels 0 to 255, (N, 32, 32)."""
    images = data.val if part == "val" else data.train.plain()
    return torch.stack([torch.as_tensor(images[i][0])[0] for i in range(count)]) * 255


def shown(canvas: Tensor, digits: Tensor) -> list[int]:
    """Indices of the 8×8 digits (n, 8, 8) that stand somewhere on a canvas, to the grey level."""
    squares = canvas.unfold(0, 8, 1).unfold(1, 8, 1).reshape(-1, 64)
    norms = (squares**2).sum(1, keepdim=True) - 2 * squares @ digits.flatten(1).T + (digits.flatten(1) ** 2).sum(1)
    return (norms.amin(0) < 1).nonzero().flatten().tolist()


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """All digits as a canvas shows them, and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (torch.tensor(found.images, dtype=torch.float32) / 16 * 255).round(), torch.tensor(found.target)


def test_an_odd_digit_is_the_class_that_stands_there_once(digits: tuple[Tensor, Tensor]) -> None:
    data = load_data(DataConfig("odd_digit"))
    assert (len(data.train), len(data.val), data.img_size, len(data.classes)) == (5000, 1000, 32, 10)
    assert torch.bincount(data.val.labels).tolist() == [100] * 10
    seen: dict[str, set[int]] = {"train": set(), "val": set()}
    for part, labels in (("train", data.train.plain().labels), ("val", data.val.labels)):
        for canvas, label in zip(canvases(data, part, 40), labels, strict=False):
            drawn = shown(canvas, digits[0])
            classes = digits[1][drawn].tolist()
            assert len(drawn) == 3 or len(set(drawn)) == 2  # the same drawing twice is found once
            assert classes.count(int(label)) == 1
            assert len(set(classes)) == 2
            seen[part] |= set(drawn)
    assert not seen["train"] & seen["val"], "held-out digits are never trained on"
