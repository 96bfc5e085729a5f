"""A network, data and a recipe so small that an epoch takes milliseconds: for fixtures and for scripts of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from recast import Plan, RecastConfig, plan, recast_
from recast.lab.config import Augmentation, DataConfig, OptimConfig, Recipe
from recast.lab.data import Data
from recast.lab.data.datasets import ImageTensors
from recast.lab.training.loop import fit
from recast.models.config import ModelConfig

CLASSES = 3


def small_images(count: int, seed: int) -> ImageTensors:
    """Noise, brighter in the channel that is the label: easy to learn, not learnt at the start."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    pixels = torch.randint(0, 120, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), labels] += 60
    return ImageTensors(pixels, labels)


def small_data(num_val: int = 18) -> Data:
    crop = Augmentation(crop="pad", flip=False)
    train, val = small_images(40, seed=1).augmented(crop), small_images(num_val, seed=2)
    return Data("noise", train, val, ["red", "green", "blue"], (0.3,) * 3, (0.2,) * 3, 8)


def small_parent() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(6, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


def small_plan(parent: nn.Module, *where: str, **config: Any) -> Plan:
    return plan(parent, torch.zeros(1, 3, 8, 8), RecastConfig(**config), where=list(where))


def small_child(parent: nn.Module | None = None, **config: Any) -> nn.Module:
    """The second convolution is recast, in place."""
    parent = small_parent() if parent is None else parent
    torch.manual_seed(1)
    return recast_(parent, small_plan(parent, "4", **config))


def small_recipe(optim: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    """3 epochs of 5 batches of 8; `optim` and other fields as keywords."""
    return Recipe(
        **{
            "model": ModelConfig("tests:tiny"),
            "data": DataConfig("digits", batch_size=8),
            "optim": OptimConfig(**{"lr": 1e-2, "gate_lr": 0.1, **(optim or {})}),
            "epochs": 3,
            "device": "cpu",
            **fields,
        }
    )


def small_fit(
    folder: Path,
    model: nn.Module | None = None,
    recipe: Recipe | None = None,
    *,
    data: Data | None = None,
    plan: Plan | None = None,
    resume: bool = False,
    losses: list[float] | None = None,
    **fields: Any,
) -> list[dict[str, Any]]:
    """`fit` in silence, by default of the small child; the loss of every update is added to `losses`."""
    losses = [] if losses is None else losses
    return fit(
        model or small_child(),
        data or small_data(),
        recipe or small_recipe(**fields),
        folder,
        progress=False,
        plan=plan,
        resume=resume,
        on_step=lambda _epoch, _step, loss: losses.append(loss),
    )


def without_clocks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what a repeated training measures anew."""
    clocks = ("seconds", "images_per_second", "data_wait")
    return [{key: value for key, value in row.items() if key not in clocks} for row in rows]


Weights = nn.Module | Path | Mapping[str, torch.Tensor]
"""A network, a .safetensors file, a folder with weights.safetensors, or tensors by name."""


def _tensors(weights: Weights) -> Mapping[str, torch.Tensor]:
    if isinstance(weights, Path):
        return load_file(weights / "weights.safetensors" if weights.is_dir() else weights)
    return weights.state_dict() if isinstance(weights, nn.Module) else weights


def changed_names(before: Weights, after: Weights) -> set[str]:
    first, second = _tensors(before), _tensors(after)
    return {name for name in first if not torch.equal(first[name], second[name])}


def assert_same(first: Weights, second: Weights) -> None:
    """Bit for bit the same tensors."""
    assert _tensors(first).keys() == _tensors(second).keys()
    assert not changed_names(first, second)


def digits_recipe(**fields: Any) -> Recipe:
    """digits_resnet at 8×8 on 60 digits, 2 epochs of 3 batches."""
    return Recipe(
        **{
            "model": ModelConfig("digits_resnet"),
            "data": DataConfig("digits", img_size=8, batch_size=20, num_train=60, num_val=30),
            "optim": OptimConfig(lr=1e-3),
            "epochs": 2,
            "device": "cpu",
            **fields,
        }
    )
