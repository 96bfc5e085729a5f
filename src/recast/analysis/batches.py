"""Images as the analyses take them: one tensor, or batches of any kind of loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from recast.errors import RecastError

Images = Tensor | Iterable[Tensor | tuple[Tensor, ...] | list[Tensor]]
"""(B, 3, H, W), or an iterable of such batches, labels beside them or not."""
Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Starts a pass over (images, labels)."""


def each_batch(images: Images) -> Iterator[Tensor]:
    """The batches of images. Raises `RecastError` if there is none, or one that is no batch of images."""
    empty = True
    for batch in (images,) if isinstance(images, Tensor) else images:
        pixels = batch[0] if isinstance(batch, tuple | list) and len(batch) else batch
        if not isinstance(pixels, Tensor) or pixels.dim() != 4 or 0 in pixels.shape:
            got = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
            raise RecastError(f"images are (batch, channels, height, width) tensors, got {got}")
        empty = False
        yield pixels
    if empty:
        raise RecastError("there are no images to look at: the iterable was empty")
