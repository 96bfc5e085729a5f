"""Segmentation: every pixel has a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from recast.lab.suites import Suite
from recast.lab.tasks.base import Loss, Meter, Task

if TYPE_CHECKING:
    from recast.lab.config import DataConfig, SegmentConfig
    from recast.lab.data import Data
    from recast.lab.data.datasets import Found
    from recast.lab.evaluation.context import Context
    from recast.lab.evaluation.run_folder import OpenRun
    from recast.lab.evaluation.suites import Evaluator


class Segment(Task):
    """A class for every pixel; labels are masks (B, S, S) int64, `IGNORE` for unknown pixels."""

    name = "segment"
    title = "segmentation"
    main = ("segmentation", "miou")
    validation = ("aacc", "miou")
    crop_pct = 1.0
    suites: ClassVar[Mapping[str, Suite]] = {
        "segmentation": Suite(
            "Pixels", "mIoU, mAcc, aAcc, boundary IoU, IoU of every class (data with masks)", "accuracy",
            ("miou", "macc", "aacc", "boundary_iou", "iou"), "{} classes", missing="mIoU and accuracy of the pixels",
            default=True, task="segment",
        )
    }  # fmt: skip

    def find(self, config: DataConfig) -> Found:
        from recast.lab.tasks.scenes import find_scenes
        from recast.lab.tasks.segment.pairs import find_masks

        return {"scenes": find_scenes, "masks": find_masks}[config.name](config)

    def check_outputs(self, outputs: Any, data: Data, name: str) -> None:
        from recast.lab.tasks.segment.networks import pixel_logits

        pixel_logits(outputs, len(data.classes), (data.img_size, data.img_size), name)

    def loss(self, config: SegmentConfig, data: Data) -> Loss:
        from recast.lab.tasks.segment.training import pixel_loss

        return pixel_loss(config, len(data.classes))

    def meter(self, data: Data) -> Meter:
        from recast.lab.tasks.segment.training import PixelMeter

        return PixelMeter(data)

    def evaluators(self) -> Mapping[str, Evaluator]:
        from recast.lab.evaluation.suites import Evaluator
        from recast.lab.tasks.segment.evaluation import STATISTICS, score_segmentation, sources_segmentation

        how = Evaluator(
            score_segmentation, sources=sources_segmentation, statistics=STATISTICS,
            uses=("test_mode", "test_scales", "test_flip"),
        )  # fmt: skip
        return {"segmentation": how}

    def draw(self, run: OpenRun, context: Context, suites: Sequence[str]) -> None:
        from recast.lab.tasks.predictions import write_predictions
        from recast.lab.tasks.segment.evaluation import mask_panels

        if self.main[0] in suites:
            write_predictions(run.folder, context, mask_panels)
