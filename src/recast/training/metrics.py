"""What is written down every epoch: loss and accuracy on the validation images, and where the gates are."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recast.data import Data, loader
from recast.errors import RecastError
from recast.run.files import write_text
from recast.surgery.apply import gpsa_layers
from recast.training.distributed import process_count, process_number, sum_over_processes
from recast.training.signals import Stop, Stopped

BadImage = Literal["stop", "skip"]


def normalise(pixels: Tensor, data: Data) -> Tensor:
    """(x − mean) / std for pixels (B, C, H, W) in [0, 1]."""
    mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    return (pixels - mean) / std


@torch.no_grad()
def measure(
    model: nn.Module,
    data: Data,
    batch_size: int,
    device: torch.device,
    workers: int = 0,
    bad_image: BadImage = "stop",
    stop: Stop | None = None,
    left_out: list[str] | None = None,
) -> tuple[float, float]:
    """Mean cross-entropy and top-1 in percent over `data.val`, in full precision; leaves the model in eval mode.

    Several processes share the images, each is counted once. `stop` ends a measurement of one process early;
    `left_out` is given the names of images that cannot be read (`bad_image="skip"`).
    Raises RecastError if the model does not give one number per class, or there is nothing to measure on;
    Stopped when it was asked to stop.
    """
    model.eval()
    classes, totals = len(data.classes), torch.zeros(3, dtype=torch.float64)  # loss, correct, images
    source = loader(
        data.val, batch_size, workers=workers, part=process_number(), parts=process_count(), bad_image=bad_image
    )
    for images, labels in source:
        if stop is not None and stop.requested and process_count() == 1:
            raise Stopped
        logits = model(normalise(images.to(device), data))
        check_logits(logits, len(images), classes, data.name)
        loss = F.cross_entropy(logits.cpu().double(), labels, reduction="sum").item()
        totals += torch.tensor([loss, int((logits.argmax(1).cpu() == labels).sum()), len(labels)], dtype=torch.float64)
    for name in source.bad_images:
        warnings.warn(f"{name} cannot be read: it is left out of the validation", stacklevel=2)
    if left_out is not None:
        left_out += source.bad_images
    loss, correct, images_seen = sum_over_processes(totals, device).tolist()
    if images_seen == 0:
        raise RecastError(f"{data.name} has no validation images: nothing could be measured")
    return loss / images_seen, 100 * correct / images_seen


def check_logits(logits: Any, images: int, classes: int, dataset: str) -> None:
    """Raise RecastError unless `logits` is a tensor (images, classes)."""
    if not isinstance(logits, Tensor) or logits.shape != (images, classes):
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise RecastError(
            f"the model must give logits of shape {(images, classes)} (images, classes of {dataset}), got {got}: "
            "set model.num_classes, or choose the data the model was trained on"
        )


@torch.no_grad()
def gates_and_spans(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Per GPSA layer: its gate, which code runs, the gates of every head (`GPSA.gates`) and the spans 1/α."""
    return {
        name: {
            "gate": layer.config.gate,
            "backend": layer.chosen_backend(),
            **{gate: values.tolist() for gate, values in layer.gates().items()},
            "span": layer.spans().tolist(),
        }
        for name, layer in gpsa_layers(model).items()
    }


class MetricsLog:
    """metrics.jsonl: one JSON object per epoch, epoch 0 measured before any training. On disk as soon as it is
    known."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows; a line that a crash cut off is left out."""
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def keep_before(self, epoch: int) -> list[dict[str, Any]]:
        """Drop the rows of `epoch` and later, which a resumed run writes again; returns those that stay."""
        rows = [row for row in self.rows() if row["epoch"] < epoch]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        return rows
