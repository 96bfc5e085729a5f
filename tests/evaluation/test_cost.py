from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.lab.data import Data
from recast.lab.evaluation.cost import count_macs, peak_memory
from recast.tracing.timing import time_models


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT  # (B, N, C)
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


def test_macs_by_hand() -> None:
    image = torch.rand(1, 6, 8, 8)
    assert count_macs(nn.Conv2d(6, 4, 3, padding=1), image) == 64 * 9 * 6 * 4
    assert count_macs(nn.Conv2d(6, 6, 3, padding=1, groups=6), image) == 64 * 9 * 6
    assert count_macs(nn.Sequential(nn.Flatten(), nn.Linear(384, 10)), image) == 3840
    assert count_macs(Attention(), image) == 2 * 64 * 64 * 6


def test_models_take_turns() -> None:
    log: list[str] = []
    models = {name: nn.Identity() for name in ("a", "b")}
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: log.append(name))
    times = time_models(models, torch.rand(1))
    first, *rounds = [log[at : at + 2] for at in range(0, len(log), 2)]
    assert first == ["a", "b"]
    assert rounds == [["a", "b"], ["b", "a"]] * (len(rounds) // 2) + [["a", "b"]] * (len(rounds) % 2)
    assert 3 <= len(times["a"]) == len(times["b"]) == len(log) // 2 - 1


def test_rows(trained: nn.Module, digits: Data, values: Any) -> None:
    costs = values(trained, "cost", digits, 32)
    assert list(costs) == ["parameters", "macs", "images_per_second", "peak_memory"]
    assert costs["parameters"] == sum(p.numel() for p in trained.parameters())
    assert costs["macs"] == 256 * 27 * 8 + 64 * 72 * 16 + 640
    assert costs["images_per_second"] > 0
    assert costs["peak_memory"] >= 32 * (8 * 256 + 8 * 256) * 4  # a pointwise layer: what comes in and what goes out


def test_peak_memory_by_hand() -> None:
    images = torch.rand(2, 3, 8, 8)
    size = images.numel() * 4
    assert peak_memory(nn.ReLU(), images) == size
    assert peak_memory(nn.ReLU(inplace=True), images.clone()) == 0
    assert peak_memory(nn.Sequential(nn.ReLU(), nn.GELU(), nn.ReLU()), images) == 2 * size  # the first is freed
    assert peak_memory(nn.Sequential(nn.Flatten(), nn.Linear(192, 1000)), images) == 2 * 1000 * 4  # views are free
