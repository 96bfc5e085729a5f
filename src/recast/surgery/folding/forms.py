"""Folded forms of one layer: a convolution, or a layer without closed maps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.utils import _pair

from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, GatedLayer, RecastLayer, gated_layers, recast_layers
from recast.layers.gpsa import GPSA
from recast.surgery.records import Fold, Step
from recast.surgery.stride import replace_module_


def last_of(layer: nn.Module) -> Any:
    """Return the last layer: the convolution behind its padding layer."""
    return layer[-1] if isinstance(layer, nn.Sequential) else layer


def describe(layer: nn.Module) -> Fold:
    """Return the `Fold` of a layer, for a replay."""
    if isinstance(layer, GatedLayer):
        has_value = isinstance(layer, GPSA) and layer.value is not None
        return Fold(False, _pair(layer.kernel_size), layer.gaussian_heads, layer.content_heads, has_value)
    return Fold(True, _pair(last_of(layer).kernel_size), (), (), False)


def as_it_is(layer: nn.Module, step: Step) -> Step:
    """Return the step with what a replay must know of its `layer` as it is now: folded, pruned or of another size."""
    if isinstance(layer, CMHSA):
        return step if layer.size is None else replace(step, input=(step.input[0], *layer.size))
    if step.fold is None and isinstance(layer, GatedLayer) and _is_whole(layer):
        return step
    return replace(step, fold=describe(layer))


def _is_whole(layer: GatedLayer) -> bool:
    """Return True if no map was removed and W_val was not multiplied out."""
    if isinstance(layer, AttentionBeside):
        return bool(layer.content_heads)
    maps = tuple(map(layer.geometry.heads, (layer.config.gaussian_heads, layer.config.content_heads)))
    return maps == (layer.gaussian_heads, layer.content_heads) and (layer.value is not None) == layer._projects_values


def as_folded(layer: GatedLayer, fold: Fold) -> nn.Module:
    """Return `layer` in the form that `fold` describes, for loading weights."""
    if fold.convolution:
        return layer.conv if isinstance(layer, AttentionBeside) else layer.to_conv()
    layer.prune_(fold.gaussian_heads, fold.content_heads)
    if isinstance(layer, GPSA) and not fold.value:
        layer.value = None
    return layer


# --- blocks that merge their branches into one convolution -----------------------------------------------------------

MERGING = ("fuse", "reparameterize", "switch_to_deploy")
"""What `timm.utils.reparameterize_model` calls on a block (RepVGG, MobileOne, RepViT, FastViT, LeViT)."""


def guard_merging_(model: nn.Module) -> None:
    """Let timm's blocks around recast layers merge only what is a convolution again: they read `weight` as a kernel.

    The methods are replaced on the instance, by functions that pickle and `copy.deepcopy` take along with it. A whole
    network's own method (RepViT's) still calls those of its blocks.
    """
    for name, block in model.named_modules():
        if type(block).__module__.partition(".")[0] != "timm" or (not name and hasattr(block, "get_classifier")):
            continue
        if any(isinstance(module, RecastLayer) for module in block.modules()):
            for method in MERGING:
                if callable(getattr(type(block), method, None)):
                    setattr(block, method, partial(_merge, block, method))


def _merge(block: nn.Module, method: str) -> nn.Module | None:
    """Merge a block as timm does, after folding its closed layers; return it as it is if attention remains in it."""
    for layer in gated_layers(block).values():
        replace_module_(block, layer, layer.fold())
    if recast_layers(block):
        return block
    merged: nn.Module | None = getattr(type(block), method)(block)
    return merged
