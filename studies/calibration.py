"""Accuracy right after the recast with the paper's soft start (sigmoid gate, α = λ = 1), and what brings it back.

    RECAST_DATA=DIR python studies/calibration.py [--networks cifar100_resnet20_chenyaofo,…] [--variants]

Last stage, 5,000 test images, no fine-tuning. Arms: parent · the paper's start · W_out/σ(λ) · batch-norm statistics
of the last stage measured again on the same training images · calibrated on 1,000 training images. `--variants` adds,
for the CIFAR-100 ResNet-20: 250 and 4,000 images, another ridge, shrinking to zero. Rows are added to
results/calibration.csv as they come.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.layers.config import RecastConfig
from recast.layers.gpsa import gpsa_layers
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig
from recast.surgery.apply import recast_
from recast.surgery.calibrate import calibrate_
from recast.surgery.planning import plan

RESULT = Path(__file__).parents[1] / "results" / "calibration.csv"
HEADER = ("network", "arm", "train_images", "ridge", "shrink_to", "top1", "loss_to_parent", "seconds")
NETWORKS = {
    "cifar10_resnet20_akamaster": ("cifar_resnet20_a", "cifar10"),
    "cifar100_resnet20_chenyaofo": ("cifar_resnet20", "cifar100"),
    "cifar10_resnet56_akamaster": ("cifar_resnet56_a", "cifar10"),
    "cifar100_resnet56_chenyaofo": ("cifar_resnet56", "cifar100"),
}
Row = tuple[object, ...]


@torch.no_grad()
def accuracy(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Top-1 in percent."""
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)
    return 100 * right / sum(len(labels) for _, labels in batches)


@torch.no_grad()
def measure_batch_norm_again(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """A copy whose last stage's running statistics are those of `batches`."""
    model = copy.deepcopy(model).eval()
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and name.startswith("layer3"):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    for images in batches:
        model(images)
    return model.eval()


def rows(weights: str, variants: bool) -> Iterator[Row]:
    """The arms of one network."""
    name, dataset = NETWORKS[weights]
    root = Path(os.environ["RECAST_DATA"])
    torch.manual_seed(0)
    data = load_data(DataConfig(dataset, data_dir=str(root / dataset), num_train=4000))
    parent = build(ModelConfig(name, str(root / "weights" / f"{weights}.safetensors")), num_classes=len(data.classes))
    known = input_defaults(parent.eval()) or data

    def normalised(images: Tensor) -> Tensor:
        return normalize(images, list(known.mean), list(known.std))

    val = [(normalised(images), labels) for images, labels in Loader(data.val, 250)]
    train = [normalised(images) for images, _ in Loader(data.train.plain(), 250, shuffle_seed=0)]
    base = accuracy(parent, val)
    start = recast_(copy.deepcopy(parent), plan(parent, val[0][0][:1], RecastConfig(gate="sigmoid")))

    def row(
        arm: str, model: nn.Module, images: object = "", ridge: object = "", to: object = "", seconds: object = ""
    ) -> Row:
        top1 = accuracy(model, val)
        return weights, arm, images, ridge, to, f"{top1:.2f}", f"{base - top1:.2f}", seconds

    def calibrated(count: int, ridge: float, to_kernel: bool) -> Row:
        child, started = copy.deepcopy(start), time.perf_counter()
        calibrate_(child, parent, train[: count // 250], ridge, shrink_to_kernel=to_kernel)
        seconds = f"{time.perf_counter() - started:.0f}"
        return row("calibrated", child, count, ridge, "kernel/share" if to_kernel else "zero", seconds)

    yield row("parent", parent)
    yield row("paper start", start)
    divided = copy.deepcopy(start)
    for layer in gpsa_layers(divided).values():
        layer.weight.data /= torch.sigmoid(layer.lam.data).view(1, 1, *layer.geometry.kernel)
    yield row("W_out / sigma", divided)
    yield row("batch norm measured again", measure_batch_norm_again(start, train[:4]), 1000)
    yield calibrated(1000, 1e-4, True)
    if variants:
        for count, ridge, to_kernel in ((250, 1e-4, True), (4000, 1e-4, True), (1000, 1e-2, True), (1000, 1e-2, False)):
            yield calibrated(count, ridge, to_kernel)


def main() -> None:
    """Add the rows of the networks asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    RESULT.parent.mkdir(exist_ok=True)
    new = not RESULT.exists()
    with RESULT.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(HEADER)
        for network in options.networks.split(","):
            for row in rows(network, options.variants and network == "cifar100_resnet20_chenyaofo"):
                writer.writerow(row)
                file.flush()
                print(*row, flush=True)


if __name__ == "__main__":
    main()
