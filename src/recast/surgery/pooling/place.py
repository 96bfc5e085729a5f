"""Where a network pools, and how: what `find_place` finds and `attention_pool_` changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["NCHW", "NHWC", "NLC", "flat"]
How = Literal["module", "append", "head"]


@dataclass(frozen=True)
class Place:
    """Where attention pooling goes."""

    how: How
    """module: it replaces the pooling module `name`. append: it follows the last layer of the nn.Sequential `name`, and
    the code that pools after it sees one position. head: before the network's `forward_head` (`PoolsBeforeHead`)."""
    name: str
    dim: int
    """Channels of what is pooled."""
    takes: Layout
    gives: Layout
    prefix_tokens: int = 0
    """Tokens before those of the patches."""
    classifier: str | None = None
    """The linear layer (or 1×1 convolution) that gives the logits; None where there is no single one."""
    averages: bool = True
    """The network pooled by the mean over all positions and nothing else came between: the average start is exact."""
    positions: int = 0
    """How many are pooled of the images that it was found with."""
    relu: bool = False
    """append: the code applies a ReLU before it averages, so the pooling gets one too."""
