"""Classification: every image has one class. Its data and suites are the rest of `recast.lab`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recast.errors import listed
from recast.lab.task import Loss, Meter, Task

if TYPE_CHECKING:
    from recast.lab.config.tasks import OneLabelTask
    from recast.lab.data import Data


class Classify(Task):
    """A class for every image."""

    name = "classify"
    title = "classification"
    main = ("clean", "top1")
    validation = ("top1",)

    def notes(self, config: OneLabelTask, data: Data) -> Iterator[str]:
        if len(data.classes) == 1:
            yield "the data have one class: every prediction is correct"
        for part, images in (("training", data.train), ("validation", data.val)):
            counts = images.labels.bincount(minlength=len(data.classes)).tolist()
            if missing := [name for name, count in zip(data.classes, counts, strict=True) if not count]:
                yield f"{len(missing)} of {len(counts)} classes have no {part} images: {listed(missing, 5)}"

    def loading(self, config: OneLabelTask, data: Data) -> dict[str, Any]:
        return super().loading(config, data) | {"balanced": getattr(config, "sampler", None) is not None}

    def loss(self, config: OneLabelTask, data: Data) -> Loss:
        from recast.lab.tasks.classify.training import balanced_weights, label_loss

        is_weighted = getattr(config, "class_weights", None) is not None
        weights = balanced_weights(data.train.labels, len(data.classes)) if is_weighted else None
        return label_loss(config, len(data.classes), weights)

    def meter(self, data: Data) -> Meter:
        from recast.lab.tasks.classify.training import ClassMeter

        return ClassMeter(data)

    def examples(self, data: Data, count: int) -> list[int]:
        first: dict[int, int] = {}
        for index, label in enumerate(data.val.labels.tolist()):
            first.setdefault(int(label), index)
        return list(first.values())[:count]

    def answer(self, data: Data, label: Any) -> str | None:
        return data.classes[int(label)]
