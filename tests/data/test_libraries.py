"""torch/NAME and hfds/NAME: other libraries' data sets."""

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.data.datasets import ImageTensors


def make_mnist(root: Path, name: str = "MNIST") -> np.ndarray:
    """MNIST's file format: magic number (uint8, dimensions), sizes, bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28))
    (root / name / "raw").mkdir(parents=True)
    for part, chosen in (("train", slice(0, 30)), ("t10k", slice(30, 40))):
        for kind, values in (("images-idx3", pixels[chosen]), ("labels-idx1", np.arange(40)[chosen] % 10)):
            header = np.array([0x0800 + values.ndim, *values.shape], dtype=">i4").tobytes()
            path = root / name / "raw" / f"{part}-{kind}-ubyte"
            path.write_bytes(header + values.astype(np.uint8).tobytes())
    return pixels


@pytest.mark.parametrize("spelling", ["torch/fashion_mnist", "torch/FashionMNIST"])
def test_grey_images_in_memory_become_rgb_at_their_own_size(tmp_path: Path, spelling: str) -> None:
    pixels = make_mnist(tmp_path, "FashionMNIST")
    data = load_data(DataConfig(spelling, str(tmp_path)))
    assert (len(data.train), len(data.val), data.img_size, data.name) == (30, 10, 28, "fashion_mnist")
    assert isinstance(data.train, ImageTensors)
    assert (data.train.augment.crop, data.train.augment.flip, data.mean) == ("pad", True, (0.286, 0.286, 0.286))
    assert data.classes[:2] == ["T-shirt/top", "Trouser"]
    image, label = data.val[3]
    assert label == 3
    assert (image * 255).round().equal(torch.from_numpy(pixels[33]).float().expand(3, -1, -1))


def held(**names: Any) -> type[SimpleNamespace]:
    """A data set of torchvision whose labels lie under these names; its items are grey images of files."""

    class Held(SimpleNamespace):
        def __init__(self, root: Path, split: str) -> None:
            super().__init__(root=root, split=split, **{name: value[split] for name, value in names.items()})

        def __len__(self) -> int:
            return len(next(value[self.split] for value in names.values()))

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.open(self.root / f"{self.split}{index}.png"), -1

    return Held


def test_data_sets_in_files_are_read_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = {"train": [0, 1], "val": [1, 2], "test": [2, 0, 1]}
    for split in labels:
        for index, label in enumerate(labels[split]):
            Image.new("L", (30, 20), 50 * label).save(tmp_path / f"{split}{index}.png")
    monkeypatch.setattr("recast.lab.data.libraries.vision.Flowers102", held(_labels=labels))
    data = load_data(DataConfig("torch/flowers102", str(tmp_path), img_size=16))
    assert (data.name, data.classes, data.train.augment.crop) == ("Flowers102", ["0", "1", "2"], "random")
    assert data.train.labels.tolist() == [0, 1, 1, 2]  # train and val
    assert data.val.labels.tolist() == [2, 0, 1]
    images, classes = data.train.plain().batch([3, 0])
    assert (images[:, :, 0, 0] * 255).round().tolist() == [[100.0] * 3, [0.0] * 3]
    assert classes.tolist() == [2, 0]
    (tmp_path / "test1.png").write_bytes(b"broken")
    with pytest.raises(RecastError, match="cannot read image torch/Flowers102 validation 1: not an image") as caught:
        data.val.batch([0, 1])
    assert "\n" not in str(caught.value)
    source = Loader(data.val, 3, bad_image="skip", workers=1)
    assert [labels.tolist() for _, labels in source] == [[2, 1]]
    assert source.bad_images == ["torch/Flowers102 validation 1"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch/mnist", r"mnist is not in .* files of torchvision \(Dataset not found.*MNIST\(.*download=True"),
        ("torch/DTD", r"DTD is not in .* DTD\('.*', split='train', download=True\)"),
        ("torch/cifar10", r"torchvision or train\.zip and test\.zip"),
        ("torch/emnist", "unknown data set torch/emnist: expected one of cifar10, .*Flowers102.* Did you mean mnist"),
    ],
)
def test_what_is_not_there_is_one_clear_line(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RecastError, match=message) as caught:
        load_data(DataConfig(name, str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"garbage" * 99])
def test_damaged_files_are_one_clear_line(tmp_path: Path, content: bytes) -> None:
    make_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(RecastError, match=r"mnist is not in .*"):
        load_data(DataConfig("torch/mnist", str(tmp_path)))


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return datasets


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (20, 20), level).save(file, "PNG")
    return file.getvalue()


def test_a_local_folder_is_read(hugging_face: Any, tmp_path: Path) -> None:
    """A folder as `load_dataset` takes it: a parquet file a split; image i has grey level i."""
    splits = {"train": [0, 1, 0, 1, 1], "test": [1, 0]}
    kinds = {"img": hugging_face.Image(), "fine_label": hugging_face.ClassLabel(names=["red", "green"])}
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split, labels in splits.items():
        rows = {"img": [{"bytes": png(i), "path": None} for i in range(len(labels))], "fine_label": labels}
        table = hugging_face.Dataset.from_dict(rows, features=hugging_face.Features(kinds))
        table.to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    data = load_data(DataConfig(f"hfds/{tmp_path / 'set'}", str(tmp_path / "cache"), img_size=16))
    assert data.classes == ["red", "green"]
    assert (data.train.labels.tolist(), data.val.labels.tolist()) == (splits["train"], splits["test"])
    images, classes = data.train.plain().batch([4, 2])
    assert (images[:, :, 0, 0] * 255).round().tolist() == [[4.0] * 3, [2.0] * 3]
    assert classes.tolist() == [1, 0]
    alone, by_worker = (list(Loader(data.train, 2, shuffle_seed=0, workers=workers)) for workers in (0, 1))
    for batch, twin in zip(alone, by_worker, strict=True):
        assert all(map(torch.equal, batch, twin))


def test_the_column_of_labels_is_chosen_by_name_and_reported(hugging_face: Any, tmp_path: Path) -> None:
    sex, kind = hugging_face.ClassLabel(names=["f", "m"]), hugging_face.ClassLabel(names=["a", "b", "c"])
    (tmp_path / "set").mkdir()
    pictures = [{"bytes": png(i), "path": None} for i in range(3)]
    rows = {"image": pictures, "sex": [0, 1, 0], "label": [2, 1, 0], "age": [7, 8, 9]}
    kinds = {"image": hugging_face.Image(), "sex": sex, "label": kind, "age": hugging_face.Value("int32")}
    table = hugging_face.Dataset.from_dict(rows, features=hugging_face.Features(kinds))
    table.to_parquet(tmp_path / "set" / "train.parquet")
    table.to_parquet(tmp_path / "set" / "test.parquet")
    config = DataConfig(f"hfds/{tmp_path / 'set'}", str(tmp_path / "cache"), img_size=16)
    with pytest.warns(UserWarning, match="label as label; not used: sex, age"):
        data = load_data(config)
    assert (data.classes, data.train.labels.tolist()) == (["a", "b", "c"], [2, 1, 0])
    data = load_data(config.replace(label_column="sex"))
    assert (data.classes, data.train.labels.tolist()) == (["f", "m"], [0, 1, 0])
    assert load_data(config.replace(label_column="age")).train.labels.tolist() == [7, 8, 9]
    with pytest.raises(RecastError, match=r"columns image, sex, label, age: .*nope"):
        load_data(config.replace(label_column="nope"))


def test_a_folder_of_webdataset_shards_is_read(hugging_face: Any, tmp_path: Path) -> None:
    for split, count in (("train", 6), ("validation", 3)):
        (tmp_path / "set").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "set" / f"shards-{split}-0.tar", "w") as shard:
            for index in range(count):
                for ending, content in (("png", png(index)), ("cls", b"%d" % (index % 2))):
                    member = tarfile.TarInfo(f"{index}.{ending}")
                    member.size = len(content)
                    shard.addfile(member, io.BytesIO(content))
    data = load_data(DataConfig(f"hfds/{tmp_path / 'set'}", str(tmp_path / "cache"), img_size=16))
    assert (data.classes, len(data.train), data.val.labels.tolist()) == (["0", "1"], 6, [0, 1, 0])
    assert (data.val[2][0][:, 0, 0] * 255).round().tolist() == [2.0] * 3
