"""Attention pooling inside a network: it takes what the network's pooling took, and returns what its head expects.

The head after a pool of K tokens sees rows: the K vectors of an image one after the other, as if they were K images.
So whatever lies between pooling and classifier (norms, dropout, a convolution) works on each class's vector alone, and
`ClassHead` puts the rows of an image together again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import Linear as TimmLinear
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool, ClassHead
from recast.layers.pool_config import AttentionPooling
from recast.modes import computes_as
from recast.surgery.records import Place
from recast.surgery.stride import replace_module_


class PooledLayer(AttentionPool):
    """`AttentionPool` in the place of a network's own pooling.

    takes: NCHW maps, NHWC maps, or NLC tokens, whose first `prefix_tokens` are left out (class token, registers).
    gives: rows (B·T, C) as "flat", or the same with one position: (B·T, C, 1, 1), (B·T, 1, 1, C), (B·T, 1, C). For
    tokens `prefix_tokens` + 1 copies: whichever of them the head reads is the pooled one.
    """

    def __init__(self, place: Place, num_classes: int | None, config: AttentionPooling) -> None:
        super().__init__(place.dim, num_classes, **config.model_dump(exclude={"kind", "allow_change"}))
        self.replaced: tuple[nn.Module, ...] = ()  # a tuple, so that it is not registered as a child
        self.takes, self.gives, self.prefix_tokens = place.takes, place.gives, place.prefix_tokens

    pool_type = "attention"
    """With the two methods below, the interface that timm's heads expect of their pooling."""

    def is_identity(self) -> bool:
        return False

    def feat_mult(self) -> int:
        return 1

    def as_map(self, x: Tensor) -> Tensor:
        """Return the input as a map (B, C, h, w). The grid of tokens is unknown: they give (B, C, 1, n)."""
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


def hold_pool_(model: Any, before_head: bool) -> None:
    """Make a network of timm pool by the `PooledLayer` in it: where it pools in the code of its head (`before_head`,
    the pool is its child `attention_pool`), and where it makes a new classifier.

    Its methods are replaced on the instance, by functions that pickle and `copy.deepcopy` take along with it.
    """
    if before_head:
        model.forward_head = partial(_forward_head, model)
    if hasattr(model, "reset_classifier") and hasattr(model, "get_classifier"):
        model.reset_classifier = partial(_reset_classifier, model)


def _forward_head(model: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run the network's own head on a single position, the pooled one, whose mean is that position."""
    logits: Tensor = model.__class__.forward_head(model, model.attention_pool(x), *args, **kwargs)
    return logits


def _reset_classifier(model: Any, num_classes: int, *args: Any, **kwargs: Any) -> None:
    """Make a new classifier as the network does; the pooling stays, with new tokens if it has one per class.

    Raises RecastError for a pooling of the network's own, which attention pooling stands for.
    """
    wanted = kwargs.pop("global_pool", args[0] if args else None)
    if wanted not in (None, "avg", PooledLayer.pool_type):
        raise RecastError(f"global_pool={wanted!r} does not apply: {type(model).__name__} pools by attention; drop it")
    ((name, pool),) = ((n, m) for n, m in model.named_modules() if isinstance(m, PooledLayer))
    (original,) = pool.replaced or (pool,)  # networks look at their own pooling when they make a classifier
    replace_module_(model, pool, original)
    try:
        type(model).reset_classifier(model, num_classes, *args[1:], **kwargs)
    finally:
        replace_module_(model, model.get_submodule(name), pool)
    if pool.num_classes is not None and num_classes:
        pool.reset_tokens(num_classes)
        replace_module_(model, layer := model.get_classifier(), class_head(layer))


def class_head(layer: nn.Module) -> ClassHead:
    """Return a layer that applies each row of a classifier to its own class's vector; weights are copied."""
    if not isinstance(layer, nn.Linear | nn.Conv2d) or not computes_as(layer, nn.Linear, nn.Conv2d, TimmLinear):
        got = f"{type(layer).__name__} (with a forward or hooks of its own?)"
        raise RecastError(f"expected a linear classifier, got {got}: take a single token")
    weight, bias = layer.weight.detach().flatten(1), layer.bias
    head = ClassHead(weight.shape[1], weight.shape[0], bias is not None, as_map=isinstance(layer, nn.Conv2d)).to(weight)
    with torch.no_grad():
        head.weight.copy_(weight).requires_grad_(layer.weight.requires_grad)
        if bias is not None:
            head.bias.copy_(bias).requires_grad_(bias.requires_grad)
    return head.train(layer.training)
