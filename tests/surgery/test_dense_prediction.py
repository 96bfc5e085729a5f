"""Detection: Mask R-CNN with FPN keeps its feature maps and head outputs.

Boxes after NMS are compared only where they are bitwise: one more ulp in a score picks another box, in the parent too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn

from recast.lab.scales import randomize_scales_
from recast.layers.gpsa import gpsa_layers
from recast.surgery.apply import recast_
from recast.surgery.exactness import TOLERANCE, relative_error
from recast.surgery.plan import Plan
from recast.surgery.planning import plan
from recast.surgery.verify import swapped_heads, trace, verify
from recast.tracing.examples import Example, run_example

Size = tuple[int, int]
SIZE: Size = (224, 320)


def mask_rcnn(size: Size, **options: Any) -> MaskRCNN:
    """Random and telling; it takes images of `size` as they are, and keeps few boxes."""
    options = {"rpn_post_nms_top_n_test": 50, "box_detections_per_img": 8} | options
    model = maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, min_size=min(size), max_size=max(size), **options
    )
    return randomize_scales_(model).eval()


class Heads(nn.Module):
    """What a Mask R-CNN computes before boxes are picked: pyramid, RPN head, the mask head on given RoI features."""

    def __init__(self, model: MaskRCNN) -> None:
        super().__init__()
        self.backbone, self.rpn_head = model.backbone, model.rpn.head
        self.mask_head, self.mask_predictor = model.roi_heads.mask_head, model.roi_heads.mask_predictor

    def forward(self, image: Tensor, rois: Tensor) -> dict[str, Tensor]:
        maps = self.backbone(image)
        objectness, deltas = self.rpn_head(list(maps.values()))
        outputs = {f"map {name}": value for name, value in maps.items()}
        outputs |= {f"objectness {i}": value for i, value in enumerate(objectness)}
        outputs |= {f"deltas {i}": value for i, value in enumerate(deltas)}
        return outputs | {"masks": self.mask_predictor(self.mask_head(rois))}


def heads_example(size: Size) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 3, *size), torch.randn(1, 256, 14, 14)


def names_of(planned: Plan) -> list[str]:
    return [step.name for step in planned.steps]


@contextmanager
def swapped_in(child: nn.Module, name: str) -> Iterator[None]:
    """`swapped_heads` for a layer by name."""
    weight = gpsa_layers(child)[name].weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, :, 0, 0], weight[:, :, -1, -1] = kept[:, :, -1, -1], kept[:, :, 0, 0]
        yield
        weight.copy_(kept)


def check(parent: nn.Module, example: Example, planned: Plan) -> nn.Module:
    """Bitwise in `split`, to rounding in `dense`, and both controls must fail; returns the recast model."""
    assert all(step.exact for step in planned.steps)
    child = recast_(copy.deepcopy(parent), planned)
    before = trace(parent, planned, example)
    split = verify(before, child, example)
    assert split.bitwise, split
    assert split.layers == dict.fromkeys(names_of(planned), 0.0)
    rounded = verify(before, child, example, backend="dense")
    assert rounded.backend == "dense"
    assert rounded.max_relative_error <= TOLERANCE, rounded
    assert 0 < max(rounded.layers.values()) <= TOLERANCE, rounded.layers
    for control in (swapped_heads(child), swapped_in(child, planned.steps[-1].name)):
        with control:
            moved = verify(before, child, example)
        assert moved.max_relative_error > 100 * TOLERANCE, "a recast layer does not reach the output"
    return child


@torch.no_grad()
def test_pyramid_rpn_head_and_mask_head() -> None:
    parent, example = Heads(mask_rcnn(SIZE)).eval(), heads_example(SIZE)
    planned = plan(parent, example, where="all")
    assert {"mask_head.0.0", "mask_head.3.0", "mask_predictor.conv5_mask"} <= set(names_of(planned))
    assert planned.steps[-1].geometry.is_transposed
    assert "tokens" in {item.name: item.reason for item in planned.left}["rpn_head.conv.0.0"]
    child = check(parent, example, planned)
    pyramid_behind = {"map 3", "map pool", *(f"{kind} {i}" for kind in ("objectness", "deltas") for i in (3, 4))}
    expected = run_example(parent, example)
    for layer, behind in (("backbone.fpn.layer_blocks.3.0", pyramid_behind), ("mask_head.1.0", {"masks"})):
        with swapped_in(child, layer):
            outputs = run_example(child, example)
        errors = {name: relative_error(outputs[name], value) for name, value in expected.items()}
        assert {name for name, error in errors.items() if error > 100 * TOLERANCE} == behind
        assert all(error == 0 for name, error in errors.items() if name not in behind)


def test_a_head_shared_by_all_levels_of_a_pyramid() -> None:
    size = (96, 160)
    parent, example = Heads(mask_rcnn(size)).eval(), heads_example(size)
    planned = plan(parent, example, where=["rpn_head.conv.*"], budget=1200)
    (step,) = planned.steps
    assert (step.calls, step.output, step.keys) == (5, (256, 24, 40), 26 * 42)
    # 24×40, 12×20, 6×10, 3×5 and, pooled, 2×3
    assert step.before.macs == 256 * 256 * 9 * (960 + 240 + 60 + 15 + 6)
    check(parent, example, planned)


WHOLE = ["backbone.body.layer4.*.conv2", "backbone.fpn.layer_blocks.*", "roi_heads.mask*"]


def test_a_whole_detection_model() -> None:
    model, image = mask_rcnn(SIZE), torch.rand(3, *SIZE)
    example = ([image],)
    planned = plan(model, example, where=WHOLE)
    assert planned.note.startswith("planned from one real pass in eval mode")  # NMS has no shape of its own
    assert planned.before.parameters == sum(p.numel() for p in model.parameters())
    alone = plan(model.backbone, image[None])
    assert {name.removeprefix("backbone.") for name in names_of(planned)} >= set(names_of(alone))
    child = recast_(copy.deepcopy(model), planned)
    assert planned.after.parameters == sum(p.numel() for p in child.parameters())
    before = trace(model, planned, example)
    assert verify(before, child, example).bitwise  # after NMS and pasting too
    with swapped_heads(child):
        assert verify(before, child, example).max_relative_error > 100 * TOLERANCE


def test_an_image_without_detections() -> None:
    size = (96, 160)
    model, example = mask_rcnn(size, box_score_thresh=1.1), ([torch.rand(3, *size)],)
    planned = plan(model, example, where=[*WHOLE, "backbone.body.layer3.*"])
    costs = {step.name: step.after.macs for step in planned.steps}
    assert {name for name, macs in costs.items() if macs == 0} == {n for n in costs if n.startswith("roi_heads")}
    exactness = verify(model, recast_(copy.deepcopy(model), planned), example)
    assert exactness.bitwise
    assert not exactness.ok()  # without a box the heads saw nothing, which proves nothing about them
    assert exactness.blind == [name for name, macs in costs.items() if macs == 0]
