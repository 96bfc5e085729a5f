"""What a training step of a detector takes and keeps, recast against not, at the sizes that detectors are trained at.

    OMP_NUM_THREADS=1 python benchmarks/detection_step.py        # writes results/detection_step.csv; an hour
    OMP_NUM_THREADS=1 python benchmarks/detection_step.py --only retinanet 480 640      # its rows are replaced

Faster R-CNN and RetinaNet on a ResNet-50 with a pyramid, built as torchvision fine-tunes them (BatchNorm rests, so do
the stem and the first stage), random weights, one image with 20 objects; a step is forward, backward and SGD. The arms
take turns within one process: of a busy machine take the ratios.

arm         C5: the three 3×3 convolutions of the last stage are recast; C4+C5: those of the last two stages, also with
            `content="linear"`; every head open, content and Gaussian, as it is trained
left        convolutions of these stages that see more than 4,200 tokens: the one with stride 2 into C4
ratio       time of a step over the parent's, median of the ratios within a round; low and high are the least and the
            most of them
saved_mib   what the forward pass keeps for the backward one
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from collections.abc import Callable
from typing import Any

import torch
from timing import RESULTS, by_turns, machine, ratio, write
from torch import Tensor, nn
from torchvision.models import resnet50
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

import recast
from recast.layers.gpsa import gpsa_layers
from recast.tracing.cost import saved_sizes

RESULT = RESULTS / "detection_step.csv"
CASES = (("retinanet", 480, 640), ("fasterrcnn", 800, 1216), ("retinanet", 800, 1216))
C5, C4 = "backbone.body.layer4.*.conv2", "backbone.body.layer3.*.conv2"
ARMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "C5": ([C5], {}),
    "C4+C5": ([C4, C5], {}),
    "C4+C5, linear content": ([C4, C5], {"content": "linear"}),
}


def detector(name: str, height: int, width: int) -> nn.Module:
    """It takes images of that size as they are."""
    torch.manual_seed(0)
    body = resnet50(norm_layer=FrozenBatchNorm2d)
    for key, module in body.named_modules():
        if key.endswith("bn3"):
            module.weight.fill_(0.2)  # the norms measure nothing: without, the signal would grow from block to block
    sizes = {"min_size": min(height, width), "max_size": max(height, width)}
    if name == "fasterrcnn":
        return FasterRCNN(_resnet_fpn_extractor(body, 3), 91, **sizes)
    pyramid = _resnet_fpn_extractor(body, 3, returned_layers=[2, 3, 4], extra_blocks=LastLevelP6P7(2048, 256))
    return RetinaNet(pyramid, 91, **sizes)


def opened(parent: nn.Module, image: Tensor, where: list[str], config: dict[str, Any]) -> tuple[nn.Module, int, int]:
    """The recast detector with every head open; how many layers are recast and left."""
    planned = recast.plan(parent.eval(), ([image],), recast.RecastConfig(**config), where=where, budget="tokens=4200")
    model = recast.recast_(copy.deepcopy(parent), planned)
    with torch.no_grad():
        for layer in gpsa_layers(model).values():
            layer.key.normal_(std=0.02)
            layer.gamma[:], layer.spread[:] = 0.2, 0.3
    recast.refresh_gates_(model)
    return model, len(planned.steps), (3 + 6 * (C4 in where)) - len(planned.steps)


def step_of(model: nn.Module, image: Tensor) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """The loss, and a training step."""
    corners = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor(image.shape[:0:-1]) * 0.8
    targets = [{"boxes": torch.cat([corners, corners + 60], 1), "labels": torch.arange(1, 21)}]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6, momentum=0.9)
    model.train()

    def loss() -> Tensor:
        return sum(model([image], targets).values())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        total = loss()
        assert torch.isfinite(total)
        total.backward()
        optimizer.step()

    return loss, step


def measure(name: str, height: int, width: int, arms: list[str], rounds: int, warm: int) -> list[dict[str, Any]]:
    """A row an arm."""
    parent, image = detector(name, height, width), torch.rand(3, height, width)
    models, counts = {"parent": parent}, {"parent": (0, 0)}
    for arm in arms:
        models[arm], *counts[arm] = opened(parent, image, *ARMS[arm])
    steps = {arm: step_of(model, image) for arm, model in models.items()}
    seconds, rows = by_turns({arm: step for arm, (_, step) in steps.items()}, rounds, warm), []
    for arm, model in models.items():
        with saved_sizes(model) as sizes:
            steps[arm][0]()
        within = [a / b for a, b in zip(seconds[arm], seconds["parent"], strict=True)]
        rows.append(
            {
                "network": f"{name}_resnet50_fpn", "size": f"{height}x{width}", "arm": arm, "recast": counts[arm][0],
                "left": counts[arm][1], "median_s": round(statistics.median(seconds[arm]), 2),
                "ratio": round(ratio(seconds[arm], seconds["parent"]), 3), "low": round(min(within), 3),
                "high": round(max(within), 3), "rounds": rounds, "saved_mib": round(sum(sizes) / 2**20, 1),
                "machine": machine(),
            }
        )  # fmt: skip
        print(*list(rows[-1].values())[:-1], sep=",", flush=True)
    return rows


def main() -> None:
    """All cases, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs=3, metavar=("NETWORK", "HEIGHT", "WIDTH"), help="one case")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    if options.only and RESULT.exists():
        with RESULT.open(encoding="utf-8", newline="") as file:
            kept = f"{options.only[0]}_resnet50_fpn", "x".join(options.only[1:])
            rows = [row for row in csv.DictReader(file) if (row["network"], row["size"]) != kept]
    for name, height, width in CASES:
        if options.only is None or [name, str(height), str(width)] == options.only:
            rows += measure(name, height, width, options.arms, options.rounds, options.warm)
            write(RESULT, rows)


if __name__ == "__main__":
    main()
