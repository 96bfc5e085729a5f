"""Forms of a layer: backends that compute the same, and the choices of `recast.tune_` among them."""

from __future__ import annotations

from typing import NamedTuple


class Forms(NamedTuple):
    """Backends that `recast.tune_` chose for inputs of one size: what runs in eval mode, and in training."""

    device: str
    """Type of the device on which they were timed; they apply only there."""
    size: tuple[int, int]
    """Height and width of the input."""
    inference: str | None
    """None: all heads were closed, so there was nothing to choose."""
    training: str


class Tuned:
    """A layer with a backend, which "auto" chooses among those that `recast.tune_` timed."""

    training: bool
    backend: str
    tuned: tuple[Forms, ...] = ()
    """Choices of `recast.tune_`, one for each size of input, the latest last; dropped by `prune_`."""

    def tuned_form(self, device: str, size: tuple[int, int] | None) -> str | None:
        """Return the form chosen for inputs of this size, or of the size tuned last; None without a choice."""
        for forms in reversed(self.tuned):
            if forms.device == device and (size is None or forms.size == size):
                form = forms.training if self.training else forms.inference
                if form is not None:
                    return form
        return None
