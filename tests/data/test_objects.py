import copy
import json
import os
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import Loader, load_data
from recast.papers.dense.detect.coco import Annotations, Runs, drawn_masks
from recast.papers.dense.detect.objects import ObjectImages

pytestmark = pytest.mark.filterwarnings("ignore:.*json. images. [0-9]", "ignore:.*has 16-bit pixels")
COCO: dict[str, Any] = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 3, "file_name": "b.png"}, {"id": 5, "file_name": "c.png"}],
    "categories": [{"id": 90, "name": "dog"}, {"id": 4, "name": "cat"}],
    "annotations": [
        {"id": 1, "image_id": 3, "category_id": 90, "bbox": [10, 4, 20, 10], "area": 150, "iscrowd": 0},
        {"id": 2, "image_id": 3, "category_id": 4, "bbox": [0, 0, 40, 20], "area": 800, "iscrowd": 1},
        {"id": 3, "image_id": 7, "category_id": 4, "bbox": [1, 2, 3, 4], "area": 12},
    ],
}


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
    with pytest.warns(UserWarning, match=r"c\.png has 16-bit pixels, .*scale its values"):
        data = load_data(write(tmp_path, COCO))
    assert (data.val.task, data.classes, len(data.train) + len(data.val)) == ("detect", ["cat", "dog"], 3)
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"segmentation": [[1, 2, 3, 4]]},
        {"segmentation": [1, 2, 3, 4, 5, 6]},
        {"segmentation": "x"},
        {"bbox": [1, 2, 3]},
        {"bbox": [50, 2, 3, 4]},
        {"segmentation": {"size": [3, 3], "counts": [1]}},
    ],
)
def test_images_with_a_bad_annotation_are_left_out_where_skipped(tmp_path: Path, wrong: dict[str, Any]) -> None:
    coco = changed(**wrong)
    coco["images"] = [each | {"width": 40, "height": 20} for each in coco["images"]]
    config = write(tmp_path, coco)
    with pytest.raises(RecastError, match=r": annotations\..*--bad-image skip"):
        load_data(config)
    with pytest.warns(UserWarning, match="left out for an annotation that cannot be read: 1"):
        data = load_data(config.replace(bad_image="skip"))
    assert {Path(name).name for part in (data.train, data.val) for name in part.items} == {"b.png", "c.png"}
    coco["annotations"][0]["image_id"] = 99  # of no image: of which, nobody knows
    with pytest.raises(RecastError, match=r"annotations"):
        load_data(write(tmp_path, coco).replace(bad_image="skip"))


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
    "annotations.2.segmentation: a polygon needs .* got 0 numbers": changed(segmentation=[[]]),
    "annotations.2.segmentation: polygons are lists in a list": changed(segmentation=[1, 2, 8, 2, 8, 9]),
    "annotations.2.segmentation: .* got a list of points": changed(segmentation=[[[1, 2], [8, 2], [8, 9]]]),
    "annotations.2.segmentation: .* a list of points .*1, 2": changed(segmentation=[[1, 2], [8, 2], [8, 9]]),
    "annotations.2.segmentation: .* a list of points .*'x'": changed(segmentation=[[{"x": 1, "y": 2}] * 3]),
    "annotations.2.segmentation: a polygon needs an x and a y .* 7 numbers": changed(
        segmentation=[[1, 2, 8, 2, 8, 9, 3]]
    ),
    "annotations.2.segmentation: a polygon has numbers .*'9'": changed(segmentation=[[1, 2, 8, 2, 8, "9"]]),
    "annotations.2.segmentation: a polygon has numbers .*nan": changed(segmentation=[[1, 2, 8, 2, 8, float("nan")]]),
    "3 of 6 boxes are there twice": COCO | {"annotations": COCO["annotations"] * 2},
    "lists images twice .1: .*a.png": COCO | {"images": [*COCO["images"], {"id": 8, "file_name": "../images/a.png"}]},
    "annotations.0.bbox is missing": COCO | {"annotations": [{"image_id": 3, "category_id": 4}]},
    "categories with the id 4 twice": COCO | {"categories": [*COCO["categories"], {"id": 4, "name": "owl"}]},
    "categories 'owl' twice": COCO | {"categories": [{"id": 9, "name": "owl"}, {"id": 4, "name": "owl"}]},
    "d.png": COCO | {"images": [{"id": n, "file_name": "d.png"} for n in (3, 7)]},
    "images.0.file_name": COCO | {"images": [{"id": 7, "file_name": None}, *COCO["images"][1:]]},
    "no object but crowds": COCO | {"annotations": [item | {"iscrowd": 1} for item in COCO["annotations"]]},
    "3 images and no object": COCO | {"annotations": []},
    "images must have": COCO | {"images": [], "annotations": []},
}


@pytest.mark.parametrize(
    ("train", "others"),
    [
        ("train/_annotations.coco", ["valid/_annotations.coco", "test/_annotations.coco"]),
        ("Train/_annotations.coco", ["Test/_annotations.coco", "testing/_annotations.coco"]),
        ("annotations/instances_train2017", ["annotations/instances_val2017", "annotations/captions_val2017"]),
        ("mine", []),
    ],
)
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
    rows = "10001 11101 10101 01000 00111 01111 10010"
    expected = np.array([[int(pixel) for pixel in row] for row in rows.split()])
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


def boxed(folder: Path, *boxes: Any, size: bool = True) -> DataConfig:
    """Three images of 40x20 with these boxes each."""
    annotations = [
        {"image_id": image["id"], "category_id": 4, "bbox": list(box)} for image in COCO["images"] for box in boxes
    ]
    return write(folder, COCO | {"images": SIZED if size else COCO["images"], "annotations": annotations})


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(0.5, 0.4, 0.25, 0.3)], "all 3 boxes are between 0 and 1: normalised"),
        ([(0.5, 0.4, 0.75, 0.7), (0, 0, 1, 1)], "all 6 boxes are between 0 and 1"),
        ([(20, 12, 30, 20), (1, 1, 9, 9)], "3 of 6 boxes reach far beyond their image: .*not right, bottom"),
        ([(30, 10, 60, 5), (35, 10, 20, 5), (9, 1, 4, 4)], "6 of 9 boxes reach far beyond their image"),
        ([(3, 3, 4, 0.2)], "none of 3 boxes is a pixel wide and high at --img-size 80"),
    ],
)
@pytest.mark.parametrize("size", [True, False])
def test_boxes_of_another_form(tmp_path: Path, boxes: list[Any], message: str, size: bool) -> None:
    """The size of an image is the file's where the JSON has none."""
    with pytest.raises(RecastError, match=message):
        load_data(boxed(tmp_path, *boxes, size=size))


def test_the_line_about_boxes(tmp_path: Path) -> None:
    boxes = [(3, 3, 9, 5), (3, 3, 9, 5), (9, 3, 0, 4), (9, 3, 0.3, 4), (38, 3, 6, 4), (0, 0, 39, 19)]
    text = "images: 3, boxes: 18; beyond their image: 3, without area: 3, twice: 3, crowds: 0, .* 80 .*: 66.7 %"
    with pytest.warns(UserWarning, match=text):
        load_data(boxed(tmp_path, *boxes))
    coco = changed(segmentation=[[1, 2, 4, 2, 4, 6]])
    with pytest.warns(UserWarning, match="crowds: 1, .*: 66.7 %; masks: 1, not used, as others have none"):
        data = load_data(write(tmp_path, coco))
    assert not data.train.has_masks
    with pytest.warns(UserWarning, match="categories without a box: eel"):
        load_data(write(tmp_path, COCO | {"categories": [*COCO["categories"], {"id": 99, "name": "eel"}]}))


@pytest.mark.parametrize("form", ["images\\{}", "C:\\mine\\images\\{}", "/data/upload/{}", "https://host/images/{}"])
def test_names_of_other_computers(tmp_path: Path, form: str) -> None:
    images = [image | {"file_name": form.format(image["file_name"])} for image in COCO["images"]]
    data = load_data(write(tmp_path, COCO | {"images": images}))
    assert sorted(Path(name).name for part in (data.train, data.val) for name in part.items) == [
        "a.png",
        "b.png",
        "c.png",
    ]


def test_an_image_of_another_part_is_not_taken(tmp_path: Path) -> None:
    """Numbered files lie in both folders; a part may be made of the other's images, though."""
    config = write(tmp_path, COCO)
    (tmp_path / "annotations.json").unlink()
    (tmp_path / "annotations").mkdir()
    shutil.copytree(tmp_path / "images", tmp_path / "val2017")
    (tmp_path / "images").rename(tmp_path / "train2017")
    for part in ("train", "val"):
        (tmp_path / "annotations" / f"instances_{part}2017.json").write_text(json.dumps(COCO))
    (tmp_path / "train2017" / "a.png").unlink()
    with pytest.raises(RecastError, match=r"train2017.json: 1 of 3 images are in no folder of .*: 'a.png'; add"):
        load_data(config)
    with pytest.warns(UserWarning, match=r"images: 2, boxes: 2; .*; images left out, which are missing: 1"):
        data = load_data(config.replace(bad_image="skip"))
    assert (len(data.train), len(data.val)) == (2, 3)
    assert {Path(name).parent.name for name in data.train.items} == {"train2017"}
    shutil.rmtree(tmp_path / "train2017")
    assert {Path(name).parent.name for name in load_data(config).train.items} == {"val2017"}


def test_unreadable_images_are_skipped(tmp_path: Path) -> None:
    config = write(tmp_path, COCO)
    (tmp_path / "images" / "a.png").write_bytes(b"x")
    data = load_data(config.replace(bad_image="skip"))
    loaders = [Loader(part, 1, shuffle_seed=0, bad_image="skip") for part in (data.train, data.val)]
    assert sum(len(labels) for loader in loaders for _, labels in loader) >= 2
    assert [Path(name).name for loader in loaders for name in loader.bad_images] == ["a.png"]


@pytest.mark.parametrize("name", ["/dev/zero", "pipe.png", "socket.png", "link.png", "../images/pipe.png"])
@pytest.mark.parametrize("bad_image", ["stop", "skip"])
def test_names_of_devices_are_refused(tmp_path: Path, name: str, bad_image: str, monkeypatch: Any) -> None:
    config = write(tmp_path, COCO | {"images": [COCO["images"][0] | {"file_name": name}, *COCO["images"][1:]]})
    monkeypatch.chdir(tmp_path / "images")  # names of sockets must be short
    os.mkfifo("pipe.png")
    Path("link.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket.png")
        with pytest.raises(RecastError, match="is a device, a pipe or a socket: expected an image file"):
            load_data(config.replace(bad_image=bad_image))
