import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import load_data
from recast.papers.dense.detect.coco import Annotations, Runs, drawn_masks
from recast.papers.dense.detect.objects import ObjectImages

COCO: dict[str, Any] = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png"}, {"id": 5, "file_name": "c.png"}],
    "categories": [{"id": 90, "name": "dog"}, {"id": 4, "name": "cat"}],
    "annotations": [
        {"id": 1, "image_id": 3, "category_id": 90, "bbox": [10, 4, 20, 10], "area": 150, "iscrowd": 0},
        {"id": 2, "image_id": 3, "category_id": 4, "bbox": [0, 0, 40, 20], "area": 800, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 4, "bbox": [1, 2, 3, 4], "area": 12},
    ],
}  # fmt: skip


def write(folder: Path, coco: dict[str, Any]) -> DataConfig:
    (folder / "images").mkdir(exist_ok=True)
    Image.new("L", (40, 20), 9).save(folder / "images" / "a.png")
    Image.new("RGB", (40, 20), (9, 0, 0)).save(folder / "images" / "b.png")
    Image.fromarray(np.full((20, 40), 60000, np.uint16)).save(folder / "images" / "c.png")
    (folder / "annotations.json").write_text(json.dumps(coco))
    return DataConfig("coco", data_dir=str(folder), img_size=80, val_fraction=0.4)


def changed(**fields: Any) -> dict[str, Any]:
    coco = copy.deepcopy(COCO)
    coco["annotations"][2] |= fields
    return coco


def test_a_folder_with_gaps_crowds_grey_and_16_bits(tmp_path: Path) -> None:
    data = load_data(write(tmp_path, COCO))
    assert (data.task.name, data.classes, len(data.train) + len(data.val)) == ("detect", ["cat", "dog"], 3)
    items = {part.image_name(i)[-5:]: part[i] for part in (data.train.plain(), data.val) for i in range(len(part))}
    image, target = items["b.png"]
    assert image.shape == (3, 80, 80)
    assert target["boxes"].tolist() == [[20, 8, 60, 28], [0, 0, 80, 40]]
    assert target["labels"].tolist() == [2, 1]
    assert target["crowd"].tolist() == [False, True]
    assert (target["area"].tolist(), target["scale"].item()) == ([150, 800], 2)
    assert items["c.png"][1]["boxes"].shape == (0, 4)
    assert items["c.png"][0][:, :40].min() > 0.9
    assert data.train.batch([0])[1].taught()[0].keys() == {"boxes", "labels"}


@pytest.mark.parametrize("width", [0, 0.1])
def test_crowds_and_slivers_are_not_taught(tmp_path: Path, width: float) -> None:
    data = load_data(write(tmp_path, changed(bbox=[1, 2, width, 4])))
    taught = {
        part.image_name(i)[-5:]: len(part.batch([i])[1].taught()[0]["boxes"])
        for part in (data.train, data.val)
        for i in range(len(part))
    }
    assert taught == {"a.png": 0, "b.png": 1, "c.png": 0}


def test_boxes_and_masks_move_with_the_image() -> None:
    pixels = torch.zeros(1, 3, 40, 60, dtype=torch.uint8)
    pixels[:, :, 10:20, 15:45] = 255
    inside = np.zeros((40, 60), dtype=bool)
    inside[10:20, 15:45] = True
    edges = np.flatnonzero(np.diff(inside.T.ravel(), prepend=False)).tolist()
    runs = Runs((40, 60), np.diff([0, *edges, inside.size]).tolist())
    box = np.array([[15.0, 10, 45, 20]])
    objects = Annotations(box, np.zeros(1, np.int64), np.zeros(1, bool), np.array([300.0]), (runs,))
    images = ObjectImages(pixels, [objects], 48, augment=Augmentation(crop="random", flip=True, resize=(0.8, 1.5)))
    places = set()
    for seed in range(12):
        (image,), (target,) = images.batch([0], [seed])
        mask, (corners,) = target["masks"][0].bool(), target["boxes"].round().int().tolist()
        left, top, right, bottom = corners
        in_box = torch.zeros(48, 48, dtype=torch.bool)
        in_box[top:bottom, left:right] = True
        union = (in_box | mask).sum()
        assert (in_box & mask).sum() / union > 0.8 if union else not in_box.any()
        bright = image[0] > 0.75
        assert (bright & mask).sum() >= 0.8 * bright.sum()
        places.add((left, top, right, bottom))
    assert len(places) > 6


SIZED = [image | {"width": 40, "height": 20} for image in COCO["images"]]
BAD = {
    "annotations.2.bbox.2 must be >= 0": changed(bbox=[1, 2, -1, 4]),
    "annotations.2 has the unknown image_id 99": changed(image_id=99),
    "annotations.2 has the unknown .*category_id 1": changed(category_id=1),
    "annotations.2.area .*nan": changed(area=float("nan")),
    "annotations.2.segmentation.*counts": changed(segmentation={"size": [20, 40], "counts": [-8, 800, 8]}),
    "annotations.2 has a mask whose runs": changed(segmentation={"size": [20, 40], "counts": [8, 800]}),
    "annotations.2.segmentation.*size": changed(segmentation={"size": [[0], 10**9], "counts": [1]}),
    "annotations.2.segmentation": changed(segmentation=[[1, 2, 3, 4]]),
    "annotations.2 has the box .*40x20": changed(bbox=[50, 2, 4, 4]) | {"images": SIZED},
    "annotations.2 has a polygon .*40x20": changed(segmentation=[[9e5, 9e5, -9e5, -9e5] * 99]) | {"images": SIZED},
    "annotations.0.bbox is missing": COCO | {"annotations": [{"image_id": 3, "category_id": 4}]},
    "categories with the id 4 twice": COCO | {"categories": [*COCO["categories"], {"id": 4, "name": "owl"}]},
    "categories 'owl' twice": COCO | {"categories": [{"id": 9, "name": "owl"}, {"id": 4, "name": "owl"}]},
    "d.png": COCO | {"images": [{"id": n, "file_name": "d.png"} for n in (3, 7)]},
    "images.0.file_name": COCO | {"images": [{"id": 7, "file_name": None}, *COCO["images"][1:]]},
    "no object but crowds": COCO | {"annotations": [item | {"iscrowd": 1} for item in COCO["annotations"]]},
    "3 images and no object": COCO | {"annotations": []},
    "images must have": COCO | {"images": [], "annotations": []},
}


@pytest.mark.parametrize(("train", "others"), [
    ("train/_annotations.coco", ["valid/_annotations.coco", "test/_annotations.coco"]),
    ("Train/_annotations.coco", ["Test/_annotations.coco", "testing/_annotations.coco"]),
    ("annotations/instances_train2017", ["annotations/instances_val2017", "annotations/captions_val2017"]),
    ("mine", []),
])  # fmt: skip
def test_where_the_json_is(tmp_path: Path, train: str, others: list[str]) -> None:
    config = write(tmp_path, {**COCO, "images": COCO["images"][:2]})
    text = (tmp_path / "annotations.json").read_text()
    (tmp_path / "annotations.json").unlink()
    for number, name in enumerate([train, *others]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.json").write_text(text if number < 2 else "{}")
    with pytest.warns(UserWarning, match=f"not used: .*{others[1]}") if others else nullcontext():
        data = load_data(config)
    assert (len(data.train), len(data.val)) == ((2, 2) if others else (1, 1))


@pytest.mark.parametrize(("message", "coco"), BAD.items())
def test_bad_json(tmp_path: Path, message: str, coco: dict[str, Any]) -> None:
    with pytest.raises(RecastError, match=message):
        load_data(write(tmp_path, coco))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools and numpy 2
def test_a_mask_as_text() -> None:
    """Written by COCO's own code from random pixels."""
    expected = np.array([
        [1, 0, 0, 0, 1], [1, 1, 1, 0, 1], [1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1],
        [1, 0, 0, 1, 0],
    ])  # fmt: skip
    pytest.importorskip("pycocotools")
    (mask,) = drawn_masks((Runs((7, 5), "033NN0000011O044LL0"),), 7, 5, "a.png")
    assert (mask == expected).all()
    with pytest.raises(RecastError, match=r"a\.png has a damaged mask"):
        list(drawn_masks((Runs((7, 5), "~~~~"),), 7, 5, "a.png"))


def test_masks_of_another_size_and_one_image(tmp_path: Path) -> None:
    mask = {"segmentation": {"size": [20, 41], "counts": [820]}}
    coco = COCO | {"images": COCO["images"][1:2], "annotations": [COCO["annotations"][0] | mask]}
    config = write(tmp_path, coco)
    (tmp_path / "annotations").mkdir()
    for part in ("train", "val"):
        shutil.copy(tmp_path / "annotations.json", tmp_path / "annotations" / f"{part}.json")
    (tmp_path / "annotations.json").unlink()
    data = load_data(config)
    assert (len(data.train), len(data.val)) == (1, 1)
    with pytest.raises(RecastError, match=r"has 20 x 40 pixels .height x width., a mask of it .20, 41."):
        data.val.batch([0])


def test_sizes_are_checked_against_the_file(tmp_path: Path) -> None:
    far = [[(-1) ** (k // 2) * 9999.0 for k in range(40)]]
    polygons = [item | {"segmentation": far} for item in COCO["annotations"]]
    for coco, size, message in (
        (COCO | {"annotations": polygons}, (40, 20), "far outside of its image of 40x20"),
        (COCO | {"images": SIZED}, (60, 30), "the JSON says 40x20, the file has 60x30"),
    ):
        config = write(tmp_path, coco)
        Image.new("RGB", size).save(tmp_path / "images" / "b.png")
        data = load_data(config)
        with pytest.raises(RecastError, match=message):
            [part[i] for part in (data.train, data.val) for i in range(len(part))]
