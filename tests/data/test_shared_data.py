"""The real archives: only where RECAST_DATA names them and RECAST_SLOW=1 asks for it."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recast.data import load_data
from recast.run.config import DataConfig

ROOT = Path(os.environ.get("RECAST_DATA") or "missing")
pytestmark = pytest.mark.skipif(not (os.environ.get("RECAST_SLOW") and ROOT.is_dir()), reason="needs data and time")


@pytest.mark.parametrize(("name", "train", "classes"), [("cifar10", 16_000, 10), ("cifar100", 20_000, 100)])
def test_cifar_labels_are_line_numbers_of_the_class_list(name: str, train: int, classes: int) -> None:
    data = load_data(DataConfig(name=name, num_train=classes))
    names = (ROOT / name / "classes.txt").read_text(encoding="utf-8").split()
    assert data.classes == names
    assert len(data.train) == classes
    assert len(load_data(DataConfig(name=name, num_train=train, num_val=classes)).train) == train
    assert data.val.labels.bincount().tolist() == [5000 // classes] * classes
    with zipfile.ZipFile(ROOT / name / "test.zip") as archive:
        for index in range(0, 5000, 499):
            image, label = data.val[index]
            within = sorted(member for member in archive.namelist() if member.startswith(f"{names[label]}/"))
            content = archive.read(within[index % (5000 // classes)])
            expected = torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1) / 255
            assert image.equal(expected)


def test_imagenet_sample_has_the_labels_of_its_index() -> None:
    data = load_data(DataConfig(name="folder", data_dir=str(ROOT / "imagenet_sample")))
    assert (len(data.train), len(data.val), len(data.classes)) == (0, 200, 1000)
    assert data.val.labels.unique().numel() == 200
    assert data.val[0][0].shape == (3, 224, 224)
    assert data.classes[int(data.val.labels[0])].startswith("electric ray")
