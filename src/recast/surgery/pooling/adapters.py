"""Attention pooling inside of a network: what its pooling took comes in, what its head expects goes out.

The head after a pool of K tokens sees rows: the K vectors of an image one after the other, as if they were K images.
So whatever lies between pooling and classifier (norms, dropout, a convolution) works on each class's vector alone, and
`ClassHead` puts the rows of an image together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool, ClassHead
from recast.surgery.pooling.place import Layout
from recast.surgery.stride import replace_module_

__all__ = ["Pooled", "PooledLayer", "PoolsBeforeHead", "class_head", "pooled_class"]


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
        self.replaced: tuple[nn.Module, ...] = ()  # a tuple: no part of this module
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


class Pooled(nn.Module):
    """What a network of timm becomes: a new classifier does not undo its attention pooling."""

    _plain: type[nn.Module]
    """The class that it was of."""

    def reset_classifier(self, num_classes: int, *args: Any, **kwargs: Any) -> None:
        """A new classifier, as the network makes it; the pooling stays, and gets new tokens if it has one a class.

        Raises RecastError for a pooling of the network's own, which attention pooling stands for.
        """
        wanted = kwargs.pop("global_pool", args[0] if args else None)
        if wanted not in (None, "avg", PooledLayer.pool_type):
            raise RecastError(
                f"global_pool={wanted!r}: the pooling of this {type(self).__name__} is attention; leave it out"
            )
        ((name, pool),) = ((n, m) for n, m in self.named_modules() if isinstance(m, PooledLayer))
        with _own_pool(self, name, pool):
            super().reset_classifier(num_classes, *args[1:], **kwargs)  # type: ignore[misc]
        if pool.num_classes is not None and num_classes:
            pool.reset_tokens(num_classes)
            replace_module_(self, layer := self.get_classifier(), class_head(layer))  # type: ignore[operator]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class is made at run time: it is named by what it is made of
        return _blank, (self._plain, isinstance(self, PoolsBeforeHead)), self.__dict__


class PoolsBeforeHead(Pooled):
    """What a network of timm that pools in the code of its head becomes: its head gets a single position, the pooled
    one, and the mean over one position is that position. Its features stay what they were."""

    attention_pool: PooledLayer

    def forward_head(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        head: Tensor = super().forward_head(self.attention_pool(x), *args, **kwargs)  # type: ignore[misc]
        return head


@cache
def pooled_class(kind: type[nn.Module], before_head: bool) -> type[nn.Module]:
    """The class `kind` with `Pooled` or `PoolsBeforeHead`, under its own name."""
    bases = (PoolsBeforeHead if before_head else Pooled, kind)
    return type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain": kind})


def _blank(kind: type[nn.Module], before_head: bool) -> nn.Module:
    made: Any = pooled_class(kind, before_head)  # type: ignore[arg-type]
    network: nn.Module = made.__new__(made)
    return network


@contextmanager
def _own_pool(model: nn.Module, name: str, pool: PooledLayer) -> Iterator[None]:
    """Put back the pooling module that `pool` replaced, which networks look at when they make a classifier."""
    if pool.replaced:
        replace_module_(model, pool, pool.replaced[0])
    try:
        yield
    finally:
        if pool.replaced:
            replace_module_(model, model.get_submodule(name), pool)


def class_head(layer: nn.Module) -> ClassHead:
    """A classifier's rows as a layer that gives each to its own class's vector; its weights are copied."""
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        raise RecastError(f"expected a linear classifier, got {type(layer).__name__}: take a single token")
    weight = layer.weight.detach().flatten(1)
    is_conv = isinstance(layer, nn.Conv2d)
    head = ClassHead(weight.shape[1], weight.shape[0], layer.bias is not None, as_map=is_conv).to(weight)
    with torch.no_grad():
        head.weight.copy_(weight)
        if layer.bias is not None:
            head.bias.copy_(layer.bias)
    for mine, theirs in ((head.weight, layer.weight), (head.bias, layer.bias)):
        if mine is not None and theirs is not None:
            mine.requires_grad_(theirs.requires_grad)
    return head.train(layer.training)
