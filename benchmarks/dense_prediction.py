"""Is a recast detection or segmentation network the same function? R-CNNs and RetinaNet with FPN, DeepLabV3, FCN,
UperNet and a U-Net.

    OMP_NUM_THREADS=1 python benchmarks/dense_prediction.py                       # writes results/dense_prediction.csv
    OMP_NUM_THREADS=1 python benchmarks/dense_prediction.py --only 'retinanet*'   # its rows are replaced

Random telling weights, one image, sizes that such networks are used at. Feature maps and head outputs are compared (the
pyramid, the RPN head, the mask head on given RoI features, segmentation logits); `(boxes)` is the whole detector after
NMS with boxes, scores, labels and masks, where one ulp may pick another box: bitwise or not at all. RetinaNet and
Faster R-CNN keep every score, as random weights are sure of nothing.

split_bitwise, split_error   the default form against the parent, max|a − b| / max|b| over all outputs
dense_error                  with all maps written out; `dense_not_run` says why where it is empty
control                      two taps of the first recast layer swapped: must be large, or the row proves nothing
parent_rounding              the parent in fp32 against itself in fp64: what rounding alone does to this network; a
                             dense_error below it is rounding too (DeepLabV3 in fp64 and `dense`: bitwise)
largest_map_mib              the maps of the largest layer in `dense`, heads × queries × tokens in fp32
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from timing import write_table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchvision.models.detection import (
    MaskRCNN,
    fasterrcnn_resnet50_fpn,
    maskrcnn_resnet50_fpn,
    retinanet_resnet50_fpn,
    retinanet_resnet50_fpn_v2,
)
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large, deeplabv3_resnet50, fcn_resnet50

from recast.models.segment import UperNet
from recast.surgery.apply import recast_
from recast.surgery.exactness import relative_error
from recast.surgery.plan import Plan
from recast.surgery.planning import plan
from recast.surgery.scales import randomize_scales_
from recast.surgery.verify import swapped_heads, trace, verify
from recast.tracing.examples import Example, run_example

RESULT = Path(__file__).parents[1] / "results" / "dense_prediction.csv"
HEADER = (
    "network", "size", "selection", "budget", "recast", "left", "largest_map_mib", "split_bitwise", "split_error",
    "dense_error", "dense_not_run", "control", "parent_rounding", "seconds",
)  # fmt: skip
LARGEST_DENSE_MAP = 300 * 2**20
"""`dense` holds several tensors of this size at once, one of them of 8-byte integers."""
Size = tuple[int, int]


class Heads(nn.Module):
    """What a Mask R-CNN computes before boxes are picked: pyramid, RPN head, the mask head on given RoI features."""

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.backbone, self.rpn_head = model.backbone, model.rpn.head
        self.mask_head, self.mask_predictor = model.roi_heads.mask_head, model.roi_heads.mask_predictor

    def forward(self, image: Tensor, rois: Tensor) -> list[Tensor]:
        maps = list(self.backbone(image).values())
        objectness, deltas = self.rpn_head(maps)
        return [*maps, *objectness, *deltas, self.mask_predictor(self.mask_head(rois))]


def block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Two 3×3 convolutions with batch norm."""
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [nn.Conv2d(channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with padded convolutions: every step up is a transposed convolution and a skip."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 21) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(map(block, [3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(w, w // 2, 2, stride=2) for w in widths[:0:-1])
        self.merge = nn.ModuleList(block(w, w // 2) for w in widths[:0:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, down in enumerate(self.down):
            x = down(nn.functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], dim=1))
        return self.head(x)


def detector(make: Callable[..., nn.Module], size: Size, **options: float) -> nn.Module:
    """It takes images of `size` as they are."""
    model = make(weights=None, weights_backbone=None, min_size=min(size), max_size=max(size), **options)
    return randomize_scales_(model).eval()


Case = tuple[str, nn.Module, Example, Size, str, str | None]


def rcnn() -> Iterator[Case]:
    """Mask R-CNN."""
    for size, budget in (((480, 640), None), ((800, 1216), "tokens=4200")):
        model = detector(maskrcnn_resnet50_fpn, size)
        example = torch.randn(1, 3, *size), torch.randn(8, 256, 14, 14)
        heads = ("maskrcnn_resnet50_fpn", Heads(model).eval(), example, size)
        backbone = (f"{heads[0]} (backbone)", model.backbone, torch.randn(1, 3, *size), size)
        yield *backbone, "last_stage", budget
        yield *heads, "all", "tokens=1024"
        yield *heads, "all", "tokens=4200"
        boxes = ["backbone.body.layer4.*", "backbone.fpn.layer_blocks.[23].*", "roi_heads.mask*"]
        whole = (f"{heads[0]} (boxes)", model, ([torch.rand(3, *size)],), size)
        yield *whole, "last_stage", budget
        yield *whole, " ".join(boxes), "tokens=4200"


def boxes(make: Callable[..., nn.Module], **options: float) -> Iterator[Case]:
    """C5; and C4, C5 and the pyramid as far as the budget goes."""
    for size in ((480, 640), (800, 1216)):
        model, example = detector(make, size, **options), ([torch.rand(3, *size)],)
        for where in ("backbone.body.layer4.*", "backbone.body.layer[34].* backbone.fpn.layer_blocks.*"):
            yield f"{make.__name__} (boxes)", model, example, size, where, "tokens=4200"


def upernet() -> Iterator[Case]:
    """The trunk's last stage, and everything within the budget."""
    for size in ((480, 640), (800, 1216)):
        image = torch.randn(1, 3, *size)
        model = randomize_scales_(UperNet("resnet50", 150), torch.randn(2, 3, 64, 64)).eval()
        yield "upernet:resnet50", model, image, size, "body.layer4.*", "tokens=4200"
        yield "upernet:resnet50", model, image, size, "all", "tokens=4200"


def deeplab(build: Callable[..., nn.Module]) -> Iterator[Case]:
    """At two sizes."""
    for size in ((240, 320), (480, 640)):
        # a batch of two, so that the norm of the pooled branch has statistics
        model = randomize_scales_(build(weights=None, weights_backbone=None), torch.randn(2, 3, *size)).eval()
        whole, small = (build.__name__, model, torch.randn(1, 3, *size), size), size == (240, 320)
        if build is deeplabv3_resnet50:
            yield *whole, "last_stage", "tokens=2000" if small else "tokens=6000"
            # all of it with 20,064 tokens would take layer1 too, whose maps are 13 GiB a layer
            yield *whole, "all", "tokens=12000"
            yield *whole, "classifier.*", "tokens=21000"
        else:
            yield *whole, "last_stage", None if small else "tokens=2500"
            yield *whole, "all", "tokens=1024" if small else "tokens=1400"
            yield *whole, "all", "tokens=12000"


def unet() -> Iterator[Case]:
    """At two sizes."""
    for size in ((240, 320), (480, 640)):
        model, x = randomize_scales_(UNet(), torch.randn(2, 3, *size)).eval(), torch.randn(1, 3, *size)
        yield "U-Net", model, x, size, "last_stage", "tokens=1500"
        yield "U-Net", model, x, size, "all", "tokens=1500"
        yield "U-Net", model, x, size, "all", "tokens=5100"


def fcn() -> Iterator[Case]:
    """With its auxiliary head."""
    for size, budget in (((240, 320), "tokens=2000"), ((480, 640), "tokens=6000")):
        model = fcn_resnet50(weights=None, weights_backbone=None, aux_loss=True)
        model = randomize_scales_(model, torch.randn(2, 3, *size)).eval()
        yield "fcn_resnet50", model, torch.randn(1, 3, *size), size, "last_stage", budget


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "maskrcnn_resnet50_fpn": rcnn,
    "fasterrcnn_resnet50_fpn": partial(boxes, fasterrcnn_resnet50_fpn, box_score_thresh=0.0),
    "retinanet_resnet50_fpn": partial(boxes, retinanet_resnet50_fpn, score_thresh=0.0),
    "retinanet_resnet50_fpn_v2": partial(boxes, retinanet_resnet50_fpn_v2, score_thresh=0.0),
    "deeplabv3_resnet50": partial(deeplab, deeplabv3_resnet50),
    "deeplabv3_mobilenet_v3_large": partial(deeplab, deeplabv3_mobilenet_v3_large),
    "U-Net": unet,
    "fcn_resnet50": fcn,
    "upernet:resnet50": upernet,
}


def largest_map(planned: Plan) -> int:
    """Bytes of the attention maps of the layer that has most, all heads of one image."""
    return max(4 * step.geometry.num_heads * step.queries * step.keys for step in planned.steps)


@torch.no_grad()
def rounding(parent: nn.Module, example: Example) -> float:
    """Largest relative error of the parent's outputs against the same in double precision."""
    single = tree_leaves(run_example(parent, example))
    exact = run_example(copy.deepcopy(parent).double(), tree_map_only(Tensor, Tensor.double, example))
    return max(relative_error(a.double(), b.double()) for a, b in zip(single, tree_leaves(exact), strict=True))


def row(
    name: str, model: nn.Module, example: Example, size: Size, where: str, budget: str | None, rounded: float
) -> tuple[object, ...]:
    """Plan, recast and verify; and what it took."""
    started = time.perf_counter()
    planned = plan(model, example, where=where.split(), budget=budget)
    if name.endswith("(boxes)"):
        with torch.no_grad():
            assert len(run_example(model, example)[0]["boxes"]), "no boxes: the row would prove nothing"
    child = recast_(copy.deepcopy(model), planned)
    before = trace(model, planned, example)
    split = verify(before, child, example)
    with swapped_heads(child):
        control = verify(before, child, example).max_relative_error
    dense, reason = "", ""
    if name.endswith("(boxes)"):
        reason = "boxes after NMS"
    elif largest_map(planned) > LARGEST_DENSE_MAP:
        reason = f"maps of {largest_map(planned) / 2**30:.1f} GiB for one layer"
    else:
        dense = f"{verify(before, child, example, backend='dense').max_relative_error:.3g}"
    return (
        name, f"{size[0]}x{size[1]}", where, budget or "tokens=1024", len(planned.steps), len(planned.left),
        f"{largest_map(planned) / 2**20:.0f}", split.bitwise, f"{split.max_relative_error:.3g}", dense, reason,
        f"{control:.3g}", f"{rounded:.3g}", f"{time.perf_counter() - started:.0f}",
    )  # fmt: skip


def main() -> None:
    """Print each row as it comes; the table is written anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help=f"a pattern; of {', '.join(CASES)}")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows: list[tuple[object, ...]] = []
    if RESULT.is_file():
        with RESULT.open(encoding="utf-8", newline="") as file:
            rows = [tuple(found) for found in list(csv.reader(file))[1:] if not fnmatch(found[0].split(" ")[0], only)]
    known: dict[tuple[str, Size], float] = {}
    for name, cases in CASES.items():
        torch.manual_seed(0)  # so that a network's rows are the same without the others
        for of, model, example, size, where, budget in cases() if fnmatch(name, only) else ():
            if (of, size) not in known:
                known[of, size] = rounding(model, example)
            rows.append(row(of, model, example, size, where, budget, known[of, size]))
            print(*rows[-1], flush=True)
            write_table(RESULT, HEADER, rows)


if __name__ == "__main__":
    main()
