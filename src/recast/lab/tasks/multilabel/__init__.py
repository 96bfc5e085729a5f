"""Multi-label classification: an image has any number of the classes, with one class a yes or a no."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from recast.errors import listed
from recast.lab.evaluation.suites import SUITES, Suite
from recast.lab.task import Loss, Meter, Task

if TYPE_CHECKING:
    from recast.lab.config import DataConfig
    from recast.lab.config.tasks import MultiLabelConfig
    from recast.lab.data import Data
    from recast.lab.data.datasets import RawData


class MultiLabel(Task):
    """Any number of classes for an image; labels are (B, C) of 0 and 1, and every logit has its own sigmoid."""

    name = "multilabel"
    title = "multi-label classification"
    main = ("multilabel", "map")
    validation = ("map",)
    outputs = "sigmoid"
    suites: ClassVar[Mapping[str, Suite]] = {"multilabel": SUITES["multilabel"]}

    def find(self, config: DataConfig) -> RawData:
        from recast.lab.tasks.multilabel.images import find_multilabel

        return find_multilabel(config)

    def notes(self, config: MultiLabelConfig, data: Data) -> Iterator[str]:
        for part, images in (("training", data.train), ("validation", data.val)):
            shares = images.hot.mean(0).tolist()  # type: ignore[attr-defined]  # find's
            if one_sided := [name for name, share in zip(data.classes, shares, strict=True) if share in (0, 1)]:
                yield f"{len(one_sided)} classes have all {part} images or none: {listed(one_sided, 3)}"

    def loss(self, config: MultiLabelConfig, data: Data) -> Loss:
        from recast.lab.tasks.multilabel.training import multi_hot_loss

        return multi_hot_loss

    def meter(self, data: Data) -> Meter:
        from recast.lab.tasks.multilabel.training import LabelMeter

        return LabelMeter(data)

    def answer(self, data: Data, label: Any) -> str | None:
        return ", ".join(name for name, bit in zip(data.classes, label.tolist(), strict=True) if bit) or "none"
