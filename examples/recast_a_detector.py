"""Recast the backbone of a detector of torchvision, train it on your boxes, and save it.

    python examples/recast_a_detector.py photos annotations.json --steps 500    # COCO's format; photos/IMAGE

The network starts with the boxes that it had. Prints the loss, and if attention is at work; writes the weights with
their plan, which `recast.load(FILE, parent=…)` puts into the same detector.
"""

from __future__ import annotations

import argparse
import copy
import json
from itertools import cycle, islice
from pathlib import Path

import torch
from PIL import Image
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.transforms.functional import to_tensor

import recast


def examples(folder: Path, annotations: Path) -> tuple[list[tuple[Path, dict[str, torch.Tensor]]], list[str]]:
    """Return files with their boxes and labels, and the names of the classes; label 0 is the background."""
    content = json.loads(annotations.read_text(encoding="utf-8"))
    labels = {each["id"]: number for number, each in enumerate(content["categories"], start=1)}
    boxes_of: dict[int, list[tuple[list[float], int]]] = {image["id"]: [] for image in content["images"]}
    for each in content["annotations"]:
        x, y, width, height = each["bbox"]
        if width > 0 and height > 0:
            boxes_of[each["image_id"]].append(([x, y, x + width, y + height], labels[each["category_id"]]))
    targets = [
        (
            folder / image["file_name"],
            {
                "boxes": torch.tensor([box for box, _ in boxes_of[image["id"]]], dtype=torch.float32).reshape(-1, 4),
                "labels": torch.tensor([label for _, label in boxes_of[image["id"]]], dtype=torch.int64),
            },
        )
        for image in content["images"]
    ]
    return targets, [each["name"] for each in content["categories"]]


def main() -> None:
    """Recast, train and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("annotations", type=Path)
    parser.add_argument("--checkpoint", help="weights of the detector; without it they are random")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--out", default="detector.safetensors")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    targets, classes = examples(options.folder, options.annotations)
    parent = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=len(classes) + 1)
    if options.checkpoint:
        parent.load_state_dict(torch.load(options.checkpoint, weights_only=True))
    parent = parent.to(device).eval()

    def load(file: Path) -> torch.Tensor:
        with Image.open(file) as image:
            return to_tensor(image.convert("RGB")).to(device)

    example = ([load(targets[0][0])],)  # a detector takes a list of images
    plan = recast.plan(parent, example)  # the last stage of the backbone
    print(plan)
    child = recast.recast_(copy.deepcopy(parent), plan)
    result = recast.verify(parent, child, example)
    print(result)
    assert result.ok()
    recast.wake_(child, example)  # its maps depend on the image from the start

    optimizer = torch.optim.AdamW(recast.param_groups(child, lr=1e-4, weight_decay=1e-4))
    child.train()
    for step in range(options.steps):
        chosen = list(islice(cycle(targets), step * options.batch, (step + 1) * options.batch))
        boxes = [{name: value.to(device) for name, value in target.items()} for _, target in chosen]
        losses = child([load(file) for file, _ in chosen], boxes)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}")
    print(recast.awake(child.eval(), example, optimizer))
    recast.save(child, options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
