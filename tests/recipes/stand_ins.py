"""Networks of the recipes' kinds, a thousand times smaller: `stand_ins:deit` and so on, named as models of a recipe."""

from functools import partial

import timm
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.vision_transformer import VisionTransformer

from recast.papers.patchconvnet.network import PatchConvNet
from recast.papers.prs.network import CMHSAViT

SIZE = 64
_TINY = {"img_size": SIZE, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2}

deit = partial(VisionTransformer, **_TINY)
deit_distilled = partial(VisionTransformerDistilled, **_TINY)
deit3 = partial(VisionTransformer, **_TINY, no_embed_class=True, init_values=1e-6)
cait = partial(Cait, **_TINY)
resmlp = partial(
    MlpMixer,
    img_size=SIZE,
    num_blocks=2,
    embed_dim=16,
    mlp_ratio=4,
    block_layer=partial(ResBlock, init_values=1e-4),
    norm_layer=Affine,
)
patchconvnet = partial(PatchConvNet, 16, 2)
patchconvnet_multi = partial(PatchConvNet, 16, 2, per_class=True)
cmhsa_vit_3 = partial(CMHSAViT, 16, 16, 2)
cmhsa_vit_5 = partial(CMHSAViT, 4, 16, 2, mixer="pixel", kernel=5)
"""Two patches a side need all nine heads; width 4² · 1 of pixels."""
resnet = partial(timm.create_model, "test_resnet", num_classes=4)
"""Bottlenecks, the last stage strided."""


def stand_in(name: str) -> str:
    kinds = ("deit3", "deit", "cait", "resmlp", "patchconvnet", "cmhsa_vit_3", "cmhsa_vit_5")
    kind = next((kind for kind in kinds if name.startswith(kind)), "resnet")
    special = {"deit": "distilled", "patchconvnet": "multi"}.get(kind)
    return f"stand_ins:{kind}_{special}" if special and special in name else f"stand_ins:{kind}"
