"""How a network pools its last map, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recast.errors import RecastError
from recast.run.fields import Count, Finite, Positive, check_fields

PoolKind = Literal["none", "single", "per_class"]
PoolStart = Literal["average", "paper"]


@dataclass(frozen=True)
class PoolConfig:
    """How a network's average pooling becomes attention pooling (Touvron et al. 2021, arXiv:2112.13692)."""

    kind: PoolKind = "none"
    """none: the network's own pooling. single: one learned token looks at the pixels. per_class: a token for every
    class."""
    start: PoolStart = "average"
    """average: starts as exactly the mean over the pixels. paper: the paper's, from which training starts anew."""
    cls_in_keys: bool | None = None
    """Whether the token is among its own keys. None: as in the paper, yes for a single token and no for one a class;
    no with start=average."""
    num_heads: Count = 1
    """Attention heads; the paper takes one."""
    mlp_ratio: Positive = 3.0
    """Hidden width of the pooling's MLP, in widths of the map."""
    init_values: Finite | None = None
    """LayerScale γ of the pooling at the start. None: 0 for average (exact), 1e-4 for paper."""

    def __post_init__(self) -> None:
        check_fields(self, "pool.")
        if self.start == "average" and self.cls_in_keys:
            raise RecastError(
                "pool.start=average is the mean of the n pixels, and a token among its keys would take 1/(n+1) of the "
                "weight: leave cls_in_keys out, or take pool.start=paper"
            )

    @property
    def is_on(self) -> bool:
        """The network's own pooling is replaced."""
        return self.kind != "none"
