"""attention.npz of a run folder: what the heads look at in a few images."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recast.errors import RecastError


@dataclass(frozen=True)
class AttentionLayer:
    """The mixed attention maps of one layer for one query pixel."""

    name: str
    mix: np.ndarray
    """(N, heads, h, w) over the layer's input grid; negative values are possible with the linear gate."""
    query: tuple[int, int]
    """Row and column of the query in that grid."""
    gate: np.ndarray
    """(heads,) share of content attention."""
    kernel: tuple[int, int]


@dataclass(frozen=True)
class Attention:
    """What a few images look like to every head."""

    images: np.ndarray
    """(N, H, W, 3) uint8."""
    labels: list[str]
    predictions: list[str]
    layers: list[AttentionLayer]


def read_attention(path: Path) -> Attention:
    """Raises RecastError for a truncated file, a missing array, or one of another shape."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        images = arrays["images"]
        if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
            raise RecastError(f"{path}: images must be uint8 (N, H, W, 3), got {images.dtype} {images.shape}")
        classes = [str(name) for name in arrays["classes"]]
        layers = []
        for index, name in enumerate(arrays["layers"]):
            mix, gate = arrays[f"mix_{index}"], arrays[f"gate_{index}"]
            if mix.ndim != 4 or mix.shape[:2] != (len(images), len(gate)) or 0 in mix.shape:
                expected = f"(images, heads, h, w) = ({len(images)}, {len(gate)}, h, w)"
                raise RecastError(f"{path}: mix_{index} must be {expected}, got {mix.shape}")
            row, column = (int(value) for value in arrays[f"query_{index}"])
            kh, kw = (int(value) for value in arrays[f"kernel_{index}"])
            layers.append(AttentionLayer(str(name), mix.astype(np.float32), (row, column), gate, (kh, kw)))
        labels = [_class_name(classes, int(label)) for label in arrays["labels"]]
        predictions = [_class_name(classes, int(label)) for label in arrays["predictions"]]
        if not len(labels) == len(predictions) == len(images):
            raise RecastError(f"{path}: {len(images)} images, {len(labels)} labels, {len(predictions)} predictions")
    except KeyError as error:
        raise RecastError(f"{path} lacks the array {error.args[0]}") from None
    except RecastError:
        raise
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise RecastError(f"{path} is truncated or not an .npz of attention maps") from error
    return Attention(images, labels, predictions, layers)


def _class_name(classes: list[str], index: int) -> str:
    return classes[index] if 0 <= index < len(classes) else str(index)
