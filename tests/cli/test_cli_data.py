"""Data as users have it, each by one command: layouts of folders, images of several bands."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from recast.lab.folder.files import read_names
from recast.lab.folder.run import RunFolder

Cli = Callable[..., Any]
Refused = Callable[..., str]


def draw(path: Path, number: int, label: int = 0, size: tuple[int, int] = (24, 20)) -> None:
    rng = np.random.default_rng(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = rng.integers(0, 120, (size[1], size[0], 3), np.uint8)
    pixels[..., label % 3] += 120
    Image.fromarray(pixels).save(path)


def brain_mri(root: Path) -> str:
    images = root / "brain_tumor_dataset"
    for number in range(16):
        ending = ("jpg", "JPG", "jpeg")[number % 3]
        draw(images / ("yes", "no")[number % 2] / f"Y{number} .{ending}", number)
    for number in range(16, 20):  # in both classes
        draw(images / "no" / f"no {number}.jpg", number)
        draw(images / "yes" / f"Y{number}.JPG", number)
    shutil.copytree(images, root, dirs_exist_ok=True)  # the archive holds everything twice
    return "folder --data-dir brain_tumor_dataset"


def roboflow_coco(root: Path) -> str:
    names = enumerate(("fruits", "apple", "kiwi"))
    categories = [{"id": number, "name": name, "supercategory": "fruits"} for number, name in names]
    for part, count in (("train", 6), ("valid", 3), ("test", 2)):
        images, objects = [], []
        for number in range(count):
            name = f"{number}_jpg.rf.c0ffee{number}.jpg"
            draw(root / part / name, 10 * count + number, size=(64, 64))
            images.append({"id": number, "license": 1, "file_name": name, "height": 64, "width": 64})
            box = {"bbox": [8, 8, 30.5, 24], "area": 732, "segmentation": [], "iscrowd": 0}
            objects.append({"id": number, "image_id": number, "category_id": 1 + number % 2, **box})
        content = {"info": {"year": "2024"}, "categories": categories, "images": images, "annotations": objects}
        (root / part / "_annotations.coco.json").write_text(json.dumps(content), encoding="utf-8")
    return "detect --model retinanet:test_resnet --data coco --data-dir ."


def celeba(root: Path) -> str:
    rows = ["image_id,Smiling,Young"]
    for number in range(18):
        draw(root / "img_align_celeba/img_align_celeba" / f"{number:06}.jpg", number)
        rows.append(f"{number:06}.jpg,{1 if number % 2 else -1},{1 if number % 3 else -1}")
    (root / "list_attr_celeba.csv").write_text("\n".join(rows), encoding="utf-8")
    table = "--labels-file list_attr_celeba.csv --label-column Smiling,Young"
    return f"folder --data csv --data-dir img_align_celeba {table}"


LAYOUTS = {
    brain_mri: (["no", "yes"], 24),
    roboflow_coco: (["fruits", "apple", "kiwi"], 9),
    celeba: (["Smiling", "Young"], 18),
}
"""Public data sets as they are downloaded → their classes and number of images; tests/data has every layout."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_trained_by_one_command(
    layout: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (tmp_path / "data").mkdir()
    words = layout(tmp_path / "data").split()
    monkeypatch.chdir(tmp_path / "data")
    small = "--where none --epochs 1 --batch-size 4 --img-size 64 --out ../run".split()
    network = "--model cifar_resnet20 --no-pretrained".split() if words[0] == "folder" else []
    done = cli("train", *words, *small, *network)
    assert done.code == 0, done.err
    assert done.err.count("the parent has random weights") == 1
    classes, number = LAYOUTS[layout]
    assert read_names(tmp_path / "run/classes.json") == classes
    assert RunFolder(tmp_path / "run").duplicates.exists() == (layout is brain_mri)
    count = json.loads((tmp_path / "run/data.json").read_text())
    assert count["train"]["number"] + count["val"]["number"] == number


@pytest.mark.filterwarnings("default")
def test_unreadable_images_are_skipped_by_every_command(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recast.lab.trial.arms.BLOCK_SECONDS", 0.0)  # the shortest timing
    for number in range(120):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number:03}.png"
        draw(path, number, number % 2)
        if number % 15 == 0:
            path.write_bytes(b"broken")
    words = ("--model", "digits_resnet", "--data-dir", tmp_path / "data", "--img-size", 16, "--val-fraction", 0.25)
    small = ("--no-pretrained", "--where", "none", "--epochs", 1, "--batch-size", 8, "--bad-image", "skip")
    (tmp_path / "coarse.csv").write_text("fine,coarse\na,first\nb,second\n", encoding="utf-8")
    done = cli("train", "folder", *words, *small, "--coarse-file", tmp_path / "coarse.csv", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "duplicates" not in done.out  # equal bytes that are no images
    evaluate = ("evaluate", tmp_path / "run", "--suite")
    neighbours = ("explain", tmp_path / "run", "--neighbours")
    for command in ((*evaluate, "clean"), (*evaluate, "knn", "--labels", "coarse"), neighbours):
        done = cli(*command)
        assert done.code == 0, done.err
        assert "skipped unreadable images" in done.err
    torch.manual_seed(0)
    save_file(timm.create_model("digits_resnet", num_classes=2).state_dict(), tmp_path / "w.safetensors")
    trial = ("try", *words, "--checkpoint", tmp_path / "w.safetensors", "--minutes", 1e-3, "--seeds", 1)
    done = cli(*trial, "--out", tmp_path / "try")
    assert done.code == 2
    assert "error: cannot read image" in done.err
    assert not (tmp_path / "try").exists()
    done = cli(*trial, "--bad-image", "skip", "--out", tmp_path / "try")
    assert done.code == 0, done.err
    assert "skipped unreadable images (8)" in done.err


def test_layouts_that_are_refused_name_the_way_out(tmp_path: Path, refused: Refused) -> None:
    train = ("train", "folder", "--model", "digits_resnet", "--no-pretrained", "--out", tmp_path / "run", "--data-dir")
    brain_mri(tmp_path / "mri")
    draw(tmp_path / "pets/images/Abyssinian_1.jpg", 1)
    draw(tmp_path / "pets/annotations/trimaps/Abyssinian_1.png", 1)
    for folder, words in (
        ("gone", ("no such data folder",)),
        ("mri", ("--data-dir",)),
        ("pets/images", ("Abyssinian_1.jpg", "--data csv")),
        ("pets", ("images and annotations", "--data csv")),
    ):
        message = refused(*train, tmp_path / folder)
        assert all(word in message for word in words)


@pytest.mark.filterwarnings("ignore:auto_augment and color_jitter")
def test_a_run_from_training_to_export(tmp_path: Path, cli: Cli, refused: Refused) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number // 2}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.normal(300 * (number % 2), 20, (20, 20, 6)).astype(np.float32))
    run, words = tmp_path / "run", ("--model", "digits_resnet", "--no-pretrained", "--data-dir", tmp_path / "data")
    small = ("--img-size", 16, "--batch-size", 6, "--epochs", 1, "--where", "layer3.1.conv1")
    train = ("train", "folder", *words, *small, "--out", run, "--in-chans")
    assert "has 6 bands, the network takes 5" in refused(*train, 5)
    assert cli(*train, 6).code == 0
    assert cli("evaluate", run).code == 0
    done = cli("evaluate", run, "--suite", "clean,fgsm")
    assert (done.code, "clean top1" in done.out, "next:" in done.out) == (2, True, False)
    assert "fgsm requires RGB" in done.err
    assert cli("explain", run, tmp_path / "data/a/0.npy", "--bands", "6,1,2").code == 0
    assert cli("explain", run, "--neighbours").code == 0
    assert cli("export", run, "--out", run / "model.pt2").code == 0
    network = ("digits_resnet", "--in-chans", 6, "--where", "layer3.1.conv1", "--img-size", 16)
    assert "1 of " in cli("plan", *network).out
    of_data = ("--data", "folder", "--data-dir", tmp_path / "data", "--num-images", 2)
    assert "same function" in cli("verify", *network, *of_data).out
    assert "--in-chans" in refused("verify", "torchvision:resnet18", *network[1:3])
