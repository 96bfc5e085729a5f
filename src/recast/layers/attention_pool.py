"""Attention pooling: one learned query per map (or per class) instead of the average over pixels.

Shapes: B images, C channels, h×w grid of n = h·w patches, T tokens (1, or one per class), H heads.
Paper: Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation (arXiv:2112.13692),
section 3.1. The start that equals average pooling is ours.
"""

from __future__ import annotations

import torch
from timm.layers import LayerScale, Mlp, trunc_normal_
from torch import Tensor, nn

from recast.config import coerce
from recast.errors import RecastError
from recast.layers.functional.operands import finite_half
from recast.layers.pool_config import PoolStart

INIT_STD = 0.02


class TokenAttention(nn.Module):
    """y = W_o (a V) + b_o with a = softmax(Q Kᵀ / √(C/H)), Q = W_q t + b_q, K = W_k u + b_k, V = W_v u + b_v.

    t (1, T, C) are the tokens, u (B, n, C) the keys. With `sees_itself` each token is also a key, for itself only.
    Returns y (B, T, C) and a (B, H, T, m), whose rows sum to 1: m = n, or 1 + n with the token itself first. The
    softmax is written out because fused attention returns no weights. timm's `AttentionExtract` finds them at
    `attn_drop`.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise RecastError(f"dim={dim} is not divisible by num_heads={num_heads}")
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, tokens: Tensor, keys: Tensor, sees_itself: bool = False) -> tuple[Tensor, Tensor]:
        # the tokens, and so the queries, are the same for every image: computed once
        q, k, v = self._split(self.q(tokens)) * self.scale, self._split(self.k(keys)), self._split(self.v(keys))
        scores = q @ k.transpose(-2, -1)
        if sees_itself:
            itself = (q * self._split(self.k(tokens))).sum(-1, keepdim=True).expand(keys.shape[0], -1, -1, -1)
            scores = torch.cat((itself, scores), dim=-1)
        attention = finite_half(scores).softmax(dim=-1)
        a = self.attn_drop(attention)
        y = a[..., 1:] @ v + a[..., :1] * self._split(self.v(tokens)) if sees_itself else a @ v
        return self.proj(y.transpose(1, 2).flatten(2)), attention

    def mean(self, attention: Tensor, x: Tensor) -> Tensor:
        """Return Σ a·x (B, T, C) for x (B, m, C), the weights (B, H, T, m) of a head on its C/H channels."""
        return (attention @ self._split(x)).transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> Tensor:
        """Reshape (B, m, C) to (B, H, m, C/H)."""
        return x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads).transpose(1, 2)


class AttentionPool(nn.Module):
    """Pool a map x (B, C, h, w) with a learned token c to (B, C), or with one token per class to (B, num_classes, C).

        u   = LN₁(x) (and LN₁(c) before it, with `cls_in_keys`)      keys and values
        c′  = c  + γ₁ · attention(LN₁(c), u)                         `TokenAttention`
        c″  = c′ + γ₂ · FFN(LN₂(c′))                                 C → mlp_ratio·C → C, GELU
        z   = LN(c″)

    `num_classes=None`: a single token, which is among its own keys: the patches' weights sum to 1 minus its own.
    `num_classes=K`: one token per class; keys are the patches only, each class's weights over them sum to 1.
    `cls_in_keys` overrides this; then a class's token is among its own keys only, so that K equal tokens give K times
    the output of a single one. The grid may have any size, and the order of pixels makes no difference: there are no
    positions. The paper uses one head. `init_values`: initial γ₁ and γ₂ (LayerScale), by default 1e-4.

    `start="average"`: for a classifier that was trained on averages. The residual is the map itself, weighted by a; the
    token is only the query, and z = c″ is not normalised:

        c′  = Σₚ aₚ xₚ + γ₁ · attention(LN₁(c), u)                   W_q = 0, so a = 1/n, and γ = 0 at the start

    This start is average pooling up to rounding; gradients reach W_q and γ first, and then the rest. No token is among
    the keys. Raises RecastError if `num_classes` is < 1, `num_heads` does not divide `dim`, the start is unknown, or
    `cls_in_keys` is combined with the average.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int | None = None,
        *,
        start: PoolStart = "paper",
        cls_in_keys: bool | None = None,
        num_heads: int = 1,
        mlp_ratio: float = 3.0,
        init_values: float | None = None,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        coerce(PoolStart, start, "start")
        averages = start == "average"
        if averages and cls_in_keys:
            raise RecastError(
                "start='average' does not allow cls_in_keys=True, which moves the average by 1/(n+1): drop "
                "cls_in_keys, or use start='paper'"
            )
        if init_values is None:
            init_values = 0.0 if averages else 1e-4
        self.dim = dim
        self.start = start
        self.cls_in_keys = num_classes is None and not averages if cls_in_keys is None else cls_in_keys
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = TokenAttention(dim, num_heads)
        self.ls1 = LayerScale(dim, init_values)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.ls2 = LayerScale(dim, init_values)
        self.norm = nn.Identity() if averages else nn.LayerNorm(dim, eps=eps)
        self.reset_tokens(num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)
        if averages:
            nn.init.zeros_(self.attn.q.weight)

    def reset_tokens(self, num_classes: int | None) -> None:
        """Draw new tokens: a single one (None), or one for each of `num_classes` classes."""
        if num_classes is not None and num_classes < 1:
            raise RecastError(f"num_classes must be at least 1, got {num_classes}")
        self.num_classes = num_classes
        like = self.norm1.weight  # the module's current device and dtype
        tokens = torch.empty(1, num_classes or 1, self.dim, device=like.device, dtype=like.dtype)
        self.cls_token = nn.Parameter(trunc_normal_(tokens, std=INIT_STD))

    def no_weight_decay(self) -> set[str]:
        """Parameters with more than one dimension that must not decay."""
        return {"cls_token"}

    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Return the pooled features, and with `return_attention` the weights (B, H, T, m), m = n or 1 + n."""
        patches = x.flatten(2).transpose(1, 2)
        y, attention = self.attn(self.norm1(self.cls_token), self.norm1(patches), sees_itself=self.cls_in_keys)
        residual = self.attn.mean(attention, patches) if self.start == "average" else self.cls_token
        z = residual + self.ls1(y)
        z = self.norm(z + self.ls2(self.mlp(self.norm2(z))))
        pooled = z.squeeze(1) if self.num_classes is None else z
        return (pooled, attention) if return_attention else pooled

    def as_map(self, x: Tensor) -> Tensor:
        """Return the input of `forward` as a map (B, C, h, w). `PooledLayer` overrides this for other layouts."""
        return x

    def attention_maps(self, x: Tensor) -> Tensor:
        """Return the attention of every token over the pixels of a map x (B, C, h, w): (B, H, T, h, w)."""
        _, attention = AttentionPool.forward(self, x, return_attention=True)
        return attention[..., -x.shape[-2] * x.shape[-1] :].unflatten(-1, tuple(x.shape[-2:]))

    def extra_repr(self) -> str:
        return f"{self.dim}, num_classes={self.num_classes}, start={self.start}, cls_in_keys={self.cls_in_keys}"


class ClassHead(nn.Linear):
    """Classifier with one feature vector per class: logit_j = w_j · z_j + b_j.

    Input (B, K, C), or rows (B·K, C) or (B·K, C, 1, 1) with the classes of an image one after the other; output (B, K).
    Parameters as in `nn.Linear(C, K)`. With `as_map` the output is (B, K, 1, 1), as of a 1×1 convolution.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *, as_map: bool = False) -> None:
        super().__init__(in_features, out_features, bias)
        self.as_map = as_map

    def forward(self, input: Tensor) -> Tensor:
        z = input.reshape(-1, self.out_features, self.in_features)
        logits = torch.einsum("bkc,kc->bk", z, self.weight)
        logits = logits if self.bias is None else logits + self.bias
        return logits[:, :, None, None] if self.as_map else logits


def attention_pools(model: nn.Module) -> dict[str, AttentionPool]:
    """Return the attention pooling layers of a model by name, in the order of `named_modules`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AttentionPool)}
