"""Distance of a recast network from its parent, and whether the comparison can show a difference."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from recast.errors import listed

TOLERANCE = 1e-5
SIGNAL = 100 * TOLERANCE
"""A layer whose output varies by less than this share of itself proves nothing: an error would be as small."""
TIES = 10_000
"""One prediction in so many may differ: of 300,000 pixels some have two classes that are equal to rounding."""


@dataclass(frozen=True)
class Exactness:
    """Distance of a child from its parent, in relative errors (`compare.relative_error`).

    For a layer's output, max|parent| is without the bias, so that no bias can hide an error.
    """

    images: int
    max_relative_error: float
    """Of the outputs."""
    bitwise: bool
    """All outputs are equal, and those of every layer compared."""
    argmax_agreement: float
    """Share of images (pixels if a map is predicted) with the same argmax over the first output's channels, 0 to 1; NaN
    if there is nothing to compare."""
    backend: str
    layers: dict[str, float]
    """Relative error of every layer that was compared with its convolution."""
    predictions: int = 0
    """Images or pixels whose argmax was compared."""
    signal: dict[str, float] = field(default_factory=dict)
    """Share of every planned layer's output that varies with its input, in the parent: 0 for images of one colour, and
    for a layer that did not run. For attention pooling, how much shifted queries change the outputs."""
    worst: str = ""
    """Output and channel (class) with the largest error; empty if all are equal."""
    control: Exactness | None = None
    """The same comparison with a child that is known to differ; it must detect that (`recast.verify(control=True)`)."""

    def ok(self, tol: float = TOLERANCE) -> bool:
        """Return True if child and parent are shown to be the same function.

        Outputs and layers must have relative errors within `tol`, the argmax may differ in one of 10,000 (ties among
        pixels), and a signal must reach every layer.
        """
        agree = math.isnan(self.argmax_agreement) or self.differing <= self.predictions // TIES
        exact = all(error <= tol for error in (self.max_relative_error, *self.layers.values()))  # NaN is not
        return agree and exact and bool(self.signal) and not self.blind

    @property
    def blind(self) -> list[str]:
        """Layers that no signal reached: the comparison shows nothing there."""
        return [name for name, share in self.signal.items() if not share > SIGNAL]

    @property
    def telling(self) -> Literal["outputs", "layers", ""]:
        """Place where the control differed: in the outputs, only in the layers, or none (inconclusive)."""
        if self.control is None:
            return ""
        if self.control.max_relative_error > SIGNAL:
            return "outputs"
        return "layers" if max(self.control.layers.values(), default=0.0) > SIGNAL else ""

    @property
    def differing(self) -> int:
        """Number of images or pixels with a different argmax."""
        return 0 if not math.isfinite(self.argmax_agreement) else round((1 - self.argmax_agreement) * self.predictions)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, `control` only if that comparison was made."""
        values = asdict(self) | {"control": self.control and self.control.to_dict()}
        return {name: value for name, value in values.items() if name != "control" or value is not None}

    def __add__(self, other: Exactness) -> Exactness:
        """Return the result for both batches together."""
        images = self.images + other.images
        predictions = self.predictions + other.predictions
        agreement = 1 - (self.differing + other.differing) / predictions if predictions else float("nan")
        return Exactness(
            images,
            _larger(self.max_relative_error, other.max_relative_error),
            self.bitwise and other.bitwise,
            agreement,
            self.backend,
            {n: _larger(self.layers.get(n, 0.0), other.layers.get(n, 0.0)) for n in self.layers | other.layers},
            predictions,
            {n: max(shares.get(n, 0.0) for shares in (self.signal, other.signal)) for n in self.signal | other.signal},
            other.worst if self.max_relative_error < other.max_relative_error else self.worst,
            self.control + other.control if self.control and other.control else None,
        )

    def __str__(self) -> str:
        how = "bitwise equal" if self.bitwise else f"max relative error {self.max_relative_error:.2e}"
        if self.worst and not self.max_relative_error <= TOLERANCE:
            how += f" ({self.worst})"
        worst = max(self.layers, key=lambda name: self.layers[name], default="")
        if self.max_relative_error <= TOLERANCE and self.layers.get(worst, 0.0) > TOLERANCE:
            how += f", but {self.layers[worst]:.2e} in {worst or 'the layer'}"
        if not self.signal or self.blind:
            where = listed([name or "the layer" for name in self.blind], 1) if self.blind else "a recast layer"
            how = f"inconclusive: no signal reached {where} (outputs: {how})"
        if math.isnan(self.argmax_agreement):
            return f"{how} ({self.backend})"
        same = self.predictions - self.differing
        of = "images" if self.predictions == self.images else "pixels"
        return f"{how}; same prediction on {same} of {self.predictions} {of} ({self.backend})"


def _larger(a: float, b: float) -> float:
    return a if a >= b or a != a else b  # NaN is larger than any number
