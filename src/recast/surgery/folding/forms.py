"""Folded forms of one layer: a convolution, or a layer without closed maps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from recast.layers.cmhsa import CMHSA, RecastLayer, recast_layers
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.records import Fold, Step
from recast.surgery.stride import replace_module_


def last_of(layer: nn.Module) -> Any:
    """Return the last layer: the convolution behind its padding layer."""
    return layer[-1] if isinstance(layer, nn.Sequential) else layer


def describe(layer: nn.Module) -> Fold:
    """Return the `Fold` of a layer, for a replay."""
    if isinstance(layer, GPSA):
        return Fold(False, layer.geometry.kernel, layer.gaussian_heads, layer.content_heads, layer.value is not None)
    return Fold(True, tuple(last_of(layer).kernel_size), (), (), False)


def as_it_is(layer: nn.Module, step: Step) -> Step:
    """Return the step with what a replay must know of its `layer` as it is now: folded, pruned or of another size."""
    if isinstance(layer, CMHSA):
        return step if layer.size is None else replace(step, input=(step.input[0], *layer.size))
    if step.fold is None and isinstance(layer, GPSA) and _is_whole(layer):
        return step
    return replace(step, fold=describe(layer))


def _is_whole(layer: GPSA) -> bool:
    """Return True if no map was removed and W_val was not multiplied out."""
    maps = tuple(map(layer.geometry.heads, (layer.config.gaussian_heads, layer.config.content_heads)))
    return maps == (layer.gaussian_heads, layer.content_heads) and (layer.value is not None) == layer._projects_values


def as_folded(layer: GPSA, fold: Fold) -> nn.Module:
    """Return `layer` in the form that `fold` describes, for loading weights."""
    if not fold.convolution:
        layer.prune_(fold.gaussian_heads, fold.content_heads)
        if not fold.value:
            layer.value = None
        return layer
    return layer.to_conv()


# --- blocks that merge their branches into one convolution -----------------------------------------------------------

MERGING = ("fuse", "reparameterize", "switch_to_deploy")
"""What `timm.utils.reparameterize_model` calls on a block (RepVGG, MobileOne, RepViT, FastViT, LeViT)."""


def guard_merging_(model: nn.Module) -> None:
    """Let timm's blocks around recast layers merge only what is a convolution again: they read W_out as a kernel.

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
    for layer in gpsa_layers(block).values():
        replace_module_(block, layer, layer.fold())
    if recast_layers(block):
        return block
    merged: nn.Module | None = getattr(type(block), method)(block)
    return merged
