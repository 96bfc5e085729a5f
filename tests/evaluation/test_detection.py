from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.evaluation.runner import evaluate, measure, open_context
from recast.papers.dense import scenes
from recast.papers.dense.detect import evaluation
from recast.papers.dense.detect.objects import AS_IT_IS, Annotations, ObjectImages
from recast.papers.dense.predictions import draw_predictions

SIDE, CLASSES = 128, ["a", "b", "c"]
Case = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]


def filled(boxes: Tensor) -> Tensor:
    """The pixels of boxes."""
    masks = torch.zeros(len(boxes), SIDE, SIDE, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y0:y1, x0:x1] = 1
    return masks


def random_case(seed: int, images: int = 10, stray: int = 4) -> Case:
    """Detections near objects and, `stray` of them, elsewhere, with equal scores; crowds; images without any."""
    random = np.random.default_rng(seed)
    detections, objects = [], []
    for _ in range(images):
        count = random.integers(0, 7)
        boxes = np.concatenate([random.uniform(0, 75, (count, 2)), random.uniform(3, 50, (count, 2))], 1).round(1)
        labels = random.integers(1, 4, count)
        near = boxes.repeat(random.integers(0, 4, count), 0)
        near = near + random.normal(0, 3, near.shape) * (random.random((len(near), 1)) < 0.8)
        near_labels = labels[random.integers(0, count, len(near))] if count else labels
        away = np.concatenate([random.uniform(0, 60, (stray, 2)), random.uniform(5, 60, (stray, 2))], 1)
        guesses = np.concatenate([near, away])
        guesses[:, :2], guesses[:, 2:] = guesses[:, :2].clip(0), guesses[:, 2:].clip(2)
        for corners in (boxes, guesses):
            corners[:, 3] *= random.random(len(corners)) > 0.1  # flat ones
            corners[:, 2:] += corners[:, :2]
        detections.append(
            {
                "boxes": torch.from_numpy(guesses),
                "masks": filled(torch.from_numpy(guesses))[:, None],
                "labels": torch.from_numpy(np.concatenate([near_labels, random.integers(1, 4, stray)])),
                "scores": torch.from_numpy(random.random(len(guesses)).round(1)),
            }
        )
        truth = torch.from_numpy(boxes)
        masks = filled(truth)
        objects.append(
            {
                "boxes": truth,
                "labels": torch.from_numpy(labels),
                "masks": masks,
                "scale": torch.tensor(1.0),
                "crowd": torch.from_numpy(random.random(count) < 0.2),
                "area_boxes": (truth[:, 2:] - truth[:, :2]).prod(1),
                "area_masks": masks.flatten(1).sum(1).double(),
            }
        )
    return detections, objects


def of_coco(detections: list[dict[str, Tensor]], objects: list[dict[str, Tensor]], what: str) -> list[float]:
    """AP, AP50, AP75, AP of small, medium and large objects by pycocotools; -1 where there are none."""
    coco, cocoeval = (pytest.importorskip(f"pycocotools.{name}") for name in ("coco", "cocoeval"))
    encode = pytest.importorskip("pycocotools.mask").encode

    def listed(image: dict[str, Tensor], number: int, **more: Tensor) -> list[dict[str, Any]]:
        corners = image["boxes"].numpy()
        columns = {"category_id": image["labels"].tolist(), **{key: value.tolist() for key, value in more.items()}}
        if what == "boxes" or "area" in more:
            columns["bbox"] = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
        if what == "masks":
            masks = image["masks"].reshape(-1, SIDE, SIDE).numpy()
            columns["segmentation"] = [encode(np.asfortranarray(mask)) for mask in masks]
        rows = zip(*columns.values(), strict=True)
        return [{"image_id": number, **dict(zip(columns, row, strict=True))} for row in rows]

    truth, answers = [], []
    for number, (image, target) in enumerate(zip(detections, objects, strict=True)):
        truth += listed(target, number, area=target[f"area_{what}"], iscrowd=target["crowd"].int())
        answers += listed(image, number, score=image["scores"])
    index = coco.COCO()
    images = [{"id": number, "height": SIDE, "width": SIDE} for number in range(len(detections))]
    annotations = [line | {"id": number} for number, line in enumerate(truth, start=1)]
    index.dataset = {"images": images, "annotations": annotations, "categories": [{"id": n} for n in (1, 2, 3)]}
    index.createIndex()
    run = cocoeval.COCOeval(index, index.loadRes(answers), "bbox" if what == "boxes" else "segm")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return [100 * value if value >= 0 else -1 for value in run.stats[:6].tolist()]


def ours(detections: list[dict[str, Tensor]], objects: list[dict[str, Tensor]], what: str) -> dict[str, float]:
    objects = [target | {"area": target[f"area_{what}"]} for target in objects]
    rows = evaluation.stacked(evaluation.scores_of(detections, objects, 3, what)).astype(np.float32).astype(np.float64)
    precisions = evaluation.average_precisions(rows, np.ones((1, len(rows))), 3)
    return {name: float(value[0]) for name, value in evaluation.summarised(precisions, CLASSES, {}).items()}


@pytest.mark.parametrize("what", ["boxes", "masks"])
def test_random_detections_against_cocos_code(what: str) -> None:
    # 500 strays: more than 100 of a class, and of all classes far more
    for seed, stray in ((0, 4), (1, 4), (2, 4), (3, 4), (4, 0), (5, 500)):
        case = random_case(seed, 10 if stray < 500 else 3, stray)
        expected, precisions = of_coco(*case, what), ours(*case, what)
        values = [precisions[f"ap{part}"] for part in ("", "50", "75", "_small", "_medium", "_large")]
        assert np.nan_to_num(values, nan=-1) == pytest.approx(expected, abs=1e-9)
        assert 0.1 < expected[0] < 60


class Finds(nn.Module):
    """Every object of the images that it was given, in their order, moved."""

    def __init__(self, answers: list[dict[str, Tensor]], move: float = 0.0, miss: int = 0) -> None:
        super().__init__()
        self.answers, self.move, self.miss, self.scale = answers, move, miss, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        which = (x[:, 0, 0, 0] * 255).round().int().tolist()
        predictions = []
        for answer in [self.answers[index] for index in which]:
            boxes, scores = (
                answer["boxes"] + self.move * self.scale.detach(),
                torch.linspace(1, 0.6, len(answer["boxes"])),
            )
            prediction = {"boxes": boxes, "labels": answer["labels"], "scores": scores}
            predictions.append({name: values[self.miss :] for name, values in prediction.items()})
        return predictions


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Data:
    """Twelve scenes, numbered by their first pixel, the last without an object."""
    monkeypatch.setattr(scenes, "NUM_SCENES", {"train": 1, "val": 12})
    drawn = load_data(DataConfig("scene_objects"))
    val: Any = drawn.val
    val.items[:, :, 0, 0] = torch.arange(12, dtype=torch.uint8)[:, None]
    nothing = Annotations(*(values[:0] for values in list(vars(val.objects[0]).values())[:5]))
    images = ObjectImages(val.items, [*val.objects[:-1], nothing], 96)
    kinds = {"local": ("disc", "bar"), "nowhere": ()}
    return Data("scenes", images, images, drawn.classes, *AS_IT_IS, 96, kinds=kinds)


@pytest.fixture
def answers(data: Data) -> list[dict[str, Tensor]]:
    return [target for _, target in data.val]


def test_the_suite_has_intervals_and_paired_differences(data: Data, answers: list[dict[str, Tensor]]) -> None:
    models = {"recast": Finds(answers, 0.5), "finetuned": Finds(answers, 0.5, miss=1)}
    results = measure(open_context(models, data, 5), ["detection"], progress=False)
    rows = {row.metric: row for row in results.rows if row.model == "finetuned"}
    assert {"ap", "ap50", "ap75", "ap_small", "ap@local", "ap/disc", "ap/bar"} <= rows.keys()
    assert "ap@nowhere" not in rows
    assert rows["ap"].n == 12
    assert rows["ap"].low < rows["ap"].value < rows["ap"].high
    (gap,) = [line for line in results.differences if line.metric == "ap50"]
    assert gap.low < gap.value < gap.high
    drawn = draw_predictions(open_context(models, data, 5), evaluation.object_panels, count=2)
    assert np.asarray(drawn).shape == (2 * 196, 4 * 196, 3)


def test_what_cannot_be_measured(data: Data, answers: list[dict[str, Tensor]]) -> None:
    for model, suite, word in (
        (Finds(answers), "segmentation", "detect"),
        (nn.Conv2d(3, 8, 1), "detection", "losses"),
        (Finds(answers, torch.nan), "detection", "NaN"),
    ):
        with pytest.raises(RecastError, match=word):
            evaluate(model, suite, data, progress=False)
