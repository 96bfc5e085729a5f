"""Detectors: what torchvision's take and return, some on networks of timm, and a small one for the embedded scenes.

In training: images (B, 3, H, W) and targets, a dictionary an image → a dictionary of losses. Otherwise: images → boxes
(n, 4), labels (n,) from 1, scores (n,) of every image and, of Mask R-CNN, masks (n, 1, H, W).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import timm
from timm.models import generate_default_cfgs
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool, LastLevelP6P7

from recast.errors import RecastError
from recast.models.cifar import CifarResNet
from recast.models.names import DETECTORS
from recast.models.register import pretrained_cfg, register
from recast.models.sources import ON_TIMM_BUILDERS
from recast.papers.dense.neck import Stages

__all__ = ["SceneRCNN", "TimmPyramid", "check_detections", "detector", "losing", "total_loss"]

SWITCHED = "torchvision.models.detection."
"""Modules whose `training` chooses losses or detections; that of others (norms, dropout) chooses how they compute."""


@contextmanager
def losing(model: nn.Module) -> Iterator[None]:
    """Make a detector in eval mode return losses, with the statistics of eval mode."""
    parts = [m for m in model.modules() if m is model or type(m).__module__.startswith(SWITCHED)]
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.training = True
        yield
    finally:
        for part, training in zip(parts, before, strict=True):
            part.training = training


def total_loss(outputs: Any) -> Tensor:
    """Return the sum of a detector's losses."""
    if not isinstance(outputs, Mapping) or not outputs or not all(isinstance(v, Tensor) for v in outputs.values()):
        raise _no_detector(outputs, "the model")
    return sum(value.float() for value in outputs.values())


def check_detections(outputs: Any, images: int, of: str = "the model") -> None:
    """Raise RecastError unless `outputs` has boxes, labels and scores of every image."""
    keys, rows = {"boxes", "labels", "scores"}, outputs if isinstance(outputs, Sequence) else ()
    if len(rows) != images or not all(isinstance(row, Mapping) and keys <= row.keys() for row in rows):
        raise _no_detector(outputs, of)


def _no_detector(outputs: Any, of: str) -> RecastError:
    got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    return RecastError(
        f"{of} must give losses in training, and boxes, labels and scores of every image otherwise, got {got}: "
        "detection takes networks such as scenes_rcnn and torchvision:fasterrcnn_resnet50_fpn"
    )


class TimmPyramid(Stages):
    """A network of timm with torchvision's feature pyramid: `MaskRCNN(TimmPyramid("convnext_tiny"), num_classes=91)`.

    Its maps from stride `finest` on, and `extra` ones, by default one of half the size of the last.
    """

    def __init__(
        self,
        name: str,
        out_channels: int = 256,
        pretrained: bool = False,
        finest: int = 4,
        extra: ExtraFPNBlock | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, pretrained, **options)
        self.first = sum(stride < finest for stride in self.strides)
        self.fpn = FeaturePyramidNetwork(self.channels[self.first :], out_channels, extra or LastLevelMaxPool())
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.maps(x)[self.first :]
        pyramid: dict[str, Tensor] = self.fpn(OrderedDict((str(i), x) for i, x in enumerate(maps)))
        return pyramid


def detector(
    kind: str, name: str, num_classes: int = 80, img_size: int | None = None, pretrained: bool = False
) -> nn.Module:
    """Return torchvision's detector of a `kind` (maskrcnn, fasterrcnn, retinanet) on a pyramid of timm's `name`.

    RetinaNet's begins at stride 8 (Lin et al. 2017, arXiv:1708.02002). Images are resized to `img_size`, by default as
    torchvision does, and normalised as the network's were; num_classes is without the background.

    Raises RecastError for a network whose maps do not have the strides 4, 8, 16 and 32.
    """
    cfg = timm.get_pretrained_cfg(name)
    own = {"img_size": img_size} if cfg is not None and cfg.fixed_input_size and img_size is not None else {}
    only = {"finest": 8, "extra": LastLevelP6P7(256, 256)} if kind == "retinanet" else {}
    body = TimmPyramid(name, pretrained=pretrained, **only, **own)
    if body.strides != [4, 8, 16, 32]:
        raise RecastError(f"{name} has maps of strides {body.strides}, a detector takes 4, 8, 16 and 32: take another")
    options: dict[str, Any] = {} if img_size is None else {"min_size": img_size, "max_size": img_size}
    if cfg is not None:
        options |= {"image_mean": list(cfg.mean), "image_std": list(cfg.std)}
    make = {"maskrcnn": MaskRCNN, "fasterrcnn": FasterRCNN, "retinanet": RetinaNet}[kind]
    return make(body, num_classes + 1, **options)


class _AsLarge(GeneralizedRCNNTransform):
    """Does not resize images."""

    def resize(self, image: Tensor, target: Any = None) -> tuple[Tensor, Any]:
        return image, target


class SceneRCNN(MaskRCNN):
    """Mask R-CNN on a small ResNet's three maps, of strides 2, 4 and 8, with heads of 64 channels.

    For objects of 10 to 50 pixels, in minutes on a CPU. Images are not resized.
    """

    def __init__(self, num_classes: int = 8, width: int = 64, in_chans: int = 3) -> None:
        widths = (24, 48, 96)
        trunk = CifarResNet((1,) * 3, widths, num_classes=0, in_chans=in_chans, stem_stride=2)
        layers = {f"layer{stage}": str(stage) for stage in (1, 2, 3)}
        sizes = MultiScaleRoIAlign(["1", "2", "3"], 5, 2), MultiScaleRoIAlign(["1", "2", "3"], 8, 2)
        super().__init__(
            BackboneWithFPN(trunk, layers, list(widths), width),
            rpn_anchor_generator=AnchorGenerator(((8,), (16,), (28,), (44,)), ((0.5, 1.0, 2.0),) * 4),
            rpn_pre_nms_top_n_train=400, rpn_post_nms_top_n_train=200, rpn_pre_nms_top_n_test=200,
            rpn_post_nms_top_n_test=60, box_batch_size_per_image=64, rpn_batch_size_per_image=64,
            box_roi_pool=sizes[0], box_head=TwoMLPHead(width * 25, 128),
            box_predictor=FastRCNNPredictor(128, num_classes + 1),
            mask_roi_pool=sizes[1], mask_head=MaskRCNNHeads(width, (width,) * 2, 1),
            mask_predictor=MaskRCNNPredictor(width, width, num_classes + 1),
        )  # fmt: skip
        self.transform = _AsLarge(96, 96, [0.5] * 3, [0.25] * 3)
        self.num_classes = num_classes


HEAD = "roi_heads.box_predictor.cls_score"
STEM = "backbone.body.conv1"
default_cfgs = generate_default_cfgs(
    {"scenes_rcnn": pretrained_cfg(96, 8, ((0.0,) * 3, (1.0,) * 3), first_conv=STEM, classifier=HEAD)}
)
ON_TIMM_BUILDERS.update({kind: partial(detector, kind) for kind in DETECTORS})
register("scenes_rcnn", SceneRCNN, "A small Mask R-CNN, for the embedded scenes.", {})
