"""PatchConvNet: a convolutional trunk at one resolution, pooled by attention.

Shapes: images B×3×H×W; the stem divides both sides by 16 (rounded up); trunk maps B×d×h×w; C classes. Everything is
NCHW, so images need not be square. S: d = 384, B: 768, L: 1024; the number is the depth.
`timm.create_model("patchconvnet_s60")`; `_multi`: one token a class; `_bn`: BatchNorm in the trunk.
Paper: Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation (arXiv:2112.13692),
section 3.1 and Figure 3. What it leaves open is as in the published code (facebookresearch/deit,
patchconvnet_models.py): GELU after the first three convolutions of the stem only, a depthwise 3×3 in the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from timm.layers import DropPath, LayerNorm2d, LayerScale2d, SelectAdaptivePool2d, SqueezeExcite
from timm.models import generate_default_cfgs
from torch import Tensor, nn

from recast.config import coerce
from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool, ClassHead
from recast.models.register import IMAGENET, pretrained_cfg, register
from recast.papers.patchconvnet.weights import checkpoint_filter_fn
from recast.papers.trunk import FEATURES, Trunk

__all__ = ["ConvBlock", "PatchConvNet"]

NORMS: dict[str, type[nn.Module]] = {"layernorm2d": LayerNorm2d, "batchnorm2d": nn.BatchNorm2d}
WIDTHS = {"s": 384, "b": 768, "l": 1024}
DEPTHS = {"s": (20, 36, 60, 120), "b": (36, 60, 120), "l": (60, 120)}


def _stem(in_chans: int, dim: int) -> nn.Sequential:
    """Return four 3×3 convolutions of stride 2 without bias or norm, with GELU between them."""
    widths = (in_chans, dim // 8, dim // 4, dim // 2, dim)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class ConvBlock(nn.Module):
    """y = x + DropPath(γ · Conv1×1(SE(GELU(DWConv3×3(GELU(Conv1×1(norm(x)))))))), γ a LayerScale; same shape as x.

    SE is squeeze-and-excitation with a quarter of the channels: σ(W₂ relu(W₁ mean(y) + b₁) + b₂) · y.
    """

    def __init__(self, dim: int, norm_layer: str, init_values: float, drop_path: float) -> None:
        super().__init__()
        self.norm = NORMS[norm_layer](dim)
        self.conv1 = nn.Conv2d(dim, dim, 1)
        self.act1 = nn.GELU()
        self.conv_dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.act2 = nn.GELU()
        self.se = SqueezeExcite(dim, rd_channels=dim // 4)
        self.conv2 = nn.Conv2d(dim, dim, 1)
        self.ls = LayerScale2d(dim, init_values)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act2(self.conv_dw(self.act1(self.conv1(self.norm(x)))))
        return x + self.drop_path(self.ls(self.conv2(self.se(y))))


class PatchConvNet(Trunk):
    """Stem, `depth` blocks, attention pooling, a linear head.

    `per_class`: one token a class instead of a single one (`AttentionPool`), and logit j from class j's vector only.
    `norm_layer`: layernorm2d, or batchnorm2d (the trunk's norms; those of the pooling stay). `init_values`: start of
    every LayerScale. `drop_path_rate`: stochastic depth, the same in every block (section 3.3). `drop_rate`: dropout
    before the head. `num_heads`, `mlp_ratio`, `cls_in_keys`: of the pooling (`AttentionPool`). `global_pool`: "avg" for
    the mean and a LayerNorm, "" for no pooling, the map. `linear_stem`: one 16×16 convolution of stride 16 instead of
    the four. `num_classes=0`: pooled features B×d instead of logits (not per class).
    Raises RecastError for a width that 8 does not divide, an unknown norm or pooling, classes without pooling.
    """

    stem_name, pools = "stem", ("attn", "avg")

    def __init__(
        self,
        embed_dim: int = 384,
        depth: int = 60,
        num_classes: int = 1000,
        in_chans: int = 3,
        *,
        per_class: bool = False,
        norm_layer: str = "layernorm2d",
        init_values: float = 1e-4,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        num_heads: int = 1,
        mlp_ratio: float = 3.0,
        cls_in_keys: bool | None = None,
        global_pool: str = "attn",
        linear_stem: bool = False,
    ) -> None:
        if embed_dim < 8 or embed_dim % 8:
            raise RecastError(f"embed_dim of a PatchConvNet must be a multiple of 8, got {embed_dim}")
        coerce(Literal[tuple(NORMS)], norm_layer, "norm_layer")
        blocks = (ConvBlock(embed_dim, norm_layer, init_values, drop_path_rate) for _ in range(depth))
        stem = nn.Conv2d(in_chans, embed_dim, 16, stride=16) if linear_stem else _stem(in_chans, embed_dim)
        super().__init__(embed_dim, in_chans, 16, stem, blocks)
        self.per_class = per_class
        self.head_class = ClassHead if per_class else nn.Linear
        self._pool: dict[str, Any] = {
            "num_heads": num_heads,
            "mlp_ratio": mlp_ratio,
            "cls_in_keys": cls_in_keys,
            "init_values": init_values,
        }
        self.pool: nn.Module = nn.Identity()
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def adapt_weights(
        self, model: nn.Module, weights: Mapping[str, Tensor], whole: bool, origin: str
    ) -> Mapping[str, Tensor]:
        """Return published weights under the names of this network (`checkpoint_filter_fn`)."""
        return checkpoint_filter_fn(weights, self)

    def reset_pool(self, global_pool: str, num_classes: int) -> None:
        """Make the pooling, or keep attention pooling; per class it gets new tokens if their number changes."""
        if not global_pool:
            self.pool = nn.Identity()
        elif global_pool == "avg":
            if self.per_class:
                raise RecastError("a token a class needs attention pooling: leave global_pool='avg' out")
            mean = SelectAdaptivePool2d(pool_type="avg", flatten=True)
            self.pool = nn.Sequential(mean, nn.LayerNorm(self.embed_dim, eps=1e-6)).to(next(self.parameters()))
        elif isinstance(self.pool, AttentionPool):
            if self.per_class and num_classes not in (0, self.pool.num_classes):
                self.pool.reset_tokens(num_classes)
        elif self.per_class and not num_classes:
            raise RecastError("a token a class needs classes: pass num_classes, or global_pool='' for the trunk alone")
        else:
            tokens = num_classes if self.per_class else None
            self.pool = AttentionPool(self.embed_dim, tokens, **self._pool).to(next(self.parameters()))

    def no_weight_decay(self) -> set[str]:
        """Return names of parameters with more than one dimension that must not decay."""
        return {"pool.cls_token"} if isinstance(self.pool, AttentionPool) else set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns of stem, blocks, pooling and head in order, for layer-wise rates."""
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)", "pool": r"^pool"}

    def pooled(self, x: Tensor) -> Tensor:
        """Return B×d, or B×C×d with one token per class; B×d×h×w without pooling."""
        return self.pool(x)


def _cfg(file: str | None = None, size: int = 224) -> Any:
    # crop_pct is nowhere stated; the group's own evaluation code crops to 0.875 by default
    address = {"url": f"https://dl.fbaipublicfiles.com/deit/{file}.pth"} if file else {}
    return pretrained_cfg(size, 1000, IMAGENET, first_conv="stem.0", **address)


TAGS = {"in1k": (224, "1k"), "in21k_ft_in1k": (224, "21k")}
TAGS |= {f"in21k_ft_in1k_{size}": (size, "21k") for size in (384, 512)}
"""Of released weights: the side of their images, and what they were trained on. The first is the default."""
RELEASED = {
    f"{variant}.{tag}": _cfg(f"{variant}_{side}_{images}", side)
    for variant, count in {"s60": 4, "s120": 1, "b60": 3, "b120": 3}.items()
    for tag, (side, images) in list(TAGS.items())[:count]
} | {"s60_multi.ft_in1k": _cfg("s60_multi_finetune_1k"), "s60_multi.in1k": _cfg("s60_multi_scratch_1k")}
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "_multi": {"per_class": True},
    "_bn": {"norm_layer": "batchnorm2d"},
    "_average": {"global_pool": "avg"},
    "_linear_stem": {"linear_stem": True},
}
VARIANTS = [(f"{size}{depth}{kind}", size, depth, kind) for size in DEPTHS for depth in DEPTHS[size] for kind in KINDS]
_WITHOUT = {variant for variant, *_ in VARIANTS} - {name.partition(".")[0] for name in RELEASED}
default_cfgs = generate_default_cfgs(
    {f"patchconvnet_{name}": cfg for name, cfg in (dict.fromkeys(sorted(_WITHOUT), _cfg()) | RELEASED).items()}
)
for _variant, _size, _depth, _kind in VARIANTS:
    # LayerScale's start in the published code; for sizes that it lacks, that of the size nearest in depth and width
    _start = 1e-4 if _size == "s" and _depth <= 60 else 1e-6
    register(
        f"patchconvnet_{_variant}",
        PatchConvNet,
        f"PatchConvNet-{_size.upper()}{_depth}: width {WIDTHS[_size]}, {_depth} blocks.",
        {"embed_dim": WIDTHS[_size], "depth": _depth, "init_values": _start, **KINDS[_kind]},
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=FEATURES,
    )
