"""Detection: boxes of objects, and their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from recast.errors import RecastError
from recast.lab.evaluation.suites import Metric, Suite
from recast.lab.task import Loss, Meter, Task, register_task

if TYPE_CHECKING:
    from torch import Tensor

    from recast.lab.config import DataConfig
    from recast.lab.data import Data
    from recast.lab.data.datasets import RawData
    from recast.lab.evaluation.context import Context
    from recast.lab.open import OpenRun
    from recast.models.config import ModelConfig
    from recast.papers.dense.config import DetectConfig
    from recast.papers.dense.detect.objects import ObjectImages

METRICS = {
    f"{prefix}ap{part}": Metric(
        f"{what}{size}{f' at IoU 0.{part}' if part.isdigit() else ''}", meaning=f"average precision of {meaning}"
        + (f", IoU {part} % is enough" if part.isdigit() else ", mean over IoU 50 to 95 %") + sizes, by_class=not part
    )
    for prefix, what, meaning in (("", "Box AP", "boxes"), ("mask_", "Mask AP", "masks"))
    for part, size, sizes in (
        ("", "", ""), ("50", "", ""), ("75", "", ""), ("_small", ", small", ", below 32² pixels"),
        ("_medium", ", medium", ", 32² to 96² pixels"), ("_large", ", large", ", above 96² pixels"),
    )
}  # fmt: skip


class Detect(Task):
    """Boxes and masks of objects; labels are `Objects`, and networks those of torchvision."""

    name = "detect"
    title = "detection"
    main = ("detection", "ap")
    validation = ("ap50", "ap")
    not_by_default = ("fourier",)
    whole = True
    suites: ClassVar[Mapping[str, Suite]] = {
        "detection": Suite(
            "Objects", "COCO's average precision of boxes and masks, by IoU, size and class", "accuracy",
            tuple(METRICS), "{} classes", by_cost=("ap", "mask_ap"),
            default=True, task="detect", module="recast.papers.dense.detect.evaluation",
        )
    }  # fmt: skip
    metrics: ClassVar[Mapping[str, Metric]] = METRICS

    def find(self, config: DataConfig) -> RawData:
        from recast.papers.dense.detect.objects import find_coco
        from recast.papers.dense.scenes import find_scene_objects

        return {"scene_objects": find_scene_objects, "coco": find_coco}[config.name](config)

    def network(self, config: ModelConfig, data: Data) -> ModelConfig:
        from recast.models.names import DETECTORS, split_name

        source, name = split_name(config.name)
        if source in DETECTORS or (source == "torchvision" and not name.startswith("ssd")):
            return config.replace(input_size=data.img_size)  # no resizing: images have this size
        return config

    def check_outputs(self, outputs: Any, data: Data, name: str) -> None:
        from recast.papers.dense.detect.networks import check_detections

        check_detections(outputs, 1, name)
        if "masks" in outputs[0] and not all(
            part.has_masks for part in cast("list[ObjectImages]", [data.train, data.val])
        ):
            raise RecastError(
                f"{name} learns masks, and objects of {data.name} have none: add COCO's segmentation to all, or use a "
                "network of boxes such as torchvision:fasterrcnn_resnet50_fpn"
            )

    def loss(self, config: DetectConfig, data: Data) -> Loss:
        from recast.papers.dense.detect.networks import total_loss

        return lambda outputs, _objects: total_loss(outputs)

    def inputs(self, images: Tensor, targets: Any) -> tuple[Any, ...]:
        return images, targets.taught()

    def meter(self, data: Data) -> Meter:
        from recast.papers.dense.detect.evaluation import ObjectMeter

        return ObjectMeter(data)

    def draw(self, run: OpenRun, context: Context, suites: Sequence[str]) -> None:
        from recast.papers.dense.detect.evaluation import object_panels
        from recast.papers.dense.predictions import write_predictions

        if self.main[0] in suites:
            write_predictions(run.folder.path, context, object_panels)


register_task(Detect())
