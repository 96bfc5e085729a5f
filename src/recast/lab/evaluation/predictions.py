"""What the models say of the same images, side by side: masks, or boxes and the masks in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from colorsys import hsv_to_rgb

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from recast.lab.data.pairs import IGNORE
from recast.lab.evaluation.context import Batch, Context, Source, sampled

SURE, ENLARGED = 0.5, 256
"""Score from which on a detection is drawn; side in pixels up to which small images are enlarged for boxes."""
GAP = ((2, 2), (2, 2), (0, 0))
"""White pixels around a panel."""


def draw_predictions(context: Context, count: int = 6, among: int = 64) -> Image.Image:
    """Image, truth and every model's prediction side by side, a row an image: of the first `among` images those of
    which the last two models (the fine-tuned parent, the recast network) say most different things."""
    panels = {"segment": _of_masks, "detect": _of_objects}[context.data.task]
    rows: list[tuple[float, list[np.ndarray]]] = []
    for batch in context.batches(Source(sampled(context.data.val, among))):
        rows += panels(batch)
    chosen = sorted(rows, key=lambda row: -row[0])[:count]
    framed = [[np.pad(panel, GAP, constant_values=1) for panel in row] for _, row in chosen]
    grid = np.concatenate([np.concatenate(row, 1) for row in framed])
    return Image.fromarray((grid * 255).round().astype(np.uint8))


def _colours(classes: int) -> np.ndarray:
    return np.stack([hsv_to_rgb(0.618 * hue % 1, 0.75, 0.95 - 0.4 * (hue % 2)) for hue in range(classes)])


def _of_masks(batch: Batch) -> Iterator[tuple[float, list[np.ndarray]]]:
    """How much the last two models differ, and the panels, of every image. What is ignored is white."""
    colours = _colours(len(batch.context.data.classes))
    palette = np.concatenate([np.zeros((1, 3)), colours[1:], np.ones((IGNORE + 1 - len(colours), 3))])
    said = torch.stack([batch.context.maps(name, batch.images).argmax(1) for name in batch.models], 1).cpu()
    for image, mask, predicted in zip(batch.images.cpu(), batch.labels.cpu(), said, strict=True):
        differ = float((predicted[-1] != predicted[-2:]).any(0).double().mean())
        maps = [palette[values.numpy()] for values in (mask, *predicted)]
        yield differ, [image.permute(1, 2, 0).numpy(), *maps]


def _of_objects(batch: Batch) -> Iterator[tuple[float, list[np.ndarray]]]:
    """The same of boxes; models differ by the pixels of classes that one sees and another does not."""
    classes = len(batch.context.data.classes)
    said = [batch.context.objects(name, batch.images) for name in batch.models]
    for image, truth, *predicted in zip(batch.images.cpu(), batch.labels, *said, strict=True):
        seen = []
        for one in predicted:
            covered = torch.zeros(classes + 1, *image.shape[1:], dtype=torch.bool)
            for box, label, _ in _sure(one):
                left, top, right, bottom = (round(side) for side in box)
                covered[label, top:bottom, left:right] = True
            seen.append(covered)
        differ = float(torch.stack([(one != seen[-1]).any(0) for one in seen[-2:]]).any(0).double().mean())
        yield differ, [_drawn(image, one, classes) for one in ({}, truth, *predicted)]


def _sure(found: Mapping[str, Tensor]) -> Iterator[tuple[list[float], int, Tensor | None]]:
    if not found:
        return
    masks = found.get("masks")
    for index, label in enumerate(found["labels"].tolist()):
        if "scores" not in found or found["scores"][index] >= SURE:
            mask = None if masks is None else masks[index].reshape(masks.shape[-2:]).cpu()
            yield found["boxes"][index].tolist(), label, mask


def _drawn(image: Tensor, found: Mapping[str, Tensor], classes: int) -> np.ndarray:
    """The image with boxes in the colours of their classes, and masks below them."""
    colours, pixels = _colours(classes + 1), image.permute(1, 2, 0).double().numpy().copy()
    for _, label, mask in _sure(found):
        if mask is not None:
            pixels[mask.numpy() > 0.5] = 0.5 * pixels[mask.numpy() > 0.5] + 0.5 * colours[label]
    factor = max(1, ENLARGED // len(pixels))
    picture = Image.fromarray((pixels.repeat(factor, 0).repeat(factor, 1) * 255).round().astype(np.uint8))
    brush = ImageDraw.Draw(picture)
    for box, label, _ in _sure(found):
        brush.rectangle([side * factor for side in box], outline=tuple((colours[label] * 255).astype(int)), width=2)
    return np.asarray(picture) / 255
