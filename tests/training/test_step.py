"""What a recipe can ask of an update, each through the whole loop."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from small import small_fit, small_parent
from torch import nn

from recast.lab.config import RegularizationConfig

FROZEN = RegularizationConfig(freeze="batch_norm")


def test_accumulated_parts_give_the_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    parent = small_parent()
    parent[3] = nn.Identity()  # type: ignore[operator]  # no dropout: it is drawn anew for every part
    models = [copy.deepcopy(parent) for _ in range(3)]
    sgd = {"opt": "sgd", "lr": 0.1, "weight_decay": 0.0}
    for parts, model in zip((1, 2, 4), models, strict=True):
        small_fit(tmp_path / str(parts), model, optim=sgd, regularization=FROZEN, accumulate=parts)
    for name, value in models[0].state_dict().items():
        for model in models[1:]:
            assert torch.allclose(value.double(), model.state_dict()[name].double(), rtol=1e-5, atol=1e-6), name
