from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from recast.data import load_data, loader
from recast.data.datasets import ImageTensors
from recast.errors import RecastError
from recast.run.config import DataConfig


def write_idx(path: Path, values: np.ndarray) -> None:
    """MNIST's file format: magic number (uint8, dimensions), sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([0x0800 + values.ndim, *values.shape], dtype=">i4").tobytes()
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def make_mnist(root: Path, name: str = "MNIST") -> np.ndarray:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28))
    for part, chosen in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        write_idx(root / name / "raw" / f"{part}-images-idx3-ubyte", pixels[chosen])
        write_idx(root / name / "raw" / f"{part}-labels-idx1-ubyte", np.arange(40)[chosen] % 10)
    return pixels


@pytest.mark.parametrize("spelling", ["torch/fashion_mnist", "torch/FashionMNIST"])
def test_grey_images_in_memory_become_rgb_at_their_own_size(tmp_path: Path, spelling: str) -> None:
    pixels = make_mnist(tmp_path, "FashionMNIST")
    data = load_data(DataConfig(spelling, str(tmp_path)))
    assert (len(data.train), len(data.val), data.img_size, data.name) == (30, 10, 28, "fashion_mnist")
    assert isinstance(data.train, ImageTensors)
    assert (data.augment.crop, data.augment.flip, data.mean) == ("pad", True, (0.286, 0.286, 0.286))
    assert data.classes[:2] == ["T-shirt/top", "Trouser"]
    image, label = data.val[3]
    assert label == 3
    assert (image * 255).round().equal(torch.from_numpy(pixels[33]).float().expand(3, -1, -1))


def test_characters_are_not_mirrored_and_subsets_are_balanced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_mnist(tmp_path / "mnist")
    monkeypatch.setenv("RECAST_DATA", str(tmp_path))
    data = load_data(DataConfig("torch/mnist", img_size=32, test_size=40, num_val=10, data_fraction=0.5))
    assert (data.augment.flip, data.img_size, data.test_size) == (False, 32, 40)
    assert data.train.labels.bincount().tolist() == [2] * 10


def fake_flowers(root: Path, split: str) -> SimpleNamespace:
    """As torchvision keeps them: labels in a private list, files opened when asked for."""
    labels = {"train": [0, 1], "val": [1, 2], "test": [2, 0, 1]}[split]

    class Flowers(SimpleNamespace):
        def __len__(self) -> int:
            return len(labels)

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.open(root / f"{split}{index}.png"), labels[index]

    for index, label in enumerate(labels):
        Image.new("L", (30, 20), 50 * label).save(root / f"{split}{index}.png")
    return Flowers(_labels=labels)


def test_data_sets_in_files_are_read_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.data.libraries.vision.Flowers102", fake_flowers)
    data = load_data(DataConfig("torch/flowers102", str(tmp_path), img_size=16))
    assert data.name == "Flowers102"
    assert data.train.labels.tolist() == [0, 1, 1, 2]  # train and val
    assert data.val.labels.tolist() == [2, 0, 1]
    assert data.classes == ["0", "1", "2"]
    assert data.augment.crop == "random"
    images, labels = data.train.plain().batch([3, 0])
    assert (images[:, :, 0, 0] * 255).round().tolist() == [[100.0] * 3, [0.0] * 3]
    assert labels.tolist() == [2, 0]
    (tmp_path / "test1.png").write_bytes(b"broken")
    with pytest.raises(RecastError, match="cannot read image torch/Flowers102 validation 1: not an image") as caught:
        data.val.batch([0, 1])
    assert "\n" not in str(caught.value)
    source = loader(data.val, 3, bad_image="skip", workers=1)
    assert [labels.tolist() for _, labels in source] == [[2, 1]]
    assert source.bad_images == ["torch/Flowers102 validation 1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "torch/mnist",
            r"mnist is not in .* files of torchvision \(Dataset not found.*MNIST\(.*download=True",
        ),
        ("torch/DTD", r"DTD is not in .*download=True.* DTD\('.*', split='train', download=True\)"),
        ("torch/cifar10", r"torchvision or train\.zip and test\.zip"),
        ("torch/emnist", "unknown data set torch/emnist: expected one of cifar10, .*Flowers102.* Did you mean mnist"),
    ],
)
def test_what_is_not_there_is_one_clear_line(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RecastError, match=message) as caught:
        load_data(DataConfig(name, str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (SimpleNamespace(targets=torch.tensor([[3, 9], [4, 9]])), [3, 4]),  # QMNIST
        (SimpleNamespace(_samples=[("a.jpg", 5), ("b.jpg", 6)]), [5, 6]),  # StanfordCars
        (SimpleNamespace(index=[(7, "a.jpg"), (8, "b.jpg")]), [7, 8]),  # INaturalist
    ],
)
def test_labels_are_found_without_decoding(part: SimpleNamespace, expected: list[int]) -> None:
    from recast.data.libraries import _labels

    assert _labels(part).tolist() == expected
