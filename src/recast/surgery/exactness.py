"""How far a recast network is from its parent, and whether what was compared can show a difference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from recast.errors import listed

TOLERANCE = 1e-5
SIGNAL = 100 * TOLERANCE
"""A layer whose output varies by less than this share of itself proves nothing: an error would be as small."""
TIES = 10_000
"""One prediction in so many may differ: of 300,000 pixels some have two classes that are equal to rounding."""


@dataclass(frozen=True)
class Exactness:
    """How far a child is from its parent. Relative error is max|child − parent| / max|parent| over a tensor; of a
    layer's output, max|parent| is without the bias, so that no bias can hide an error."""

    images: int
    max_relative_error: float
    """Of the outputs."""
    bitwise: bool
    """All outputs are equal, and those of every layer compared."""
    argmax_agreement: float
    """Share of images (of pixels, where a map is predicted) with the same argmax over the first output's channels, 0 to
    1; NaN where there is none to compare."""
    backend: str
    layers: dict[str, float]
    """Relative error of every layer that was compared with the convolution it was."""
    predictions: int = 0
    """Images or pixels whose argmax was compared."""
    signal: dict[str, float] = field(default_factory=dict)
    """For every layer of the plan the share of its output that what varies in its input makes, in the parent: 0 for
    images all of one colour, and for a layer that did not run. For attention pooling, how far moved queries move the
    outputs."""

    def ok(self, tol: float = TOLERANCE) -> bool:
        """Whether this proves that the child is the same function: relative error of outputs and layers within `tol`,
        the same argmax everywhere but for one in 10,000 (ties, among pixels), and a signal in every layer."""
        agree = math.isnan(self.argmax_agreement) or self.differing <= self.predictions // TIES
        worst = max(self.max_relative_error, *self.layers.values(), 0.0)
        return agree and worst <= tol and bool(self.signal) and not self.blind

    @property
    def blind(self) -> list[str]:
        """The layers of which nothing is proved: no signal reached them."""
        return [name for name, share in self.signal.items() if not share > SIGNAL]

    @property
    def differing(self) -> int:
        """Images or pixels with another argmax."""
        return 0 if not math.isfinite(self.argmax_agreement) else round((1 - self.argmax_agreement) * self.predictions)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able fields."""
        return asdict(self)

    def __add__(self, other: Exactness) -> Exactness:
        """Both batches together."""
        images = self.images + other.images
        predictions = self.predictions + other.predictions
        agreement = 1 - (self.differing + other.differing) / predictions if predictions else float("nan")
        return Exactness(
            images,
            max(self.max_relative_error, other.max_relative_error),
            self.bitwise and other.bitwise,
            agreement,
            self.backend,
            _largest(self.layers, other.layers),
            predictions,
            _largest(self.signal, other.signal),
        )

    def __str__(self) -> str:
        how = "bitwise equal" if self.bitwise else f"max relative error {self.max_relative_error:.2e}"
        worst = max(self.layers, key=lambda name: self.layers[name], default="")
        if self.max_relative_error <= TOLERANCE and self.layers.get(worst, 0.0) > TOLERANCE:
            how += f", but {self.layers[worst]:.2e} in {worst or 'the layer'}"
        if not self.signal or self.blind:
            where = listed([name or "the layer" for name in self.blind], 1) if self.blind else "a recast layer"
            how = f"nothing is proved, no signal reached {where} (outputs: {how})"
        if math.isnan(self.argmax_agreement):
            return f"{how} ({self.backend})"
        same = self.predictions - self.differing
        of = "images" if self.predictions == self.images else "pixels"
        return f"{how}; same prediction on {same} of {self.predictions} {of} ({self.backend})"


def _largest(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: max(found.get(name, 0.0) for found in (one, other)) for name in one | other}


def relative_error(a: Tensor, b: Tensor, scale: float | None = None) -> float:
    """max|a − b| / max|b|, or over `scale`; infinite where a value is not finite or the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    if not all(t.is_floating_point() or t.is_complex() for t in (a, b)):
        a, b = a.cpu().double(), b.cpu().double()
    tiny = torch.finfo(b.dtype).tiny
    error = float((a - b).abs().max() / (b.abs().max().clamp_min(tiny) if scale is None else max(scale, tiny)))
    return error if error == error else float("inf")
