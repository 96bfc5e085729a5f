"""Deletion and insertion, with which `benchmarks/faithfulness.py` judges maps."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn

PATH = Path(__file__).parents[2] / "benchmarks" / "deletion.py"
SPEC = importlib.util.spec_from_file_location("deletion", PATH)
assert SPEC is not None
assert SPEC.loader is not None
deletion = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(deletion)


class Summed(nn.Module):
    """Logits (Σ x, 0): what every pixel adds is known."""

    def forward(self, x: Tensor) -> Tensor:
        score = x.sum((1, 2, 3))
        return torch.stack([score, torch.zeros_like(score)], dim=1)


def test_a_linear_model_by_hand() -> None:
    """Contributions 1 to 4: what is left after each removal is known."""
    images = torch.tensor([[[[1.0, 2], [3, 4]]]])
    order = deletion.order_of(images[:, 0], images)
    assert order.tolist() == [[[3, 2], [1, 0]]]
    shares, found = deletion.curve(
        Summed(), images, torch.zeros_like(images), order, torch.zeros(1).long(), steps=4, batch_size=2
    )
    assert shares.tolist() == [0, 0.25, 0.5, 0.75, 1]
    p = torch.tensor([10.0, 6, 3, 1, 0]).sigmoid()
    torch.testing.assert_close(found[0], p)
    torch.testing.assert_close(deletion.area(shares, found)[0], (p[0] / 2 + p[1] + p[2] + p[3] + p[4] / 2) / 4)
