"""The vision transformer of C-MHSA and PRS with convolutions, which recast turns into attention.

    z_0  = PE(X)                       patches of P×P pixels, a linear map of each
    z'_l = mixer(LN(z_{l−1})) + z_{l−1}        a K×K convolution; after the recast MHSA with a relative bias
    z_l  = MLP(LN(z'_l)) + z'_l
    y    = Linear(GAP(LN(z_L)))

(Lee et al. 2022, Towards Flexible Inductive Bias via Progressive Reparameterization Scheduling, arXiv:2210.01370,
Eq. 6-9, after Li et al. 2021, Can Vision Transformers Perform Convolution?, arXiv:2111.01353.) There is no class token
and no table of positions: the mixers know where they are from the padding and, as attention, from their biases.

Everything is NCHW, so that a mixer is a plain convolution: images need not be square, and any size will do until a
layer is recast. `mixer`: "token", a K×K convolution of tokens (PRS Eq. 5: W^O = W^C), or "pixel", a K×K convolution of
the patches' pixels (`PixelConv2d`), which explains the nine heads of CMHSA-5. For K = 3 both have nine.

Not in the papers as far as they could be read, and chosen here: LN before the pooling (Eq. 9 has none, but the blocks'
output is not normalised otherwise, and every published pre-norm ViT has it; `final_norm=False` leaves it out), an MLP
four times as wide, GELU, dropout nowhere, and the widths of the networks for 32×32 images.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from timm.layers import DropPath, LayerNorm2d, Mlp
from timm.models import PretrainedCfg, generate_default_cfgs
from torch import Tensor, nn

from recast.config import coerce
from recast.errors import RecastError
from recast.models.register import CIFAR100, IMAGENET, pretrained_cfg, register
from recast.papers.first_weights import draw_linear_
from recast.papers.prs.pixel_conv import PixelConv2d
from recast.papers.trunk import FEATURES, Trunk

__all__ = ["CMHSAViT", "MixerBlock", "PatchEmbed"]

MIXERS = ("token", "pixel")


class PatchEmbed(nn.Conv2d):
    """A linear map of every P×P patch: B×C×H×W to B×d×⌊H/P⌋×⌊W/P⌋."""

    not_recast = "a patch embedding: its patches do not overlap, the attention is after it"

    def __init__(self, in_chans: int, dim: int, patch_size: int) -> None:
        super().__init__(in_chans, dim, patch_size, stride=patch_size)


class MixerBlock(nn.Module):
    """x + DropPath(mixer(LN(x))), then x + DropPath(MLP(LN(x))), on maps B×d×h×w."""

    def __init__(self, dim: int, mixer: nn.Module, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = LayerNorm2d(dim)
        self.mixer = mixer
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = LayerNorm2d(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), use_conv=True)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()
        draw_linear_(self.mlp.fc1)
        draw_linear_(self.mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.mixer(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class CMHSAViT(Trunk):
    """Patch embedding, `depth` blocks, LN, the mean over tokens, a linear head.

    `mixer`, `kernel`: what mixes the tokens (see the module), K×K. `drop_path_rate`: stochastic depth, rising linearly
    from 0 in the first block. `drop_rate`: dropout before the head. `global_pool`: "avg", or "" for the map.
    `num_classes=0`: pooled features B×d instead of logits.
    Raises RecastError for an unknown mixer or pooling, an even kernel, classes without pooling.
    """

    stem_name, pools = "patch_embed", ("avg",)

    def __init__(
        self,
        patch_size: int = 16,
        embed_dim: int = 768,
        depth: int = 6,
        num_classes: int = 1000,
        in_chans: int = 3,
        *,
        mixer: str = "token",
        kernel: int = 3,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        final_norm: bool = True,
        global_pool: str = "avg",
    ) -> None:
        coerce(Literal[tuple(MIXERS)], mixer, "mixer")
        if kernel < 1 or kernel % 2 == 0:
            raise RecastError(f"kernel of a mixer must be odd, got {kernel}")

        def block(drop_path: float) -> MixerBlock:
            mixes = (
                PixelConv2d(embed_dim, embed_dim, kernel, patch_size)
                if mixer == "pixel"
                else nn.Conv2d(embed_dim, embed_dim, kernel, padding=kernel // 2)
            )
            return MixerBlock(embed_dim, mixes, mlp_ratio, drop_path)

        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        stem = PatchEmbed(in_chans, embed_dim, patch_size)
        super().__init__(embed_dim, in_chans, patch_size, stem, map(block, rates))
        self.patch_size = patch_size
        self.norm = LayerNorm2d(embed_dim) if final_norm else nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of stem, blocks, norm and head in order, for layer-wise rates."""
        return {"stem": r"^patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def pooled(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) if self.global_pool else x


# Name: width, side of the images, and what else sets it apart. No weights are published.
VARIANTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "3": (768, 224, {"kernel": 3}),
    "3_pixel": (768, 224, {"kernel": 3, "mixer": "pixel"}),
    "5": (768, 224, {"kernel": 5, "mixer": "pixel"}),
    "3_cifar": (192, 32, {"kernel": 3, "patch_size": 4}),
    "3_tiny": (48, 32, {"kernel": 3, "patch_size": 4}),
    "5_tiny": (48, 32, {"kernel": 5, "patch_size": 4, "mixer": "pixel"}),
}
default_cfgs: dict[str, PretrainedCfg] = generate_default_cfgs(
    {
        f"cmhsa_vit_{variant}": pretrained_cfg(
            size, *((1000, IMAGENET) if size == 224 else (100, CIFAR100)), first_conv="patch_embed"
        )
        for variant, (_, size, _) in VARIANTS.items()
    }
)
for _variant, (_width, _, _options) in VARIANTS.items():
    _mixer = f"a {_options['kernel']}×{_options['kernel']} convolution of {_options.get('mixer', 'token')}s"
    register(
        f"cmhsa_vit_{_variant}",
        CMHSAViT,
        f"C-MHSA's vision transformer: width {_width}, six blocks, {_mixer}.",
        {"embed_dim": _width, **_options},
        feature_cfg=FEATURES,
    )
