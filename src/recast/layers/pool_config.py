"""How a network's pooling becomes attention, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from recast.config import Finite, OneOf, PythonOnly, Rare, Ratio, Width, clash

PoolStart = Literal["average", "paper"]
PoolKind = Literal["none", "single", "per_class"]


class PoolConfig(OneOf):
    """Settings of attention pooling in the place of a network's average (Touvron et al. 2021, arXiv:2112.13692).

    Example:
        >>> recast.PoolConfig("per_class", num_heads=2).start
        'average'
    """

    default: ClassVar[str] = "none"

    kind: PoolKind
    """Attention pooling. none: keep the network's own pooling. single: one learned token attends to the pixels.
    per_class: one token per class."""

    if TYPE_CHECKING:

        def __init__(self, *values: Any, **named: Any) -> None: ...

    @property
    def is_on(self) -> bool:
        """True if the network's own pooling is replaced."""
        return self.kind != "none"


class NoPool(PoolConfig):
    """The network's own pooling."""

    kind: Literal["none"] = "none"


class AttentionPooling(PoolConfig):
    """Attention pooling."""

    kind: Literal["single", "per_class"] = "single"
    start: PoolStart = "average"
    """Initial pooling. average: exactly the mean over the pixels. paper: the paper's random start, for training from
    scratch."""
    cls_in_keys: Annotated[bool | None, PythonOnly()] = None
    """Include the token in its own keys. None: as in the paper, yes for a single token and no for one per class;
    no with start=average."""
    num_heads: Annotated[Width, PythonOnly()] = 1
    """Number of attention heads; the paper uses one."""
    mlp_ratio: Annotated[Ratio, PythonOnly()] = 3.0
    """Hidden width of the pooling's MLP, relative to the map's channels."""
    init_values: Annotated[Finite | None, PythonOnly()] = None
    """Initial LayerScale γ of the pooling. None: 0 for average (exact), 1e-4 for paper."""
    allow_change: Annotated[bool, Rare()] = False
    """Allow start=average in a network that does not average its last map (class token, maximum), which changes its
    logits. Off: raise an error."""

    @model_validator(mode="after")
    def _is_average(self) -> Self:
        if self.start == "average" and self.cls_in_keys:
            raise clash("`cls_in_keys` moves the average by 1/(n+1) and requires `start` paper")
        return self
