"""The embedded scenes: what makes a class, what is far from what, boxes and run lengths."""

import numpy as np
import pytest
import torch

from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.data.digits import read_digits
from recast.papers.dense.scenes import CLASSES, DISTANT, FAR, SIDE, DrawnScene, as_coco, draw_scene


@pytest.fixture(scope="module")
def scenes() -> list[DrawnScene]:
    grey, labels, _ = (found.numpy() for found in read_digits())
    return [draw_scene(seed, grey[:, 0], labels) for seed in range(60)]


def test_a_ring_is_what_the_far_bar_says(scenes: list[DrawnScene]) -> None:
    seen = set()
    for scene in scenes:
        kinds = ([CLASSES.index(name) for name in names] for names in (["bar"], DISTANT))
        bar, ring = (np.argwhere(np.isin(scene.mask, kind)) for kind in kinds)
        height, width = np.ptp(bar, axis=0) + 1
        assert {height, width} == {5, 18}
        assert len(bar) == 90, "the bar is never covered"
        (name,) = {CLASSES[scene.mask[tuple(at)]] for at in ring}
        assert name == f"ring, bar {'lies' if width > height else 'stands'}"
        assert abs(ring[:, None] - bar[None]).max(-1).min() >= FAR
        seen.add(name)
    assert seen == set(DISTANT)
    assert {CLASSES[i] for i in np.unique([scene.mask for scene in scenes])} == set(CLASSES)


def test_objects_as_coco(scenes: list[DrawnScene]) -> None:
    coco = as_coco(scenes[:5])
    assert [one["name"] for one in coco["categories"]] == list(CLASSES[1:])
    for one in coco["annotations"]:
        scene, counts = scenes[one["image_id"] - 1], one["segmentation"]["counts"]
        own = np.repeat(np.arange(len(counts)) % 2, counts).reshape(SIDE, SIDE).T.astype(bool)
        assert own.sum() == one["area"] > 0
        assert set(scene.mask[own]) == {one["category_id"]}
        left, top, width, height = one["bbox"]
        assert own[top : top + height, left : left + width].sum() == one["area"]
        assert all(own[row].any() for row in (top, top + height - 1))
        assert all(own[:, column].any() for column in (left, left + width - 1))
    assert sum(one["area"] for one in coco["annotations"]) == sum((scene.objects > 0).sum() for scene in scenes[:5])


def test_scenes_are_a_data_set_and_always_the_same() -> None:
    data = load_data(DataConfig("scenes", test_size=64, num_val=20))
    assert (data.task.name, data.img_size, len(data.train), len(data.val)) == ("segment", 96, 1000, 20)
    assert (data.test_size, data.classes) == (64, list(CLASSES))
    pixels, masks = next(iter(Loader(data.train.plain(), 8)))
    assert pixels.shape == (8, 3, 96, 96)
    assert masks.shape == (8, 96, 96)
    assert data.val[0][1].shape == (64, 64)
    grey, labels, is_val = (found.numpy() for found in read_digits())
    again = draw_scene((False, 7), grey[~is_val, 0], labels[~is_val])
    assert torch.equal((pixels[7] * 255).round().byte(), torch.from_numpy(again.image).permute(2, 0, 1))
    assert torch.equal(masks[7], torch.from_numpy(again.mask).long())
