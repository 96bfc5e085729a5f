"""Architectures of timm and torchvision with random weights and a small input."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from timm.models import model_entrypoint
from torch import Tensor, nn
from torchvision import models as torchvision_models

from recast.errors import RecastError, suggest
from recast.models.sources import create
from recast.surgery.rules import is_convolution
from recast.surgery.scales import batch_norms, randomize_scales_
from recast.surgery.select import is_spatial

SIZES = ((96, 128), (128, 160), (160, 192), (224, 224))
BATCH = 2
SEED = 0


class Instance(NamedTuple):
    """A network in eval mode, a batch for it, and the size of an image in pixels (rows, columns)."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    size: tuple[int, int]


def architectures(patterns: list[str]) -> list[str]:
    """Return the names that match any of the globs. Raises RecastError for a glob without match."""
    ours = [name for name in timm.list_models() if not model_entrypoint(name).__module__.startswith("timm.")]
    names = [f"timm:{name}" for name in timm.list_models(exclude_filters=ours)]
    names += [f"torchvision:{name}" for name in torchvision_models.list_models()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecastError(
                f"no architecture matches {pattern!r}: expected globs such as 'timm:resnet*' or 'torchvision:*'."
                + suggest(pattern, names)
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def on_meta_device(name: str) -> nn.Module:
    """Return the network on the meta device, without values."""
    with torch.device("meta"):
        return _create(name, {})


def skeleton(name: str) -> nn.Module:
    """Return the network on the meta device, or on the CPU if its constructor reads a tensor (RegNet)."""
    try:
        return on_meta_device(name)
    except NotImplementedError:
        return _create(name, {})


def spatial_convolutions(model: nn.Module) -> list[nn.Module]:
    """Return the convolutions larger than 1×1 that are no patch embedding (kernel = stride, no padding)."""

    def embeds_patches(module: Any) -> bool:
        unpadded = getattr(module, "padding", 0) in (0, (0,), (0, 0), (0, 0, 0))
        return unpadded and getattr(module, "kernel_size", None) == getattr(module, "stride", ())

    return [m for m in model.modules() if is_convolution(m) and is_spatial(m) and not embeds_patches(m)]


def instantiate(name: str, dtype: torch.dtype = torch.float32) -> Instance:
    """Return a network with random weights and scales at the smallest input that runs. Raises RecastError without one.

    The same name gives the same weights and the same images, in any dtype.
    """
    reason = ""
    model, model_kwargs = None, None
    for kwargs, size in _candidates(name):
        try:
            if model is None or model_kwargs != kwargs:
                model, model_kwargs = None, kwargs
                torch.manual_seed(SEED)
                model = _create(name, kwargs).eval()
            channels = int(getattr(model, "pretrained_cfg", {}).get("input_size", (3,))[0])
            generator = torch.Generator().manual_seed(SEED)
            images = 2 if ":raft" in name else 1
            inputs = tuple(torch.randn(BATCH, channels, *size, generator=generator) for _ in range(images))
            if not batch_norms(model):  # `randomize_scales_` does not run such a network
                with torch.no_grad():
                    model(*inputs)
            torch.manual_seed(SEED + 1)
            randomize_scales_(model, inputs)
            # in float32 until here: every dtype has the same weights and images
            return Instance(model.to(dtype), tuple(image.to(dtype) for image in inputs), size)
        except Exception as error:  # any error of a network at a size that it does not support
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    raise RecastError(f"{name} runs at none of the sizes; the last error: {reason}")


def _create(name: str, kwargs: dict[str, Any]) -> nn.Module:
    source, _, bare = name.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source == "torchvision" and ("inception" in bare or "googlenet" in bare):  # scipy would draw every weight
            model = torchvision_models.get_model(bare, weights=None, init_weights=False)
        else:
            model = create(source, bare, kwargs, pretrained=False)
    return DetectionParts(model) if "detection" in type(model).__module__ else model


def _candidates(name: str) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """Yield constructor arguments and sizes to try, the cheapest first."""
    source, _, bare = name.partition(":")
    if source == "torchvision":
        yield from (({}, size) for size in (*SIZES, (299, 299)))
        return
    config = timm.get_pretrained_cfg(bare)
    native = tuple(config.input_size[1:]) if config else (224, 224)
    if not (config and config.fixed_input_size):
        yield from (({}, size) for size in SIZES)
    elif native[0] > 256:
        yield from (({"img_size": side}, (side, side)) for side in (224, 256))
    yield {}, (int(native[0]), int(native[-1]))


class DetectionParts(nn.Module):
    """The convolutional parts of a torchvision detector: backbone, heads on its maps, heads on one region."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> list[Any]:
        """Return [maps of the backbone, outputs of the heads …] for images (B, 3, H, W)."""
        parts: Any = self.detector
        features = parts.backbone(x)
        maps = list(features.values()) if isinstance(features, dict) else [features]
        outputs: list[Any] = [maps]
        if hasattr(parts, "rpn"):
            outputs.append(parts.rpn.head(maps))
        if hasattr(parts, "head"):
            outputs.append(parts.head(maps))
        of_regions = getattr(parts, "roi_heads", None)
        for part, side in (("box", 7), ("mask", 14), ("keypoint", 14)):
            head = getattr(of_regions, f"{part}_head", None)
            if head is not None:
                region = head(F.adaptive_avg_pool2d(maps[0], side))
                outputs.append(region if part == "box" else getattr(of_regions, f"{part}_predictor")(region))
        return outputs
