from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from recast.data import load_data, loader
from recast.errors import RecastError
from recast.run.config import DataConfig

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (20, 20), level).save(file, "PNG")
    return file.getvalue()


def make_hub(
    root: Path,
    splits: dict[str, Sequence[int | None]],
    names: Sequence[str] | None = ("red", "green"),
    label: str = "label",
) -> DataConfig:
    """A local folder as `load_dataset` takes it: a parquet file a split; image i has grey level i."""
    feature = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
    features = datasets.Features({"img": datasets.Image(), label: feature})
    for split, labels in splits.items():
        rows = {"img": [{"bytes": png(index), "path": None} for index in range(len(labels))], label: list(labels)}
        path = root / "set" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    return DataConfig(f"hfds/{root / 'set'}", str(root / "cache"), img_size=16)


def test_a_local_folder_is_read(tmp_path: Path) -> None:
    config = make_hub(tmp_path, {"train": [0, 1, 0, 1, 1], "test": [1, 0]}, label="fine_label")
    data = load_data(config)
    assert data.classes == ["red", "green"]
    assert data.train.labels.tolist() == [0, 1, 0, 1, 1]
    assert data.val.labels.tolist() == [1, 0]
    images, labels = data.train.plain().batch([4, 2])
    assert images.shape == (2, 3, 16, 16)
    assert (images[:, :, 0, 0] * 255).round().tolist() == [[4.0] * 3, [2.0] * 3]
    assert labels.tolist() == [1, 0]
    whole = list(loader(data.train, 2, shuffle_seed=0))
    for (images, labels), (others, other_labels) in zip(
        whole, loader(data.train, 2, shuffle_seed=0, workers=1), strict=True
    ):
        assert images.equal(others)
        assert labels.equal(other_labels)


def test_one_split_is_divided_and_subsets_are_taken(tmp_path: Path) -> None:
    config = make_hub(tmp_path, {"train": [0] * 10 + [1] * 20}, names=None)
    config.val_fraction, config.num_train, config.test_size = 0.2, 6, 24
    data = load_data(config)
    assert data.classes == ["0", "1"]
    assert data.val.labels.bincount().tolist() == [2, 4]
    assert data.train.labels.bincount().tolist() == [3, 3]
    assert data.val[0][0].shape == (3, 24, 24)
    assert not set(data.train.items) & set(data.val.items)  # type: ignore[attr-defined]


def test_only_a_validation_split_can_be_evaluated_on(tmp_path: Path) -> None:
    data = load_data(make_hub(tmp_path, {"validation": [0, 1]}))
    assert (len(data.train), len(data.val)) == (0, 2)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [0, 1], "test": [1, -1]}, r"0 to 1 \(2 classes\), but 1 validation .*test 1 has -1"),
        ({"train": [0, 1, None], "test": [1]}, r"train 2 has no label"),
        ({"train": [0, 1, -5], "test": [1]}, r"training .*train 2 has -5"),
        ({"extra": [0, 1]}, r"has the splits extra: expected train or one of validation"),
    ],
)
def test_bad_splits_and_labels_are_named(tmp_path: Path, splits: dict[str, list[int | None]], message: str) -> None:
    config = make_hub(tmp_path, splits, names=None)
    with pytest.raises(RecastError, match=message) as caught:
        load_data(config)
    assert "\n" not in str(caught.value)


def test_what_holds_no_labelled_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_dict({"text": ["a"], "label": ["b"]}).to_parquet(tmp_path / "set" / "train.parquet")
    with pytest.raises(RecastError, match=r"has the columns text, label: expected one of images"):
        load_data(DataConfig(f"hfds/{tmp_path / 'set'}", str(tmp_path / "cache")))
    with pytest.raises(RecastError, match=r"cannot load hfds/.*nothing: Couldn't find any data file"):
        load_data(DataConfig(f"hfds/{tmp_path / 'nothing'}", str(tmp_path / "cache")))


def test_broken_images_are_named_and_can_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "png", lambda level, good=png: b"broken" if level == 1 else good(level))
    val = load_data(make_hub(tmp_path, {"test": [0, 1, 0]})).val
    with pytest.raises(RecastError, match=r"cannot read image hfds/.* test 1: not an image") as caught:
        val.batch([0, 1])
    assert "\n" not in str(caught.value)
    source = loader(val, 3, bad_image="skip")
    assert [labels.tolist() for _, labels in source] == [[0, 0]]
    assert source.bad_images == [val.image_name(1)]


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecastError, match=r'pip install "recast-vision\[data\]"'):
        load_data(DataConfig("hfds/some/name"))
