"""Base class of networks whose blocks work on maps of one size, with the methods of timm's networks."""

from __future__ import annotations

from collections.abc import Iterable

from timm.models import checkpoint_seq
from timm.models._features import feature_take_indices  # of no public module
from torch import Tensor, nn

from recast.errors import RecastError
from recast.papers.first_weights import draw_linear_

FEATURES = {"out_indices": 3, "feature_cls": "getter"}
"""Settings of `timm.create_model(..., features_only=True)`: the last three maps, by `forward_intermediates`."""


class Trunk(nn.Module):
    """A stem of stride P and blocks on maps B×d×h×w; subclasses add `head_drop`, and `norm` if they have a final one.

    `stem_name`: the stem's attribute. `pools`: values of `global_pool`; "" gives the map, without pooling.
    """

    stem_name: str
    pools: tuple[str, ...]
    global_pool: str
    head_class: type[nn.Linear] = nn.Linear
    head_drop: nn.Module

    def __init__(
        self, embed_dim: int, in_chans: int, stride: int, stem: nn.Module, blocks: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.in_chans = in_chans
        self.grad_checkpointing = False
        self.add_module(self.stem_name, stem)
        self.blocks = nn.Sequential(*blocks)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": stride, "module": f"blocks.{i}"} for i in range(len(self.blocks))
        ]
        self.norm: nn.Module | None = None

    def get_classifier(self) -> nn.Module:
        """Return the head: a layer, or the identity for features."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Make a new head of `num_classes` (0: none). `global_pool`: one of `pools` or "" (the map); None: unchanged.

        Raises RecastError for another pooling, and for classes without any.
        """
        pool = self.global_pool if global_pool is None else global_pool
        if pool not in (*self.pools, ""):
            expected = " or ".join(map(repr, (*self.pools, "")))
            raise RecastError(f"global_pool of a {type(self).__name__} must be {expected}, got {pool!r}")
        if not pool and num_classes:
            raise RecastError(
                f"a head of {num_classes} classes needs pooling: pass global_pool={self.pools[0]!r}, or num_classes=0"
            )
        self.reset_pool(pool, num_classes)
        self.global_pool, self.num_classes = pool, num_classes
        head = draw_linear_(self.head_class(self.embed_dim, num_classes)) if num_classes else nn.Identity()
        self.head = head.to(next(self.parameters()))  # the device and dtype that the model has by now

    def reset_pool(self, global_pool: str, num_classes: int) -> None:
        """Make the pooling for a new head."""

    def pooled(self, x: Tensor) -> Tensor:
        """Return the input of the head for the last map."""
        raise NotImplementedError

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.norm is None else self.norm(x)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of storing its activations."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the normalised map of the last block, B×d×H/P×W/P, for images B×in_chans×H×W."""
        x = getattr(self, self.stem_name)(x)
        return self._normed(checkpoint_seq(self.blocks, x) if self.grad_checkpointing else self.blocks(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return logits B×num_classes for the last map; `pre_logits`: the input of the head."""
        x = self.pooled(x)
        return x if pre_logits else self.head(self.head_drop(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return maps after blocks: the last `indices` (None: all), or those listed; `norm`: with the final norm.

        `intermediates_only`: return the list alone, else the final map and the list.
        """
        if output_fmt != "NCHW":
            raise RecastError(f"a {type(self).__name__}'s maps are NCHW, got output_fmt={output_fmt!r}")
        taken, _ = feature_take_indices(len(self.blocks), indices)
        maps = []
        x = getattr(self, self.stem_name)(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint_seq([block], x) if self.grad_checkpointing else block(x)
            if i in taken:
                maps.append(self._normed(x) if norm else x)
        return maps if intermediates_only else (self._normed(x), maps)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the layers that the maps of `indices` do not need; returns their block numbers."""
        taken, last = feature_take_indices(len(self.blocks), indices)
        shorter = last + 1 < len(self.blocks)
        self.blocks = self.blocks[: last + 1]
        if prune_norm and self.norm is not None:
            self.norm = nn.Identity()
        if prune_head or shorter:
            self.reset_classifier(0, "")
        return list(taken)
