"""On which grid of the image do tokens lie? Found by watching convolutions: a patch embedding is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from recast.analysis.blocks import MAX_PREFIX
from recast.layers.cmhsa import RecastLayer


class Grids:
    """Sizes of the maps of whole images that a forward pass has made so far."""

    def __init__(self) -> None:
        self.batch: int | None = None
        """Images that the network was given, where it was called as a whole."""
        self._image: tuple[int, int] | None = None
        self._seen: dict[tuple[int, int], None] = {}

    def begin(self, image: Any) -> None:
        """A new pass, over these images."""
        self._seen.clear()
        is_image = isinstance(image, Tensor) and image.dim() == 4
        self.batch = image.shape[0] if is_image else None
        self._image = (image.shape[2], image.shape[3]) if is_image else None

    def see(self, output: Any) -> None:
        """Remember a map (B, C, h, w); anything else is none, and so is one of each window or patch."""
        if isinstance(output, Tensor) and output.dim() == 4 and self.batch in (None, output.shape[0]):
            size = (output.shape[2], output.shape[3])
            self._seen.pop(size, None)  # the latest comes last
            self._seen[size] = None

    def of(self, batch: int, tokens: int, max_prefix: int = MAX_PREFIX) -> tuple[int, int] | None:
        """Rows and columns of the latest map that has as many pixels as there are tokens, or up to `max_prefix` fewer:
        class, distillation and register tokens come before the patches. None where no map fits."""
        if self.batch not in (None, batch):
            return None
        fits = (size for size in reversed(self._seen) if 0 <= tokens - size[0] * size[1] <= max_prefix)
        return next(fits, None)

    def of_patches(self, batch: int, patches: int) -> tuple[int, int] | None:
        """Rows and columns of so many patches: those of a map that fits, else the grid of the image's own shape, one
        stride for both directions (later stages of LeViT and MViT make no maps). None where there is neither."""
        if (found := self.of(batch, patches, max_prefix=0)) is not None or self._image is None:
            return found
        height, width = self._image
        rows = math.isqrt(patches * height // width)
        fits = [r for r in (rows, rows + 1) if r and patches % r == 0 and r * width == patches // r * height]
        return (fits[0], patches // fits[0]) if fits else None


@contextmanager
def watched_grids(model: nn.Module) -> Iterator[Grids]:
    """Note the maps that every convolution of `model` makes (and every layer that was one)."""
    grids = Grids()

    def begin(_module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        grids.begin(next(iter((*inputs, *named.values())), None))

    def see(_module: nn.Module, _inputs: Any, output: Any) -> None:
        grids.see(output)

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | RecastLayer):
                stack.callback(module.register_forward_hook(see).remove)
        yield grids
