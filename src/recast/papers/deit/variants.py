"""Sizes and ablations of DeiT, CaiT and ResMLP that their papers train and timm lacks, as rows of values.

CaiT: Touvron et al. 2021, arXiv:2103.17239, tables of sizes and of class tokens in DeiT-S. ResMLP: Touvron et al. 2021,
arXiv:2105.03404, table of ablations of S12; no code of these was published, and parameters agree with the paper's.
Shapes: B images of n tokens of d channels, on a square grid where a convolution mixes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed, trunc_normal_
from timm.models import checkpoint_seq, generate_default_cfgs
from timm.models.cait import Cait, LayerScaleBlockClassAttn
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from recast.errors import RecastError
from recast.models.register import IMAGENET, pretrained_cfg, register


class CaiT(Cait):
    """timm's network, for sizes that it lacks."""


class ClassAttention(LayerScaleBlockClassAttn):
    """CaiT's block of class attention; without LayerScale if `init_values` is None."""

    def __init__(self, dim: int, num_heads: int, *, init_values: float | None = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, init_values=init_values or 1.0, **kwargs)
        if init_values is None:
            del self.gamma_1, self.gamma_2
            self.gamma_1 = self.gamma_2 = 1.0  # type: ignore[assignment]


class ClassAttentionViT(VisionTransformer):
    """timm's ViT, whose class token enters late (CaiT, table of class tokens in DeiT-S).

    The first `token_at` blocks (None: all) see patches alone, the rest of the `depth` blocks the token too; then
    `class_layers` blocks of class attention change the token alone. Other arguments are timm's. Raises RecastError for
    a token that would see no patch.
    """

    def __init__(
        self,
        *,
        class_layers: int = 2,
        token_at: int | None = None,
        depth: int = 12,
        init_values: float | None = None,
        **kwargs: Any,
    ) -> None:
        token_at = depth if token_at is None else token_at
        if not (0 <= token_at < depth or (token_at == depth and class_layers > 0)):
            raise RecastError(
                f"a class token before block {token_at} of {depth} and {class_layers} class layers sees no patches: "
                "set class_layers to 1 or more, or token_at below depth"
            )
        fixed: dict[str, Any] = {"class_token": True, "no_embed_class": True, "global_pool": "token"}
        super().__init__(**kwargs, depth=depth, init_values=init_values, **fixed)
        self.token_at = token_at
        block: Any = self.blocks[0]
        like: dict[str, Any] = {"qkv_bias": block.attn.qkv.bias is not None, "norm_layer": type(block.norm1)}
        like |= {"mlp_ratio": block.mlp.fc1.out_features / self.embed_dim, "init_values": init_values}
        blocks = [ClassAttention(self.embed_dim, block.attn.num_heads, **like) for _ in range(class_layers)]
        self.class_layers = nn.ModuleList(blocks)
        self.class_layers.apply(self._init_weights)

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Return patches with their positions, without the token."""
        assert self.pos_embed is not None
        placed: Tensor = self.pos_drop(x + self.pos_embed)
        return placed

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the normalised token and patches B×(1 + n)×d."""
        x = self.norm_pre(self._pos_embed(self.patch_embed(x)))
        x = self._through(self.blocks[: self.token_at], x)
        assert self.cls_token is not None
        token = self.cls_token.expand(len(x), -1, -1)
        x = self._through(self.blocks[self.token_at :], torch.cat([token, x], 1))
        token, patches = x[:, :1], x[:, 1:]
        for layer in self.class_layers:
            token = layer(patches, token)
        normed: Tensor = self.norm(torch.cat([token, patches], 1))
        return normed

    def _through(self, blocks: nn.Sequential, x: Tensor) -> Tensor:
        y: Tensor = checkpoint_seq(blocks, x) if self.grad_checkpointing and len(blocks) else blocks(x)
        return y

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = self.forward_head(self.forward_features(x))
        return logits

    def forward_intermediates(self, *_: Any, **__: Any) -> Any:
        """Raise RecastError: maps before and after the token have other numbers of tokens."""
        raise RecastError("a ClassAttentionViT gives no maps of its blocks: take the ViT without late class token")


class OnGrid(nn.Sequential):
    """Layers on maps, for tokens: B×d×n → B×d×n."""

    def forward(self, x: Tensor) -> Tensor:
        side = isqrt(x.shape[2])
        mixed: Tensor = super().forward(x.unflatten(2, (side, side)))
        return mixed.flatten(2)


MIXERS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda dim, tokens: nn.Identity(),
    "mlp": lambda dim, tokens: Mlp(tokens, 4 * tokens),
    "conv": lambda dim, tokens: OnGrid(nn.Conv2d(dim, dim, 3, padding=1)),
    "depthwise": lambda dim, tokens: OnGrid(nn.Conv2d(dim, dim, 3, padding=1, groups=dim)),
    "separable": lambda dim, tokens: OnGrid(nn.Conv2d(dim, dim, 3, padding=1, groups=dim), nn.Conv2d(dim, dim, 1)),
}
"""Token mixers that replace ResMLP's linear layer, by (d, n)."""


class ClassLayer(nn.Module):
    """c ← c + γ₁·(w·norm([c; x]) + b), c ← c + γ₂·MLP(norm(c)): CaiT's class attention with fixed weights w (n + 1)."""

    def __init__(self, dim: int, tokens: int, init_values: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = Affine(dim), Affine(dim)
        self.linear = nn.Linear(tokens + 1, 1)
        self.mlp = Mlp(dim, 4 * dim)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((dim,), init_values)) for _ in range(2))

    def forward(self, token: Tensor, x: Tensor) -> Tensor:
        tokens = self.norm1(torch.cat([token, x], 1))
        token = token + self.gamma_1 * self.linear(tokens.mT).mT
        return token + self.gamma_2 * self.mlp(self.norm2(token))


class ResMLP(MlpMixer):
    """timm's, with LayerScale from `init_values`. `mixer`: linear, or one of `MIXERS`. `layer_norm`: in the place of
    Affine. `class_layers`: so many `ClassLayer`s in the place of the average over the patches (Class-MLP)."""

    def __init__(
        self,
        *,
        mixer: str = "linear",
        layer_norm: bool = False,
        class_layers: int = 0,
        init_values: float = 0.1,
        **kwargs: Any,
    ) -> None:
        norm: Any = partial(nn.LayerNorm, eps=1e-6) if layer_norm else Affine
        block: Any = partial(ResBlock, init_values=init_values)
        super().__init__(**{"block_layer": block, "norm_layer": norm, "mlp_ratio": 4, **kwargs})
        dim, stem = self.embed_dim, self.stem
        assert isinstance(stem, PatchEmbed)
        if mixer != "linear":
            for layer in self.blocks:
                layer.linear_tokens = MIXERS[mixer](dim, stem.num_patches)
        self.class_layers = nn.ModuleList(ClassLayer(dim, stem.num_patches, init_values) for _ in range(class_layers))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_layers else None
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters with more than one dimension that must not decay."""
        return {"cls_token"}

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits for tokens B×n×d; `pre_logits`: the input of the head."""
        if self.cls_token is None:
            logits: Tensor = super().forward_head(x, pre_logits)
            return logits
        token: Tensor = self.cls_token.expand(len(x), -1, -1)
        for layer in self.class_layers:
            token = layer(token, x)
        pooled = self.head_drop(token[:, 0])
        return pooled if pre_logits else self.head(pooled)


DEIT = {"patch_size": 16, "depth": 12}
S12 = {"num_blocks": 12, "embed_dim": 384, "patch_size": 16, "init_values": 0.1}
VARIANTS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "cait_xs36": (CaiT, {"embed_dim": 288, "num_heads": 6, "depth": 36, "init_values": 1e-6}),
    "cait_s48": (CaiT, {"embed_dim": 384, "num_heads": 8, "depth": 48, "init_values": 1e-6}),
    "cait_m24": (CaiT, {"embed_dim": 768, "num_heads": 16, "depth": 24, "init_values": 1e-5}),
    **{
        f"deit_{size}_class_attention": (ClassAttentionViT, {**DEIT, "embed_dim": 64 * heads, "num_heads": heads})
        for size, heads in (("tiny", 3), ("small", 6), ("base", 12))
    },
    "resmlp_big_24_p16": (ResMLP, {**S12, "num_blocks": 24, "embed_dim": 768, "init_values": 1e-6}),
    "resmlp_12_p14": (ResMLP, {**S12, "patch_size": 14}),
    "resmlp_12_p8": (ResMLP, {**S12, "patch_size": 8}),
    "resmlp_12_layer_norm": (ResMLP, {**S12, "layer_norm": True}),
    "resmlp_12_class": (ResMLP, {**S12, "class_layers": 2}),
    **{f"resmlp_12_{mixer}": (ResMLP, {**S12, "mixer": mixer}) for mixer in MIXERS},
}
"""Name → class and its settings."""
default_cfgs = generate_default_cfgs(
    {
        name: pretrained_cfg(224, 1000, IMAGENET, first_conv="stem.proj" if made is ResMLP else "patch_embed.proj")
        | {"crop_pct": 1.0 if made is CaiT else 0.9}
        for name, (made, _) in VARIANTS.items()
    }
)
for _name, (_made, _values) in VARIANTS.items():
    register(_name, _made, f"{_name}: {_values}", _values)
