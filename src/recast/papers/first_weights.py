"""First weights as DeiT's code draws them."""

from __future__ import annotations

from timm.layers import trunc_normal_
from torch import nn


def draw_(model: nn.Module, std: float) -> nn.Module:
    """Draw first weights as DeiT, DeiT III and ResMLP do (Touvron et al. 2021), in place.

    Linear layers, class and distillation tokens come from a normal distribution cut off at ±2, with bias 0;
    convolutions are drawn as torch does. timm draws a ViT's class token with 1e-6, and a mixer's layers by Xavier's
    rule, the head at 0.
    """
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ("cls_token", "dist_token"):
            trunc_normal_(parameter, std=std)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return model
