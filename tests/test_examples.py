"""The scripts of examples/ run on a few small images, as a user would run them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of two classes, the boxes of four of them, and what the scripts write."""
    folder, random = tmp_path_factory.mktemp("examples"), np.random.default_rng(0)
    for name, mean in (("dark", 60), ("light", 190)):
        for part, count in (("train", 8), ("val", 4)):
            place = folder / "photos" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = mean + random.integers(-40, 40, (24, 32, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    images = [{"id": k, "file_name": f"train/dark/{k}.png", "width": 32, "height": 24} for k in range(4)]
    boxes = [
        {"id": k, "image_id": k, "category_id": 7, "bbox": [4, 4, 9, 9], "area": 81, "iscrowd": 0} for k in range(4)
    ]
    content = {"images": images, "categories": [{"id": 7, "name": "thing"}], "annotations": boxes}
    (folder / "boxes.json").write_text(json.dumps(content))
    return folder


def run(folder: Path, script: str, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / script), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_network_is_trained_by_hand_then_exported_and_served(folder: Path) -> None:
    out = run(folder, "train_by_hand.py", "photos", "--model", "resnet10t", "--epochs", "1", "--batch", "8")
    assert "bitwise equal" in out
    assert len(re.findall(r"top-1 [\d.]+ % of 8 images", out)) == 2
    assert "same outputs: True" in out
    pytest.importorskip("onnxruntime")
    out = run(folder, "export_and_serve.py", "child.safetensors", "photos/val/dark/0.png", "photos/val/light/0.png")
    assert len(re.findall(r"^photos/val/\w+/0.png: (dark|light) \(\d+%\)$", out, flags=re.MULTILINE)) == 2


@pytest.mark.slow
def test_a_folder_becomes_a_report(folder: Path) -> None:
    words = ("photos", "--model", "resnet10t", "--epochs", "1", "--img-size", "32", "--batch", "8", "--out", "run")
    out = run(folder, "folder_to_report.py", *words)
    assert re.search(r"^recast: top1 [\d.]+ \(clean, 8 images\)$", out, flags=re.MULTILINE)
    assert (folder / "run/report.html").is_file()


@pytest.mark.slow
def test_a_detector_is_recast(folder: Path) -> None:
    out = run(folder, "recast_a_detector.py", "photos", "boxes.json", "--steps", "1")
    assert "bitwise equal" in out
    assert "step 0: loss" in out
    assert (folder / "detector.safetensors").is_file()


def test_an_example_is_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 4
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 120 for path in scripts)
