"""Do networks show the known frequency characteristics? Δ log amplitude against depth, trained and random.

    python studies/fourier.py                   # random timm networks on smooth random images
    RECAST_DATA=DIR python studies/fourier.py   # and on photographs; trained CIFAR ResNets beside random ones
    python studies/fourier.py --trends          # the second table again, from the first

Writes results/fourier.csv: a row per network, weights and block with Δ log amplitude at π/3, 2π/3 and π (true
frequencies), and results/fourier_trends.csv: a row per network with Δ(π) of the first and the last block, the slope of
its regression on depth (0 to 1), its rank correlation with depth, and `within`, the mean change from one block to the
next where both have maps of one size: a smaller map has another π. The patch embedding (`stem`) is no block, and of a
transformer's layer the map after both residuals counts. PRS (Lee et al. 2022, Fig. 2) reports a sharp change with
depth for ResNet-50, a smaller one for Swin, none for DeiT and ConViT.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import normalize

from recast.analysis.fourier import FourierCurves, fourier
from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.data.datasets import IMAGENET
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig
from recast.surgery.scales import randomize_scales_

RESULTS = Path(__file__).parents[1] / "results"
CIFAR = {
    "cifar10_resnet20_akamaster": ("cifar_resnet20_a", "cifar10"),
    "cifar10_resnet56_akamaster": ("cifar_resnet56_a", "cifar10"),
    "cifar100_resnet20_chenyaofo": ("cifar_resnet20", "cifar100"),
    "cifar100_resnet56_chenyaofo": ("cifar_resnet56", "cifar100"),
}
RANDOM = ("resnet18", "resnet50", "deit_tiny_patch16_224", "convit_tiny", "swin_tiny_patch4_window7_224")
AT = (10, 20, 30)
"""π/3, 2π/3 and π among `FREQUENCIES`."""
TRUNK = {"stem", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in (0, 1))}
Found = tuple[str, str, str, FourierCurves]


def smooth_images(n: int, size: int) -> Tensor:
    """Random images whose spectrum falls as 1/f, as that of photographs does."""
    generator = torch.Generator().manual_seed(0)
    octaves = (size // 2**k for k in range(1, 7))
    parts = [
        F.interpolate(torch.randn(n, 3, s, s, generator=generator), (size, size), mode="bilinear") * size / s
        for s in octaves
    ]
    images = torch.stack(parts).sum(0)
    return images / images.std()


def random_network(config: ModelConfig, images: Tensor) -> nn.Module:
    """Random weights that tell: a fresh ResNet's blocks are identities, and its norms know nothing of its maps."""
    torch.manual_seed(0)
    return randomize_scales_(build(config), images)


def networks(data: str | None) -> Iterator[Found]:
    """Network, weights, images and its curves."""
    photographs = None
    if data:
        folder = load_data(DataConfig("folder", data_dir=f"{data}/imagenet_sample"))
        photographs = [normalize(images, *map(list, IMAGENET)) for images, _ in Loader(folder.val, 20)][:3]
    for name in RANDOM:
        for images, batches in (("1/f", [smooth_images(20, 224)]), ("ImageNet", photographs)):
            if batches:
                yield name, "random", images, fourier(random_network(ModelConfig(name), batches[0]), batches)
    if data is None or photographs is None:
        return
    yield "resnet18", "ImageNet", "ImageNet", _trunk(data, photographs)
    squeezenet = build(ModelConfig("torchvision:squeezenet1_1", f"{data}/weights/imagenet_squeezenet1_1.safetensors"))
    yield "squeezenet1_1", "ImageNet", "ImageNet", fourier(squeezenet, photographs)
    for weights, (name, dataset) in CIFAR.items():
        val = load_data(DataConfig(dataset, data_dir=f"{data}/{dataset}", num_train=100, num_val=500))
        trained = build(ModelConfig(name, f"{data}/weights/{weights}.safetensors"), num_classes=len(val.classes))
        known = input_defaults(trained) or val
        images = [normalize(batch, list(known.mean), list(known.std)) for batch, _ in Loader(val.val, 100)]
        yield name, weights, dataset, fourier(trained, images)
        yield name, "random", dataset, fourier(random_network(ModelConfig(name), images[0]), images)


def _trunk(data: str, images: list[Tensor]) -> FourierCurves:
    """The trained ResNet-18 of which the first three stages are known: only they are read."""
    from safetensors.torch import load_file

    network: nn.Module = timm.create_model("resnet18")
    tensors = load_file(f"{data}/weights/imagenet_resnet18_trunk_fp16.safetensors")
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=False)
    whole = fourier(network, images)
    kept = tuple(curve for curve in whole.curves if curve.block in TRUNK)
    return FourierCurves(kept, {}, whole.mode, whole.n)


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def spearman(values: np.ndarray) -> float:
    """Rank correlation with the order."""
    return float(np.corrcoef(ranks(values), np.arange(len(values)))[0, 1])


Row = dict[str, str]


def blocks_of(rows: Sequence[Row]) -> list[Row]:
    """Those of a network's rows that stand for a whole block."""
    names = {row["block"] for row in rows}
    return [row for row in rows if row["block"] != "stem" and row["block"].rpartition(".")[0] not in names]


def trend(rows: Sequence[Row]) -> list[float]:
    """First and last Δ(π), its slope over depth, its rank correlation, and the mean step within a size."""
    at_pi = np.array([float(row["pi"]) for row in rows])
    depth = np.linspace(0, 1, len(at_pi))
    steps = [at_pi[i + 1] - at_pi[i] for i in range(len(at_pi) - 1) if rows[i]["size"] == rows[i + 1]["size"]]
    return [at_pi[0], at_pi[-1], np.polyfit(depth, at_pi, 1)[0], spearman(at_pi), float(np.mean(steps))]


def measure() -> None:
    """Write fourier.csv."""
    with (RESULTS / "fourier.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("network", "weights", "images", "n", "block", "size", "depth", "third_pi", "two_thirds_pi", "pi")
        )
        for network, weights, images, found in networks(os.environ.get("RECAST_DATA")):
            for number, curve in enumerate(found.curves):
                size = f"{curve.size[0]}x{curve.size[1]}"
                depth = number / (len(found.curves) - 1)
                values = [f"{curve.delta[i]:.3f}" for i in AT]
                writer.writerow((network, weights, images, found.n, curve.block, size, f"{depth:.3f}", *values))
            print(network, weights, images, flush=True)


def main() -> None:
    """Write both files, the second from the first."""
    if "--trends" not in sys.argv[1:]:
        measure()
    with (RESULTS / "fourier.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    about = ("network", "weights", "images", "n")
    with (RESULTS / "fourier_trends.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*about, "blocks", "first", "last", "slope", "spearman", "within"))
        for network, rows in groupby(found, key=lambda row: [row[name] for name in about]):
            blocks = blocks_of(list(rows))
            writer.writerow((*network, len(blocks), *(f"{value:.3f}" for value in trend(blocks))))


if __name__ == "__main__":
    main()
