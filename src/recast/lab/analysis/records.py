"""Records of the analyses, one a line of their tables, and whether attention was at work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AWAKE = 0.01
"""Share of a layer's output that a head's content must make, beyond what a global mean would, to count as awake."""
SLEPT = 0.1
"""With a smaller share of its heads awake, a network's attention slept."""
UNIFORM = 0.98
"""Mean entropy of the content maps, in shares of its maximum, from which on they are called uniform."""


@dataclass(frozen=True)
class Wakefulness:
    """Share of a network's attention that was at work after an epoch."""

    heads: int
    """Heads that have a content map."""
    awake: int
    """Heads whose content makes at least AWAKE of their layer's output beyond the global mean."""
    entropy: float
    """Of the content maps over its maximum, in the mean over the heads."""

    @classmethod
    def of(cls, layers: Mapping[str, Mapping[str, Any]]) -> Wakefulness | None:
        """Sum up `Epoch.layers`; None where nothing was measured."""
        shares, entropies = (
            [value for layer in layers.values() for value in layer.get(name, ()) if value is not None]
            for name in ("attention_share", "entropy")
        )
        if not shares:
            return None
        return cls(len(shares), sum(share >= AWAKE for share in shares), sum(entropies) / len(entropies))

    @property
    def slept(self) -> bool:
        """True if a run that ended so is no evidence about attention."""
        return self.awake < SLEPT * self.heads

    def __str__(self) -> str:
        if not self.slept:
            return f"attention is awake in {self.awake} of {self.heads} heads"
        how = f"attention slept: {self.awake} of {self.heads} heads do what a global mean would not"
        if self.entropy >= UNIFORM:
            return f"{how}, their maps are uniform (entropy {self.entropy:.3f} of its maximum)"
        return f"{how}, their gates stayed nearly closed"

    def remedy(self, query_key: str) -> str:
        """Return a setting to try where attention slept, after a start of queries and keys; else an empty text."""
        if not self.slept:
            return ""
        if self.entropy < UNIFORM:
            return "raise --gate-lr, or train for more updates"
        return "raise --qk-lr" if query_key == "images" else "start with --query-key images, or raise --qk-lr"


@dataclass(frozen=True)
class FourierLine:
    """One point of a block's curve (PRS, Fig. 2)."""

    model: str
    block: str
    index: int
    depth: float
    """0 for the first map, before any block; 1 for the last."""
    frequency: float
    """In units of π: 1 is the fastest change that the feature map can hold."""
    delta_log_amplitude: float
    """Minus that of the constant part."""
    n: int


@dataclass(frozen=True)
class SimilarityLine:
    """Linear CKA between a layer of one model and one of another; None where one is the same for all images."""

    model_a: str
    layer_a: str
    model_b: str
    layer_b: str
    cka: float | None
    n: int
