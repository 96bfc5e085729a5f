"""Data as users have it, each by one command: layouts of folders, images of several bands."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from recast.lab.data.duplicates import DUPLICATES
from recast.lab.files import read_names

Cli = Callable[..., Any]
Refused = Callable[..., str]


def draw(path: Path, number: int, label: int = 0, size: tuple[int, int] = (24, 20)) -> None:
    """Draw an image whose colour depends on its label."""
    rng = np.random.default_rng(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 120, (size[1], size[0], 3), np.uint8)
    pixels[..., label % 3] += 120
    Image.fromarray(pixels).save(path)


def write_rows(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def brain_mri(root: Path) -> str:
    for number in range(16):
        draw(
            root
            / "brain_tumor_dataset"
            / ("yes", "no")[number % 2]
            / f"Y{number} .{('jpg', 'JPG', 'jpeg')[number % 3]}",
            number,
        )
    for number in range(16, 20):  # in both classes
        draw(root / "brain_tumor_dataset/no" / f"no {number}.jpg", number)
        draw(root / "brain_tumor_dataset/yes" / f"Y{number}.JPG", number)
    for name in ("yes", "no"):  # the archive holds everything twice
        shutil.copytree(root / "brain_tumor_dataset" / name, root / name)
    return "folder --data-dir brain_tumor_dataset"


def intel_scenes(root: Path) -> str:
    for number in range(12):
        for label, name in enumerate(("buildings", "forest", "sea")):
            part = ("seg_train", "seg_test")[number % 4 == 0]
            draw(root / part / part / name / f"{number}.jpg", 3 * number + label, label)
        draw(root / "seg_pred/seg_pred" / f"{number}.jpg", 100 + number)
    return "folder --data-dir ."


def fruits_360(root: Path) -> str:
    for number in range(9):
        for label, name in enumerate(("Apple Braeburn", "Apple Crimson Snow", "Kaki")):
            part = "fruits-360/" + ("Training", "Test")[number % 3 == 0]
            draw(root / part / name / f"{number}_100.jpg", 3 * number + label, label)
        draw(root / "fruits-360/test-multiple_fruits" / f"apple_{number}.jpg", 100 + number)
    (root / "fruits-360/readme.md").write_text("# Fruits", encoding="utf-8")
    return "folder --data-dir ."


def chest_xrays(root: Path) -> str:
    rows = [("Image Index", "Finding Labels", "Follow-up #", "Patient ID")]
    for number in range(18):
        draw(root / f"images_{number % 3 + 1:03}/images" / f"{number:08}_000.png", number)
        rows.append((f"{number:08}_000.png", ("Effusion", "Mass|Nodule", "No Finding")[number % 3], "0", str(number)))
    write_rows(root / "Data_Entry_2017.csv", rows)
    return "folder --data csv --data-dir . --labels-file Data_Entry_2017.csv"


def eurosat(root: Path) -> str:
    rng = np.random.default_rng(0)
    for number in range(18):
        name = ("AnnualCrop", "Forest", "SeaLake")[number % 3]
        (root / name).mkdir(exist_ok=True)
        pixels = rng.normal(1000 + 500 * (number % 3), 100, (16, 16, 13)).astype(np.uint16)
        path = root / name / f"{name}_{number // 3 + 1}.tif"
        tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig")
    return "folder --data-dir . --in-chans 13"


def roboflow_coco(root: Path) -> str:
    categories = [{"id": 0, "name": "fruits", "supercategory": "none"}]
    categories += [
        {"id": n, "name": name, "supercategory": "fruits"} for n, name in enumerate(("apple", "kiwi"), start=1)
    ]
    for part, count in (("train", 6), ("valid", 3), ("test", 2)):
        images, objects = [], []
        for number in range(count):
            name = f"{number}_jpg.rf.c0ffee{number}.jpg"
            draw(root / part / name, 10 * count + number, size=(64, 64))
            images.append(
                {"id": number, "license": 1, "file_name": name, "height": 64, "width": 64, "date_captured": ""}
            )
            box = {"bbox": [8, 8, 30.5, 24], "area": 732, "segmentation": [], "iscrowd": 0}
            objects.append({"id": number, "image_id": number, "category_id": 1 + number % 2, **box})
        content = {
            "info": {"year": "2024"},
            "licenses": [],
            "categories": categories,
            "images": images,
            "annotations": objects,
        }
        (root / part / "_annotations.coco.json").write_text(json.dumps(content), encoding="utf-8")
    (root / "README.roboflow.txt").write_text("exported", encoding="utf-8")
    return "detect --model retinanet:test_resnet --data coco --data-dir ."


def leftovers(root: Path) -> str:
    for number in range(16):
        draw(root / ("cat", "dog")[number % 2] / f"{number}.png", number, number % 2)
    for name in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "dog/desktop.ini", "checkpoints/best.pth"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"left")
    (root / ".ipynb_checkpoints").mkdir()
    draw(root / "cat/.ipynb_checkpoints/0-checkpoint.png", 0)
    (root / "empty").mkdir()
    return "folder --data-dir ."


def one_hot(root: Path) -> str:
    rows = [("image_id", "healthy", "rust", "scab")]
    for number in range(18):
        draw(root / "images" / f"Train_{number}.jpg", number, number % 3)
        rows.append((f"Train_{number}", *(int(label == number % 3) for label in range(3))))
    write_rows(root / "train.csv", rows)
    return "folder --data csv --data-dir images --labels-file train.csv --label-column healthy,rust,scab"


def plain_csv(root: Path) -> str:
    for number in range(18):
        draw(root / "photos" / f"{number}.webp", number, number % 2)
    write_rows(root / "labels.csv", [("file", "label"), *((f"{n}.webp", ("cat", "dog")[n % 2]) for n in range(18))])
    return "folder --data csv --data-dir photos --labels-file labels.csv"


def celeba(root: Path) -> str:
    rows: list[Sequence[object]] = [("image_id", "Smiling", "Young")]
    for number in range(18):
        draw(root / "img_align_celeba/img_align_celeba" / f"{number:06}.jpg", number)
        rows.append((f"{number:06}.jpg", 1 if number % 2 else -1, 1 if number % 3 else -1))
    write_rows(root / "list_attr_celeba.csv", rows)
    return (
        "folder --data csv --data-dir img_align_celeba --labels-file list_attr_celeba.csv --label-column Smiling,Young"
    )


LAYOUTS = {
    brain_mri: ["no", "yes"],
    intel_scenes: ["buildings", "forest", "sea"],
    fruits_360: ["Apple Braeburn", "Apple Crimson Snow", "Kaki"],
    chest_xrays: ["Effusion", "Mass", "No Finding", "Nodule"],
    eurosat: ["AnnualCrop", "Forest", "SeaLake"],
    roboflow_coco: ["fruits", "apple", "kiwi"],
    leftovers: ["cat", "dog"],
    one_hot: ["healthy", "rust", "scab"],
    plain_csv: ["cat", "dog"],
    celeba: ["Smiling", "Young"],
}
"""Public data sets as they are downloaded → their classes."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_layouts_are_trained_by_one_command(
    layout: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "data").mkdir()
    words = layout(tmp_path / "data").split()
    monkeypatch.chdir(tmp_path / "data")
    small = "--where none --epochs 1 --batch-size 4 --img-size 16 --out ../run".split()
    if words[0] == "folder":
        small += ["--model", "cifar_resnet20", "--no-pretrained"]
    else:
        small[small.index("16")] = "64"
    done = cli("train", *words, *small)
    assert done.code == 0, done.err
    assert read_names(tmp_path / "run/classes.json") == LAYOUTS[layout]
    assert (tmp_path / "run" / DUPLICATES).exists() == (layout is brain_mri)
    count = json.loads((tmp_path / "run/data.json").read_text())
    expected = {brain_mri: 24, intel_scenes: 36, fruits_360: 27, roboflow_coco: 9, leftovers: 16}.get(layout, 18)
    assert count["train"]["number"] + count["val"]["number"] == expected


def test_layouts_that_are_refused_name_the_way_out(tmp_path: Path, refused: Refused) -> None:
    train = ("train", "folder", "--model", "cifar_resnet20", "--no-pretrained", "--out", tmp_path / "run", "--data-dir")
    brain_mri(tmp_path / "mri")
    assert "--data-dir" in refused(*train, tmp_path / "mri")
    draw(tmp_path / "pets/images/Abyssinian_1.jpg", 1)
    assert "Abyssinian_1.jpg" in (message := refused(*train, tmp_path / "pets/images"))
    assert "--data csv" in message
    draw(tmp_path / "pets/annotations/trimaps/Abyssinian_1.png", 1)
    assert "images and annotations" in (message := refused(*train, tmp_path / "pets"))
    assert "--data csv" in message


@pytest.mark.filterwarnings("ignore:auto_augment and color_jitter")
def test_a_run_from_training_to_export(tmp_path: Path, cli: Cli, refused: Refused) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number // 2}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.normal(300 * (number % 2), 20, (20, 20, 6)).astype(np.float32))
    run, words = tmp_path / "run", ("--model", "cifar_resnet20", "--no-pretrained", "--data-dir", tmp_path / "data")
    small = ("--img-size", 16, "--batch-size", 6, "--epochs", 1, "--where", "layer3.2.conv2")
    assert "has 6 bands, the network takes 5" in refused(
        "train", "folder", *words, *small, "--in-chans", 5, "--out", run
    )
    assert cli("train", "folder", *words, *small, "--in-chans", 6, "--out", run).code == 0
    assert cli("evaluate", run).code == 0
    done = cli("evaluate", run, "--suite", "fgsm")
    assert done.code == 2
    assert "fgsm requires RGB" in done.err
    assert cli("explain", run, tmp_path / "data/a/0.npy", "--bands", "6,1,2").code == 0
    assert cli("explain", run, "--neighbours").code == 0
    assert cli("export", run, "--out", run / "model.pt2").code == 0
    network = ("cifar_resnet20", "--in-chans", 6, "--where", "layer3.2.conv2", "--img-size", 16)
    assert "1 of " in cli("plan", *network).out
    of_data = ("--data", "folder", "--data-dir", tmp_path / "data", "--num-images", 2)
    assert "same function" in cli("verify", *network, *of_data).out
    wrong = ("verify", "torchvision:resnet18", *network[1:3])
    assert "--in-chans" in refused(*wrong)
