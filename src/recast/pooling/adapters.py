"""Attention pooling inside of a network: what its pooling took comes in, what its head expects goes out.

The head after a pool of K tokens sees rows: the K vectors of an image one after the other, as if they were K images.
So whatever lies between pooling and classifier (norms, dropout, a convolution) works on each class's vector alone, and
`ClassHead` puts the rows of an image together again.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from recast.pooling.layer import AttentionPool
from recast.pooling.place import Layout

__all__ = ["PooledLayer", "PoolsBeforeHead", "pools_before_head"]


class PooledLayer(AttentionPool):
    """`AttentionPool` in the place of a network's own pooling.

    takes: NCHW maps, NHWC maps, or NLC tokens, whose first `prefix_tokens` are left out (class token, registers).
    gives: rows (B·T, C) as "flat", or the same with one position: (B·T, C, 1, 1), (B·T, 1, 1, C), (B·T, 1, C). Of
    tokens as many as there were before the patches, and one: whichever of them the head reads is the pooled one.
    """

    def __init__(
        self, dim: int, num_classes: int | None = None, *, takes: Layout, gives: Layout, prefix_tokens: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(dim, num_classes, **options)
        self.takes = takes
        self.gives = gives
        self.prefix_tokens = prefix_tokens

    pool_type = "attention"
    """With the two methods below what timm's heads ask of their pooling."""

    def is_identity(self) -> bool:
        return False

    def feat_mult(self) -> int:
        return 1

    def as_map(self, x: Tensor) -> Tensor:
        """The input as a map (B, C, h, w). Tokens do not tell their grid: theirs is (B, C, 1, n)."""
        if self.takes == "NHWC":
            return x.permute(0, 3, 1, 2)
        if self.takes == "NLC":
            return x[:, self.prefix_tokens :].transpose(1, 2).unsqueeze(2)
        return x

    def forward(self, x: Tensor, return_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        z, attention = super().forward(self.as_map(x), return_attention=True)
        rows = z.flatten(0, -2)  # (B·T, C)
        if self.gives == "NCHW":
            rows = rows[:, :, None, None]
        elif self.gives == "NHWC":
            rows = rows[:, None, None]
        elif self.gives == "NLC":
            rows = rows[:, None].expand(-1, self.prefix_tokens + 1, -1)
        return (rows, attention) if return_attention else rows

    def extra_repr(self) -> str:
        prefix = f", prefix_tokens={self.prefix_tokens}" if self.prefix_tokens else ""
        return f"{super().extra_repr()}, {self.takes} → {self.gives}{prefix}"


class PoolsBeforeHead(nn.Module):
    """What a network of timm that pools in the code of its head becomes: its head gets a single position, the pooled
    one, and the mean over one position is that position. Its features stay what they were."""

    attention_pool: PooledLayer

    def forward_head(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        head: Tensor = super().forward_head(self.attention_pool(x), *args, **kwargs)  # type: ignore[misc]
        return head


@cache
def pools_before_head(kind: type[nn.Module]) -> type[nn.Module]:
    """The class `kind` with `PoolsBeforeHead`, under its own name."""
    return type(kind.__name__, (PoolsBeforeHead, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
