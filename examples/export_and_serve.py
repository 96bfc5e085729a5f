"""Export a network of `recast.save` to ONNX, and serve it by ONNX Runtime, without torch in the serving part.

    python examples/export_and_serve.py child.safetensors cat.jpg dog.jpg    # writes child.onnx, prints classes

`recast.export` reads the file back and compares its outputs with the module's.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image

import recast


def export(file: Path, target: Path) -> dict[str, object]:
    """Write the network as ONNX and return what its images are like."""
    model = recast.load(file)
    config = model.pretrained_cfg  # type: ignore[union-attr]
    size = config["input_size"][1:]
    images = torch.randn(4, 3, *size)
    recast.fold_(model, data=images, batch_norm=True)  # closed heads disappear, BatchNorm is multiplied in
    print(recast.export(model, images, target))
    names = config.get("label_names") or [str(number) for number in range(config["num_classes"])]
    return {"size": size, "mean": config["mean"], "std": config["std"], "names": list(names)}


class Server:
    """A classifier in ONNX Runtime: files in, names of classes out."""

    def __init__(self, file: Path, about: dict[str, object]) -> None:
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.about = copy.deepcopy(about)

    def pixels(self, file: Path) -> np.ndarray:
        """Return an image as the network expects it, (3, H, W)."""
        rows, columns = self.about["size"]  # type: ignore[misc]
        with Image.open(file) as image:
            resized = image.convert("RGB").resize((columns, rows), Image.Resampling.BICUBIC)
        scaled = np.asarray(resized, dtype=np.float32) / 255
        return ((scaled - self.about["mean"]) / self.about["std"]).transpose(2, 0, 1).astype(np.float32)

    def classify(self, files: list[Path]) -> list[tuple[str, float]]:
        """Return the likeliest class of every image, and its probability."""
        batch = np.stack([self.pixels(file) for file in files])
        (logits,) = self.session.run(None, {self.session.get_inputs()[0].name: batch})
        weights = np.exp(logits - logits.max(1, keepdims=True))
        shares = weights / weights.sum(1, keepdims=True)
        names = self.about["names"]
        return [(names[row.argmax()], float(row.max())) for row in shares]  # type: ignore[index]


def main() -> None:
    """Export and classify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", type=Path)
    parser.add_argument("images", type=Path, nargs="+")
    options = parser.parse_args()
    target = options.network.with_suffix(".onnx")
    server = Server(target, export(options.network, target))
    for file, (name, share) in zip(options.images, server.classify(options.images), strict=True):
        print(f"{file}: {name} ({share:.0%})")


if __name__ == "__main__":
    main()
