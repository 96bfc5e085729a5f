"""The trained CIFAR networks of $RECAST_DATA, with their data and their own normalisation."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from torch import nn

from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig

CIFAR = {
    "cifar10_resnet20_akamaster": ("cifar_resnet20_a", "cifar10"),
    "cifar10_resnet56_akamaster": ("cifar_resnet56_a", "cifar10"),
    "cifar100_resnet20_chenyaofo": ("cifar_resnet20", "cifar100"),
    "cifar100_resnet56_chenyaofo": ("cifar_resnet56", "cifar100"),
}
"""Weights → (network, data set)."""


def trained(weights: str, num_val: int | None = None) -> tuple[nn.Module, Data]:
    """The network in eval mode; `num_val` class-balanced test images, all of them without it."""
    root = os.environ.get("RECAST_DATA")
    if not root:
        raise SystemExit("RECAST_DATA must name the folder that holds cifar10/, cifar100/ and weights/")
    name, dataset = CIFAR[weights]
    data = load_data(DataConfig(dataset, data_dir=f"{root}/{dataset}", num_train=100, num_val=num_val))
    path = Path(root) / "weights" / f"{weights}.safetensors"
    model = build(ModelConfig(name, str(path)), num_classes=len(data.classes)).eval()
    known = input_defaults(model)
    return model, data if known is None else replace(data, mean=tuple(known.mean), std=tuple(known.std))
