"""Detection: Mask R-CNN with FPN is recast whole, boxes and masks included.

Boxes after NMS are compared only where they are bitwise: one more ulp in a score picks another box, in the parent too.
"""

import copy
from typing import Any

import pytest
import torch
from layer_helpers import PAPERS, InCode
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn

from recast import RecastConfig, plan, recast_, trace, verify
from recast.surgery.controls import changed_layer
from recast.surgery.exactness import TOLERANCE
from recast.surgery.scales import randomize_scales_

WHOLE = ["backbone.body.layer4.*.conv2", "backbone.fpn.layer_blocks.*", "roi_heads.mask*"]


def mask_rcnn(height: int, width: int, **options: Any) -> MaskRCNN:
    """Random and telling; it takes images of one size as they are, and keeps few boxes."""
    few = {"rpn_post_nms_top_n_test": 50, "box_detections_per_img": 8}
    model = maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, min_size=height, max_size=width, **few | options)
    return randomize_scales_(model).eval()


@pytest.mark.parametrize(("config", "keys"), [(None, 24 * 40), (PAPERS, 26 * 42)])
def test_a_head_shared_by_all_levels_of_a_pyramid(config: RecastConfig | None, keys: int) -> None:
    model, image = mask_rcnn(96, 160), torch.randn(1, 3, 96, 160)
    pyramid, head = model.backbone, model.rpn.head
    parent = InCode(lambda m, x: m.head(list(m.backbone(x).values())), backbone=pyramid, head=head).eval()
    planned = plan(parent, image, config, where=["head.conv.*"], max_tokens=1200)
    (step,) = planned.steps
    assert (step.calls, step.output, step.keys) == (5, (256, 24, 40), keys)
    # 24×40, 12×20, 6×10, 3×5 and, pooled, 2×3
    assert step.before.macs == 256 * 256 * 9 * (960 + 240 + 60 + 15 + 6)
    child = recast_(copy.deepcopy(parent), planned)
    assert verify(parent, child, image).bitwise
    assert verify(parent, child, image, backend="dense").ok()


def test_a_whole_detection_model() -> None:
    model, image = mask_rcnn(128, 192), torch.rand(3, 128, 192)
    example = ([image],)
    planned = plan(model, example, where=WHOLE)
    assert planned.note.startswith("costs are those of this example")  # NMS has no shape of its own
    assert any(step.geometry.is_transposed for step in planned.steps)
    assert planned.before.parameters == sum(p.numel() for p in model.parameters())
    alone = plan(model.backbone, image[None])
    names = {step.name.removeprefix("backbone.") for step in planned.steps}
    assert names >= {step.name for step in alone.steps}
    child = recast_(copy.deepcopy(model), planned)
    assert planned.after.parameters == sum(p.numel() for p in child.parameters())
    before = trace(model, planned, example)
    assert verify(before, child, example).bitwise  # after NMS and pasting too
    with changed_layer(child):
        assert verify(before, child, example).max_relative_error > 100 * TOLERANCE


def test_an_image_without_detections() -> None:
    model, example = mask_rcnn(96, 160, box_score_thresh=1.1), ([torch.rand(3, 96, 160)],)
    planned = plan(model, example, where=[*WHOLE, "backbone.body.layer3.*"])
    costs = {step.name: step.after.macs for step in planned.steps}
    assert {name for name, macs in costs.items() if macs == 0} == {n for n in costs if n.startswith("roi_heads")}
    exactness = verify(model, recast_(copy.deepcopy(model), planned), example)
    assert exactness.bitwise
    assert not exactness.ok()  # without a box the heads saw nothing, which proves nothing about them
    assert exactness.blind == [name for name, macs in costs.items() if macs == 0]
