"""Networks of the recipes' kinds, a thousand times smaller: `stand_ins:deit` and so on, named as models of a recipe."""

from __future__ import annotations

from functools import partial

import timm
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from recast.models.cmhsa_vit import CMHSAViT
from recast.models.patchconvnet import PatchConvNet

SIZE = 64
_TINY = {"img_size": SIZE, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}


def deit(num_classes: int) -> nn.Module:
    return VisionTransformer(**_TINY, num_classes=num_classes)


def deit_distilled(num_classes: int) -> nn.Module:
    return VisionTransformerDistilled(**_TINY, num_classes=num_classes)


def deit3(num_classes: int) -> nn.Module:
    return VisionTransformer(**_TINY, num_classes=num_classes, no_embed_class=True, init_values=1e-6)


def cait(num_classes: int) -> nn.Module:
    return Cait(**_TINY, num_classes=num_classes)


def resmlp(num_classes: int) -> nn.Module:
    return MlpMixer(
        num_classes=num_classes, img_size=SIZE, num_blocks=2, embed_dim=16, mlp_ratio=4,
        block_layer=partial(ResBlock, init_values=1e-4), norm_layer=Affine,
    )  # fmt: skip


def patchconvnet(num_classes: int) -> nn.Module:
    return PatchConvNet(16, 2, num_classes)


def patchconvnet_multi(num_classes: int) -> nn.Module:
    return PatchConvNet(16, 2, num_classes, per_class=True)


def cmhsa_vit_3(num_classes: int) -> nn.Module:
    return CMHSAViT(16, 16, 2, num_classes)


def cmhsa_vit_5(num_classes: int) -> nn.Module:
    """Two patches a side need all nine heads; width 4² · 1 of pixels."""
    return CMHSAViT(4, 16, 2, num_classes, mixer="pixel", kernel=5)


def resnet(num_classes: int = 4) -> nn.Module:
    """Bottlenecks, the last stage strided."""
    model: nn.Module = timm.create_model("test_resnet", num_classes=num_classes)
    return model


def stand_in(name: str) -> str:
    """The stand-in for a recipe's model."""
    for start, kind in (
        ("deit3", "deit3"), ("cait", "cait"), ("resmlp", "resmlp"), ("patchconvnet", "patchconvnet"),
    ):  # fmt: skip
        if name.startswith(start):
            return f"stand_ins:{kind}{'_multi' if name.endswith('_multi') else ''}"
    if name.startswith("cmhsa_vit"):
        return f"stand_ins:{name[: len('cmhsa_vit_3')]}"
    if name.startswith("deit"):
        return "stand_ins:deit_distilled" if "distilled" in name else "stand_ins:deit"
    return "stand_ins:resnet"
