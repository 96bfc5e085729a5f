"""First weights of vision transformers, as DeiT's code draws them."""

from __future__ import annotations

from timm.layers import trunc_normal_
from torch import nn


def draw_linear_(layer: nn.Linear | nn.Conv2d, std: float = 0.02) -> nn.Module:
    """Draw weights from a normal distribution cut off at ±2, and set the bias to 0."""
    trunc_normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def draw_(model: nn.Module, std: float) -> nn.Module:
    """Draw first weights as DeiT, DeiT III and ResMLP do (Touvron et al. 2021), in place.

    Class and distillation tokens are drawn as linear layers are (`draw_linear_`), convolutions as torch does. timm
    draws a ViT's class token with 1e-6, and a mixer's layers by Xavier's rule, the head at 0.
    """
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("cls_token", "dist_token"):
            trunc_normal_(parameter, std=std)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            draw_linear_(module, std)
        elif isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return model
