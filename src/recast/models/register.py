"""Networks of our own under names that `timm.create_model` knows."""

from __future__ import annotations

import sys
import warnings
from copy import deepcopy
from typing import Any

from timm.models import build_model_with_cfg, register_model
from torch import nn

Stats = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, for pixels in [0, 1]."""

IMAGENET: Stats = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10: Stats = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
CIFAR100: Stats = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)


def pretrained_cfg(size: int, num_classes: int, stats: Stats, **other: Any) -> Any:
    """Return timm's config of weights: side of the images in pixels, classes, normalisation."""
    return {
        "input_size": (3, size, size),
        "crop_pct": 1.0 if size == 32 else 0.875,
        "interpolation": "bicubic",
        "mean": stats[0],
        "std": stats[1],
        "num_classes": num_classes,
        "classifier": "head",
    } | other


def register(name: str, model_class: type[nn.Module], doc: str, defaults: dict[str, Any], **options: Any) -> None:
    """Make `timm.create_model(name)` build `model_class(**defaults)`; its `default_cfgs` are those of its module.

    `options` are those of timm's `build_model_with_cfg`.
    """

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        settings = {**deepcopy(options), **deepcopy(defaults)}  # timm changes what it is given
        model: nn.Module = build_model_with_cfg(model_class, name, pretrained, **settings | kwargs)
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = model_class.__module__
    entrypoint.__doc__ = doc
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Overwriting")  # what `recast.models.names` gave timm to stand for it
        setattr(sys.modules[model_class.__module__], name, register_model(entrypoint))
