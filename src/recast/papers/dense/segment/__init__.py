"""Segmentation: every pixel has a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from recast.lab.evaluation.suites import Metric, Suite
from recast.lab.task import Loss, Meter, Task, register_task

if TYPE_CHECKING:
    from recast.lab.config import DataConfig
    from recast.lab.data import Data
    from recast.lab.data.datasets import RawData
    from recast.lab.evaluation.context import Context
    from recast.lab.open import OpenRun
    from recast.papers.dense.config import SegmentConfig


class Segment(Task):
    """A class for every pixel; labels are masks (B, S, S) int64, `IGNORE` for unknown pixels."""

    name = "segment"
    title = "segmentation"
    main = ("segmentation", "miou")
    validation = ("aacc", "miou")
    crop_pct = 1.0
    metrics: ClassVar[Mapping[str, Metric]] = {
        "miou": Metric(
            "mIoU", meaning="intersection over union of what is predicted and what is right, mean over classes"
        ),
        "macc": Metric("mAcc", meaning="share of a class’s pixels that are predicted as it, mean over classes"),
        "aacc": Metric("aAcc", meaning="share of all pixels that are predicted right"),
        "boundary_iou": Metric(
            "Boundary IoU",
            meaning="mIoU of the pixels near the edge of their class: 2 % of the image’s diagonal or less",
        ),
        "iou": Metric(
            "IoU", meaning="intersection over union of what is predicted as a class and what is of it", by_class=True
        ),
    }
    suites: ClassVar[Mapping[str, Suite]] = {
        "segmentation": Suite(
            "Pixels",
            "mIoU, mAcc, aAcc, boundary IoU, IoU per class (data with masks)",
            "accuracy",
            ("miou", "macc", "aacc", "boundary_iou", "iou"),
            "{} classes",
            by_cost=("miou", "boundary_iou"),
            default=True,
            task="segment",
            module="recast.papers.dense.segment.evaluation",
        )
    }

    def find(self, config: DataConfig) -> RawData:
        from recast.papers.dense.scenes import find_scenes
        from recast.papers.dense.segment.pairs import find_masks

        return {"scenes": find_scenes, "masks": find_masks}[config.name](config)

    def check_outputs(self, outputs: Any, data: Data, name: str) -> None:
        from recast.papers.dense.segment.networks import pixel_logits

        pixel_logits(outputs, len(data.classes), (data.img_size, data.img_size), name)

    def loss(self, config: SegmentConfig, data: Data) -> Loss:
        from recast.papers.dense.segment.training import pixel_loss

        return pixel_loss(config, len(data.classes))

    def meter(self, data: Data) -> Meter:
        from recast.papers.dense.segment.training import PixelMeter

        return PixelMeter(data)

    def draw(self, run: OpenRun, context: Context, suites: Sequence[str]) -> None:
        from recast.papers.dense.predictions import write_predictions
        from recast.papers.dense.segment.evaluation import mask_panels

        if self.main[0] in suites:
            write_predictions(run.folder.path, context, mask_panels)


register_task(Segment())
