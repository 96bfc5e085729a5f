from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import Loader, load_data

pytest.importorskip("webdataset")
Epoch = Callable[..., tuple[torch.Tensor, list[int]]]


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (10, 10), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_shard(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, members in samples.items():
            for ending, content in members.items():
                info = tarfile.TarInfo(f"{key}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


def sample(index: int, **changed: bytes) -> dict[str, bytes]:
    """Image i has red level i and label i mod 5."""
    return {"png": png(index), "cls": str(index % 5).encode(), **changed}


def make_shards(
    root: Path, counts: dict[str, list[int]], changed: dict[int, dict[str, bytes]] | None = None
) -> DataConfig:
    """Shards of those many images for every split, and timm's _info.json."""
    splits = {}
    for split, shards in counts.items():
        names, first = [], 0
        for number, count in enumerate(shards):
            names.append(f"{split}-{number}.tar")
            chosen = range(first, first + count)
            samples = {f"{split}{i:04d}": sample(i, **(changed or {}).get(i, {})) for i in chosen}
            write_shard(root / names[-1], samples)
            first += count
        splits[split] = {"name": split, "num_samples": first, "filenames": names, "shard_lengths": shards}
    (root / "_info.json").write_text(json.dumps({"splits": splits, "num_classes": 5}), encoding="utf-8")
    return DataConfig("wds/set", str(root), img_size=10)


def change_info(root: Path, old: str, new: str) -> None:
    text = (root / "_info.json").read_text(encoding="utf-8")
    assert old in text
    (root / "_info.json").write_text(text.replace(old, new), encoding="utf-8")


def numbers(images: torch.Tensor) -> list[int]:
    return [int(level) for level in (images[:, 0].amax((1, 2)) * 255).round()]


def test_shards_are_read_in_order_without_augmentation(tmp_path: Path, epoch_of: Epoch) -> None:
    config = make_shards(tmp_path, {"train": [6, 6, 5], "validation": [4, 3]})
    data = load_data(config)
    assert (data.name, len(data.train), len(data.val), len(data.classes)) == ("set", 17, 7, 5)
    assert (data.train.augment.crop, data.train.augment.flip, data.img_size) == ("pad", True, 10)
    for options in ({}, {"workers": 2}, {"parts": 3}):
        images, labels = epoch_of(data.val, 3, **options)
        assert numbers(images) == list(range(7))
        assert labels == [index % 5 for index in range(7)]
    assert len(Loader(data.val, 3)) == 3
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\ne\n", encoding="utf-8")
    assert load_data(config).classes == list("abcde")


def test_an_epoch_is_the_same_for_any_workers_parts_and_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch_of: Epoch
) -> None:
    monkeypatch.setattr("recast.lab.data.shards.BUFFER", 5)
    config = make_shards(tmp_path, {"train": [6, 6, 5, 6], "validation": [2]})
    train = load_data(config, Augmentation(crop="pad", color_jitter=0.3)).train
    order = numbers(epoch_of(train.plain(), 4, shuffle_seed=1)[0])
    assert sorted(order) == list(range(23))
    assert order != sorted(order)
    assert [number // 6 for number in order[:6]] != [order[0] // 6] * 6  # shards are mixed
    assert numbers(epoch_of(train.plain(), 4, shuffle_seed=1, epoch=1)[0]) != order
    repeated = numbers(epoch_of(train.plain(), 4, shuffle_seed=1, repeats=3)[0])
    assert repeated == [number for number in order for _ in range(3)][:23]
    images, labels = epoch_of(train, 4, shuffle_seed=1)
    assert labels == [number % 5 for number in order]
    for options in ({"batch_size": 7}, {"batch_size": 4, "workers": 2}, {"batch_size": 6, "parts": 2, "workers": 1}):
        others, other_labels = epoch_of(train, shuffle_seed=1, **options)
        assert other_labels == labels
        assert others.equal(images)
    for workers, start in ((0, 2), (2, 1), (2, 2)):
        rest = Loader(train, 4, shuffle_seed=1, start=start, workers=workers, drop_last=True)
        assert len(rest) == 5 - start
        assert torch.cat([images for images, _ in rest]).equal(images[4 * start : 20])


def test_what_needs_labels_beforehand_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = make_shards(tmp_path, {"train": [6], "validation": [2]})
    for name, value in (("num_train", 3), ("num_val", 2), ("num_train", 0.5)):
        changed = DataConfig("wds/set", str(tmp_path), img_size=10, **{name: value})
        with pytest.raises(RecastError, match=r"are a stream.* cannot choose by class"):
            load_data(changed)
    with pytest.raises(RecastError, match="not by index"):
        load_data(config).train[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_replaced_or_left_out(tmp_path: Path, workers: int, epoch_of: Epoch) -> None:
    broken = {2: {"png": b"broken"}, 7: {"png": b"broken"}}
    data = load_data(make_shards(tmp_path, {"train": [5, 4], "validation": [9]}, broken))
    with pytest.raises(RecastError, match=r"cannot read image .*validation-0\.tar: validation0002") as caught:
        list(Loader(data.val, 3, workers=workers))
    assert "\n" not in str(caught.value)
    source = Loader(data.val, 4, workers=workers, bad_image="skip")
    assert numbers(torch.cat([images for images, _ in source])) == [0, 1, 3, 4, 5, 6, 8]
    assert source.bad_images == [f"{tmp_path / 'validation-0.tar'}: validation000{n}" for n in (2, 7)]
    images, labels = epoch_of(data.train.plain(), 3, shuffle_seed=4, workers=workers, bad_image="skip")
    assert len(images) == 9
    assert [number % 5 for number in numbers(images)] == labels
    assert not set(numbers(images)) & {2, 7}
    assert epoch_of(data.train.plain(), 3, parts=2, shuffle_seed=4, bad_image="skip")[0].equal(images)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cls": b"7"}, r"labels must be 0 to 4, but .*validation-0\.tar: validation0001 has 7"),
        ({"cls": b"x"}, r"no label in .*validation0001: expected a number in \.cls"),
    ],
)
def test_wrong_labels_are_errors_even_when_images_are_skipped(
    tmp_path: Path, changed: dict[str, bytes], message: str
) -> None:
    data = load_data(make_shards(tmp_path, {"validation": [3]}, {1: changed}))
    assert len(data.train) == 0
    with pytest.raises(RecastError, match=message):
        list(Loader(data.val, 2, bad_image="skip"))


@pytest.mark.parametrize(("counted", "found"), [(8, "hold 6"), (4, "hold more")])
def test_a_wrong_count_is_an_error(tmp_path: Path, counted: int, found: str) -> None:
    config = make_shards(tmp_path, {"validation": [6]})
    change_info(tmp_path, '"num_samples": 6', f'"num_samples": {counted}')
    for workers in (0, 2):
        with pytest.raises(RecastError, match=f"counts {counted} images, but the shards {found}"):
            list(Loader(load_data(config).val, 2, workers=workers))


def test_broken_folders_are_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig("wds/set", str(tmp_path), img_size=10)

    def refused(message: str) -> None:
        with pytest.raises(RecastError, match=message) as caught:
            list(Loader(load_data(config).val, 2))
        assert "\n" not in str(caught.value)

    refused(r"has no _info\.json")
    make_shards(tmp_path, {"train": [2], "validation": [4]})
    shard = tmp_path / "validation-0.tar"
    shard.write_bytes(shard.read_bytes()[: 2048 + 512 + 20])  # in the second image
    refused(r"cannot read shard .*validation-0\.tar")
    shard.unlink()
    refused(r"validation-0\.tar")
    make_shards(tmp_path, {"train": [2], "validation": []})
    refused("no image in the split validation")
    make_shards(tmp_path, {"extra": [2]})
    refused("extra: expected train, validation")
    make_shards(tmp_path, {"validation": [2]})
    change_info(tmp_path, '"num_classes": 5', '"num_classes": "5"')
    refused(r"classes\.txt")
    monkeypatch.setitem(sys.modules, "webdataset", None)
    refused("pip install webdataset")


def test_shards_are_evaluated_kept_and_looked_at(tmp_path: Path) -> None:
    """Labels of a stream are not known beforehand: neither the key of its scores nor an analysis may ask for them."""
    from recast.lab.evaluation.runner import evaluate, measure, open_context

    (tmp_path / "shards").mkdir()
    data = load_data(make_shards(tmp_path / "shards", {"train": [6], "validation": [4, 3]}))
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 5)
    )
    kept = tmp_path / "scores"
    first = evaluate(model, "clean", data, batch_size=3, cache=kept, progress=False)
    assert {row.n for row in first} == {7}
    assert evaluate(model, "clean", data, batch_size=3, cache=kept, progress=False) == first
    assert len(list(kept.rglob("*.npz"))) == 1
    again = load_data(make_shards(tmp_path / "shards", {"train": [6], "validation": [4, 4]}))
    assert evaluate(model, "clean", again, batch_size=3, cache=kept, progress=False)[0].n == 8
    found = measure(open_context({"m": model}, again, 3), ["agreement", "fourier"], progress=False)
    assert len(found.tables["agreement"].rows) == 8
    for suite in ("resolution", "corruptions"):
        with pytest.raises(RecastError, match=r"shards of .* do not"):
            evaluate(model, suite, again, progress=False)


@pytest.mark.parametrize(("key", "value"), [
    ("filenames", [5]), ("filenames", "a.tar"), ("num_samples", True), ("num_samples", 10**30), ("alt_label", 5),
])  # fmt: skip
def test_info_of_wrong_types_is_one_clear_line(tmp_path: Path, key: str, value: object) -> None:
    config = make_shards(tmp_path, {"train": [3], "validation": [2]})
    info = json.loads((tmp_path / "_info.json").read_text())
    info["splits"]["train"][key] = value
    (tmp_path / "_info.json").write_text(json.dumps(info))
    with pytest.raises(RecastError, match=rf"cannot read .*_info\.json \({key}"):
        load_data(config)


def test_a_file_in_a_shard_is_no_larger_than_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_data(make_shards(tmp_path, {"train": [3], "validation": [2]}))
    monkeypatch.setattr("recast.lab.data.shards.LARGEST", 20)
    with pytest.raises(RecastError, match=r"cannot read shard .*validation-0\.tar: .*is larger than"):
        list(Loader(data.val, 2))
