"""Average precision against COCO's own code, the suite, and what it is refused for."""

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
from recast.papers.dense.detect.evaluation import (
    ENLARGED,
    average_precisions,
    object_panels,
    scores_of,
    stacked,
    summarised,
)
from recast.papers.dense.detect.objects import AS_IT_IS, Annotations, ObjectImages
from recast.papers.dense.predictions import draw_predictions

SIDE, CLASSES = 128, ["a", "b", "c"]
Case = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]


def filled(boxes: Tensor) -> Tensor:
    """The pixels of boxes."""
    masks = torch.zeros(len(boxes), SIDE, SIDE, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    return masks


def random_case(seed: int, images: int = 10, stray: int = 4) -> Case:
    """Detections near objects and, `stray` of them, elsewhere, with equal scores; crowds; images without any."""
    random = np.random.default_rng(seed)
    found, objects = [], []
    for _ in range(images):
        count = random.integers(0, 7)
        boxes = np.concatenate([random.uniform(0, 75, (count, 2)), random.uniform(3, 50, (count, 2))], 1).round(1)
        labels = random.integers(1, 4, count)
        near = boxes.repeat(random.integers(0, 4, count), 0)
        near = near + random.normal(0, 3, near.shape) * (random.random((len(near), 1)) < 0.8)
        own = labels.repeat(1)[random.integers(0, count, len(near))] if count else labels
        away = np.concatenate([random.uniform(0, 60, (stray, 2)), random.uniform(5, 60, (stray, 2))], 1)
        guesses = np.concatenate([near, away])
        guesses[:, :2], guesses[:, 2:] = guesses[:, :2].clip(0), guesses[:, 2:].clip(2)
        for one in (boxes, guesses):
            one[:, 3] *= random.random(len(one)) > 0.1  # flat ones
            one[:, 2:] += one[:, :2]
        tensors = [torch.from_numpy(one) for one in (boxes, guesses)]
        masks = [filled(one) for one in tensors]
        guessed = torch.from_numpy(np.concatenate([own, random.integers(1, 4, stray)]))
        scores = torch.from_numpy(random.random(len(guesses)).round(1))
        found.append({"boxes": tensors[1], "labels": guessed, "scores": scores, "masks": masks[1][:, None]})
        crowd = torch.from_numpy(random.random(count) < 0.2)
        sides = tensors[0][:, 2:] - tensors[0][:, :2]
        area = {"boxes": sides.prod(1), "masks": masks[0].flatten(1).sum(1).double()}
        own_scale = {"crowd": crowd, "scale": torch.tensor(1.0), **{f"area_{what}": one for what, one in area.items()}}
        objects.append({"boxes": tensors[0], "labels": torch.from_numpy(labels), "masks": masks[0], **own_scale})
    return found, objects


def of_coco(found: list[dict[str, Tensor]], objects: list[dict[str, Tensor]], what: str) -> list[float]:
    """AP, AP50, AP75, AP of small, medium and large objects by pycocotools; -1 where there are none."""
    coco, cocoeval = (pytest.importorskip(f"pycocotools.{name}") for name in ("coco", "cocoeval"))
    encode = pytest.importorskip("pycocotools.mask").encode

    def listed(one: dict[str, Tensor], number: int, **more: Any) -> list[dict[str, Any]]:
        corners = one["boxes"].numpy()
        columns = {
            "bbox": np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist(),
            "segmentation": [encode(np.asfortranarray(m)) for m in one["masks"].reshape(-1, SIDE, SIDE).numpy()],
            "category_id": one["labels"].tolist(), **{key: value.tolist() for key, value in more.items()},
        }  # fmt: skip
        if what == "boxes" or "area" not in more:
            del columns["segmentation" if what == "boxes" else "bbox"]
        return [
            {"image_id": number, **dict(zip(columns, row, strict=True))} for row in zip(*columns.values(), strict=True)
        ]

    truth, said = [], []
    for number, (one, target) in enumerate(zip(found, objects, strict=True)):
        truth += listed(target, number, area=target[f"area_{what}"], iscrowd=target["crowd"].int())
        said += listed(one, number, score=one["scores"])
    index = coco.COCO()
    images = [{"id": number, "height": SIDE, "width": SIDE} for number in range(len(found))]
    annotations = [line | {"id": number} for number, line in enumerate(truth, start=1)]
    index.dataset = {"images": images, "annotations": annotations, "categories": [{"id": n} for n in (1, 2, 3)]}
    index.createIndex()
    run = cocoeval.COCOeval(index, index.loadRes(said), "bbox" if what == "boxes" else "segm")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return [100 * value if value >= 0 else -1 for value in run.stats[:6].tolist()]


def ours(found: list[dict[str, Tensor]], objects: list[dict[str, Tensor]], what: str) -> dict[str, float]:
    objects = [one | {"area": one[f"area_{what}"]} for one in objects]
    rows = stacked(scores_of(found, objects, 3, what)).astype(np.float32).astype(np.float64)
    precisions = average_precisions(rows, np.ones((1, len(rows))), 3)
    return {name: float(value[0]) for name, value in summarised(precisions, CLASSES, {}).items()}


@pytest.mark.parametrize("what", ["boxes", "masks"])
def test_random_detections_against_cocos_code(what: str) -> None:
    # 500 strays: more than 100 of a class, and of all classes far more
    for seed, stray in ((0, 4), (1, 4), (2, 4), (3, 4), (4, 0), (5, 500)):
        case = random_case(seed, 10 if stray < 500 else 3, stray)
        wanted = of_coco(*case, what)
        found = ours(*case, what)
        got = [found[f"ap{part}"] for part in ("", "50", "75", "_small", "_medium", "_large")]
        assert np.nan_to_num(got, nan=-1) == pytest.approx(wanted, abs=1e-9)
        assert 0.1 < wanted[0] < 60


class Finds(nn.Module):
    """Every object of the images that it was given, in their order, moved."""

    def __init__(self, answers: list[dict[str, Tensor]], move: float = 0.0, miss: int = 0) -> None:
        super().__init__()
        self.answers, self.move, self.miss, self.scale = answers, move, miss, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        which = (x[:, 0, 0, 0] * 255).round().int().tolist()
        return [
            {
                "boxes": one["boxes"][self.miss :] + self.move * self.scale.detach(),
                "labels": one["labels"][self.miss :], "scores": torch.linspace(1, 0.6, len(one["labels"]))[self.miss :],
            }
            for one in map(self.answers.__getitem__, which)
        ]  # fmt: skip


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
    found = measure(open_context(models, data, 5), ["detection"], progress=False)
    rows = {row.metric: row for row in found.rows if row.model == "finetuned"}
    assert {"ap", "ap50", "ap75", "ap_small", "ap@local", "ap/disc", "ap/bar"} <= rows.keys()
    assert "ap@nowhere" not in rows
    assert rows["ap"].n == 12
    assert rows["ap"].low < rows["ap"].value < rows["ap"].high
    (gap,) = [line for line in found.differences if line.metric == "ap50"]
    assert gap.value > 0
    assert 0 <= gap.low < gap.value < gap.high
    drawn = draw_predictions(open_context(models, data, 5), object_panels, count=2)
    assert np.asarray(drawn).shape == (2 * 196, 4 * 196, 3)
    assert ENLARGED // 96 * 96 == 192


def test_what_cannot_be_measured(data: Data, answers: list[dict[str, Tensor]]) -> None:
    for model, suite, word in (
        (Finds(answers), "segmentation", "detect"), (nn.Conv2d(3, 8, 1), "detection", "losses"),
        (Finds(answers, torch.nan), "detection", "NaN"),
    ):  # fmt: skip
        with pytest.raises(RecastError, match=word):
            evaluate(model, suite, data, progress=False)
