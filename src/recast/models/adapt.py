"""Weights made to fit the same architecture with other classes or another image size."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt, prod

import torch
from timm.layers import resample_abs_pos_embed
from timm.models import adapt_input_conv
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from torchvision.models.detection import FCOS, RetinaNet
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.ssd import SSD
from torchvision.models.segmentation._utils import _SimpleSegmentationModel
from torchvision.models.segmentation.lraspp import LRASPP

from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool

AUXILIARY = ("AuxLogits", "aux1", "aux2")
"""Classifiers beside the last one: torchvision's Inception v3 and GoogLeNet."""
SEGMENTER = ("classifier", "aux_classifier")
"""Heads of torchvision's segmenters; in them only what gives one number per class has a bias."""
DETECTOR = ("box_predictor.cls_score", "box_predictor.bbox_pred", "mask_fcn_logits", "classification_head.cls_logits")
SSD_HEAD = "classification_head"
"""Layers of torchvision's detectors with numbers for every class; SSD's are a list of convolutions."""


def with_channels(model: nn.Module, weights: Mapping[str, Tensor], in_chans: int) -> Mapping[str, Tensor]:
    """Return the weights with first convolutions of RGB fitted to `in_chans` channels, as timm does."""
    state = model.state_dict()
    rgb = [
        name
        for name, value in weights.items()
        if value.ndim == 4 and name in state and value.shape[1] == 3 and state[name].shape[1] == in_chans
    ]
    return {**weights, **{name: adapt_input_conv(in_chans, weights[name]) for name in rgb}}


def classifiers(model: nn.Module, num_classes: int | None = None) -> tuple[str, ...]:
    """Return the names of the classifiers: timm's `get_classifier()`, else the last nn.Linear.

    `num_classes`: how many numbers such a layer gives, where it is known. A network without any nn.Linear may end in a
    convolution (SqueezeNet). Raises RecastError if one cannot tell.
    """
    names = {id(module): name for name, module in model.named_modules()}
    asked = getattr(model, "get_classifier", None)
    if isinstance(model, GeneralizedRCNN | RetinaNet | FCOS | SSD):
        heads = [name for name in names.values() if name.endswith(DETECTOR) or f"{SSD_HEAD}.module_list." in name]
    elif isinstance(model, _SimpleSegmentationModel | LRASPP):
        parts = [head for name in SEGMENTER if (head := getattr(model, name, None)) is not None]
        layers = [m for head in parts for m in head.modules() if isinstance(m, nn.Conv2d) and m.bias is not None]
        heads = [names[id(layer)] for layer in layers]
    elif callable(asked):
        answer = asked()
        heads = [names.get(id(module), "") for module in (answer if isinstance(answer, tuple) else (answer,))]
    else:
        parts = [model, *(part for name in AUXILIARY if (part := getattr(model, name, None)) is not None)]
        last = [layer for part in parts if (layer := _last_layer(part)) is not None]
        fits = all(num_classes in (None, len(layer.weight)) for layer in last)
        heads = [names[id(layer)] for layer in last] if fits else []
    parameters = [name for name, _ in model.named_parameters()]
    if not heads or not all(name and any(p.startswith(f"{name}.") for p in parameters) for name in heads):
        raise RecastError(
            f"{type(model).__name__} has no known classifier: define timm's get_classifier(), or load weights with the "
            "classes of the data"
        )
    return tuple(heads)


def _last_layer(model: nn.Module) -> nn.Linear | nn.Conv2d | None:
    pools = [module for module in model.modules() if isinstance(module, AttentionPool)]
    inside = {id(module) for pool in pools for module in pool.modules()}
    layers = [module for module in model.modules() if id(module) not in inside]
    for kind in (nn.Linear, nn.Conv2d):
        if candidates := [layer for layer in layers if isinstance(layer, kind)]:
            return candidates[-1]
    return None


def with_own_classifier(model: nn.Module, weights: Mapping[str, Tensor], num_classes: int | None) -> dict[str, Tensor]:
    """Replace the classifier in `weights`, which may be missing, by that of `model`."""
    heads = tuple(f"{name}." for name in classifiers(model, num_classes))
    rest = {name: value for name, value in weights.items() if not name.startswith(heads)}
    return rest | {name: value for name, value in model.state_dict().items() if name.startswith(heads)}


def other_classes(model: nn.Module, weights: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Return (classes of `weights`, classes of `model`) if their classifiers differ, else None."""
    try:
        heads = tuple(f"{name}." for name in classifiers(model))
    except RecastError:  # then the general message about shapes has to do
        return None
    for name, ours in model.state_dict().items():
        theirs = weights.get(name)
        if name.startswith(heads) and theirs is not None and ours.ndim == theirs.ndim > 0:
            if ours.shape[0] != theirs.shape[0] and ours.shape[1:] == theirs.shape[1:]:
                return theirs.shape[0], ours.shape[0]
    return None


def resampled(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Interpolate position tables (1, p + n, D) of another image size in `weights` to the grid of `model`.

    Bicubic without antialiasing, as in DeiT's published code (Touvron et al. 2021); the p leading positions (class and
    distillation token: DeiT 1 or 2; DeiT III and CaiT 0) are kept. Raises RecastError where the table's n positions are
    no square, and for MLP-Mixer and ResMLP, whose token-mixing matrices (n, n) have no other size.
    """
    result, state = dict(weights), model.state_dict()
    differ = [name for name, value in weights.items() if name in state and state[name].shape != value.shape]
    if isinstance(model, MlpMixer) and (mixing := [name for name in differ if "tokens." in name]):
        theirs, ours = weights[mixing[0]].shape[-1], state[mixing[0]].shape[-1]
        raise RecastError(
            f"{mixing[0]} mixes {theirs} tokens, model.input_size makes {ours}: token-mixing matrices "
            "cannot be resampled, drop model.input_size"
        )
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    for name in differ:
        if grid is None or name.rpartition(".")[2] != "pos_embed" or not state[name].ndim == weights[name].ndim == 3:
            continue
        prefix = state[name].shape[1] - prod(grid)
        positions = weights[name].shape[1] - prefix
        side = isqrt(max(0, positions))
        if prefix < 0 or side == 0 or side * side != positions:
            raise RecastError(
                f"{name} of these weights has {weights[name].shape[1]} positions, expected {prefix} of tokens and a "
                f"square number of patches: they are of another architecture than this {type(model).__name__}"
            )
        with torch.no_grad():
            result[name] = resample_abs_pos_embed(
                weights[name], list(grid), [side, side], num_prefix_tokens=prefix, antialias=False
            )
    return result
