"""Attention-based pooling: one learned query a map (or a class) instead of the average over pixels.

Shapes: B images, C channels, h×w grid of n = h·w patches, T tokens (1, or one a class), H heads.
Paper: Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation (arXiv:2112.13692),
section 3.1.
"""

from __future__ import annotations

import torch
from timm.layers import LayerScale, Mlp, trunc_normal_
from torch import Tensor, nn

from recast.errors import RecastError

__all__ = ["AttentionPool", "TokenAttention"]

INIT_STD = 0.02


class TokenAttention(nn.Module):
    """y = W_o (a V) + b_o with a = softmax(Q Kᵀ / √(C/H)), Q = W_q t + b_q, K = W_k u + b_k, V = W_v u + b_v.

    t (1, T, C) are the tokens, u (B, m, C) what they look at. Returns y (B, T, C) and a (B, H, T, m), rows of sum 1.
    The softmax is written out: fused attention gives no weights. timm's `AttentionExtract` finds them at `attn_drop`.
    """

    def __init__(self, dim: int, num_heads: int = 1) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise RecastError(f"{dim} channels cannot be shared out among num_heads={num_heads}: pass a divisor")
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, tokens: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self._split(self.q(tokens)), self._split(self.k(keys)), self._split(self.v(keys))
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        y = self.attn_drop(attention) @ v
        return self.proj(y.transpose(1, 2).flatten(2)), attention

    def _split(self, x: Tensor) -> Tensor:
        """B×m×C to B×H×m×(C/H)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class AttentionPool(nn.Module):
    """Pool a map x (B, C, h, w) with learned tokens c to (B, C), or with one token a class to (B, num_classes, C).

        u   = LN₁(x) (and LN₁(c) before it, with `cls_in_keys`)      what the tokens look at
        c′  = c  + γ₁ · attention(LN₁(c), u)                         `TokenAttention`
        c″  = c′ + γ₂ · FFN(LN₂(c′))                                 C → mlp_ratio·C → C, GELU
        z   = LN(c″)

    `num_classes=None`: a single token, which is among its own keys: the patches' weights sum to 1 minus its own.
    `num_classes=K`: a token for each class; keys are the patches only, each class's weights over them sum to 1.
    `cls_in_keys` overrules that. Any grid of pixels will do, and their order makes no difference: there are no
    positions. `init_values`: start of γ₁ and γ₂ (LayerScale). The paper takes one head.
    Raises RecastError if `num_classes` is below 1 or `num_heads` does not divide `dim`.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int | None = None,
        *,
        cls_in_keys: bool | None = None,
        num_heads: int = 1,
        mlp_ratio: float = 3.0,
        init_values: float = 1e-4,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.cls_in_keys = num_classes is None if cls_in_keys is None else cls_in_keys
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = TokenAttention(dim, num_heads)
        self.ls1 = LayerScale(dim, init_values)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.ls2 = LayerScale(dim, init_values)
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.reset_tokens(num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)

    def reset_tokens(self, num_classes: int | None) -> None:
        """Draw new tokens: a single one (None), or one for each of `num_classes` classes."""
        if num_classes is not None and num_classes < 1:
            raise RecastError(f"a token a class needs num_classes of at least 1, got {num_classes}")
        self.num_classes = num_classes
        like = self.norm.weight  # the device and dtype that the module has by now
        tokens = torch.empty(1, num_classes or 1, self.dim, device=like.device, dtype=like.dtype)
        self.cls_token = nn.Parameter(trunc_normal_(tokens, std=INIT_STD))

    def no_weight_decay(self) -> set[str]:
        """Parameters with more than one dimension that must not decay."""
        return {"cls_token"}

    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The pooled features; with `return_attention` also the weights (B, H, T, m): m = n, or T + n, tokens first."""
        # the tokens, and so the queries, are the same for every image: computed once
        tokens, keys = self.norm1(self.cls_token), self.norm1(x.flatten(2).transpose(1, 2))
        if self.cls_in_keys:
            keys = torch.cat((tokens.expand(keys.shape[0], -1, -1), keys), dim=1)
        y, attention = self.attn(tokens, keys)
        z = self.cls_token + self.ls1(y)
        z = self.norm(z + self.ls2(self.mlp(self.norm2(z))))
        pooled = z.squeeze(1) if self.num_classes is None else z
        return (pooled, attention) if return_attention else pooled

    def attention_maps(self, x: Tensor) -> Tensor:
        """Where each token looks: the weights of the pixels of x (B, C, h, w), as (B, H, T, h, w)."""
        _, attention = self(x, return_attention=True)
        return attention[..., -x.shape[-2] * x.shape[-1] :].unflatten(-1, tuple(x.shape[-2:]))

    def extra_repr(self) -> str:
        return f"{self.dim}, num_classes={self.num_classes}, cls_in_keys={self.cls_in_keys}"
