import numpy as np
import pytest
import torch
from torch import Tensor

from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.data.digits import read_digits
from recast.papers.dense.scenes import CLASSES, DISTANT, FAR, SIDE, DrawnScene, as_coco, draw_scene


@pytest.fixture(scope="module")
def scenes() -> list[DrawnScene]:
    grey, labels, _ = (values.numpy() for values in read_digits())
    return [draw_scene(seed, grey[:, 0], labels) for seed in range(60)]


def test_a_ring_is_what_the_far_bar_says(scenes: list[DrawnScene]) -> None:
    rings = set()
    for scene in scenes:
        kinds = ([CLASSES.index(name) for name in names] for names in (["bar"], DISTANT))
        bar, ring = (np.argwhere(np.isin(scene.mask, kind)) for kind in kinds)
        height, width = np.ptp(bar, axis=0) + 1
        assert {height, width} == {5, 18}
        assert len(bar) == 90, "the bar is never covered"
        (name,) = {CLASSES[scene.mask[tuple(at)]] for at in ring}
        assert name == f"ring, bar {'lies' if width > height else 'stands'}"
        assert abs(ring[:, None] - bar[None]).max(-1).min() >= FAR
        rings.add(name)
    assert rings == set(DISTANT)
    assert {CLASSES[i] for i in np.unique([scene.mask for scene in scenes])} == set(CLASSES)


def test_objects_as_coco(scenes: list[DrawnScene]) -> None:
    coco = as_coco(scenes[:5])
    assert [category["name"] for category in coco["categories"]] == list(CLASSES[1:])
    for item in coco["annotations"]:
        scene, counts = scenes[item["image_id"] - 1], item["segmentation"]["counts"]
        mask = np.repeat(np.arange(len(counts)) % 2, counts).reshape(SIDE, SIDE).T.astype(bool)
        assert mask.sum() == item["area"] > 0
        assert set(scene.mask[mask]) == {item["category_id"]}
        left, top, width, height = item["bbox"]
        assert mask[top : top + height, left : left + width].sum() == item["area"]
        assert all(mask[row].any() for row in (top, top + height - 1))
        assert all(mask[:, column].any() for column in (left, left + width - 1))
    assert sum(item["area"] for item in coco["annotations"]) == sum((scene.objects > 0).sum() for scene in scenes[:5])


def test_scenes_are_a_data_set_and_always_the_same() -> None:
    data = load_data(DataConfig("scenes", test_size=64, num_val=20))
    assert (data.val.task, data.img_size, len(data.train), len(data.val)) == ("segment", 96, 1000, 20)
    assert (data.test_size, data.classes) == (64, list(CLASSES))
    pixels, masks = next(iter(Loader(data.train.plain(), 8)))
    assert pixels.shape == (8, 3, 96, 96)
    assert masks.shape == (8, 96, 96)
    assert data.val[0][1].shape == (64, 64)
    grey, labels, is_val = (values.numpy() for values in read_digits())
    scene = draw_scene((False, 7), grey[~is_val, 0], labels[~is_val])
    assert torch.equal(pixels[7], torch.from_numpy(scene.image).permute(2, 0, 1))
    assert torch.equal(masks[7], torch.from_numpy(scene.mask).long())


def shown(canvas: Tensor, digits: Tensor) -> list[int]:
    """Indices of the 8×8 digits (n, 8, 8) that stand somewhere on a canvas, to the grey level."""
    squares = canvas.unfold(0, 8, 1).unfold(1, 8, 1).reshape(-1, 64)
    norms = (squares**2).sum(1, keepdim=True) - 2 * squares @ digits.flatten(1).T + (digits.flatten(1) ** 2).sum(1)
    return (norms.amin(0) < 1).nonzero().flatten().tolist()


def test_an_odd_digit_is_the_class_that_stands_there_once() -> None:
    data, sklearn_s = load_data(DataConfig("odd_digit")), pytest.importorskip("sklearn.datasets").load_digits()
    digits, labels = (torch.tensor(sklearn_s.images).float() / 16 * 255).round(), torch.tensor(sklearn_s.target)
    assert (len(data.train), len(data.val), data.img_size, len(data.classes)) == (5000, 1000, 32, 10)
    assert torch.bincount(data.val.labels).tolist() == [100] * 10
    shown_in: list[set[int]] = []
    for part in (data.train.plain(), data.val):
        shown_in.append(set())
        for canvas, label in zip(*part.batch(range(40)), strict=True):
            drawn = shown(canvas[0] * 255, digits)
            classes = labels[drawn].tolist()
            assert len(drawn) == 3 or len(set(drawn)) == 2  # the same drawing twice is found once
            assert classes.count(int(label)) == 1
            assert len(set(classes)) == 2
            shown_in[-1] |= set(drawn)
    assert not shown_in[0] & shown_in[1], "held-out digits are never trained on"
