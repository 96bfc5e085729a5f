"""wds/NAME: a folder of WebDataset shards with timm's `_info.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recast.data.parts import VAL_SPLITS, Found, data_dir, sizes
from recast.data.streaming import ImageStream
from recast.errors import RecastError
from recast.run.config import DataConfig

INFO = "_info.json"


def find_shards(config: DataConfig) -> Found:
    """wds/NAME in data_dir: shards that `_info.json` lists, as timm's reader takes it, with a line a class in
    classes.txt (or `class_names` or `num_classes` in `_info.json`).

    Raises RecastError for what is missing, for a split without an image, and for subsets: a stream cannot be chosen
    from.
    """
    try:
        import webdataset  # noqa: F401
    except ImportError:
        raise RecastError('wds/NAME needs another package: pip install "recast-vision[data]"') from None
    from timm.data.readers.reader_wds import ReaderWds

    root = data_dir(config)
    info = _info(root)
    classes = _classes(root, info)

    def stream(split: str | None, img_size: int) -> ImageStream:
        if split is None:
            return ImageStream([], 0, len(classes), img_size)
        described = ReaderWds(str(root), split=split).split_info
        shards = [str(root / name) for name in described.filenames]
        if missing := [shard for shard in shards if not Path(shard).is_file()]:
            raise RecastError(f"{root / INFO} lists a shard that does not exist: {missing[0]}")
        if not described.num_samples:
            raise RecastError(f"{root / INFO} says that the split {split} has no image")
        return ImageStream(
            shards,
            described.num_samples,
            len(classes),
            img_size,
            crop_pct=config.crop_pct,
            label_key=described.alt_label,
        )

    train_size, test_size = sizes(config, 224)
    train = stream("train" if "train" in info["splits"] else None, train_size)
    val = stream(next((split for split in VAL_SPLITS if split in info["splits"]), None), test_size)
    if len(train) == len(val) == 0:
        known = ", ".join(info["splits"])
        raise RecastError(f"{root / INFO} has the splits {known}: expected train or one of {', '.join(VAL_SPLITS)}")
    return Found(config.name.partition("/")[2], train, val, classes)


def _info(root: Path) -> Mapping[str, Any]:
    path = root / INFO
    expected = "expected timm's, with name, num_samples, filenames and shard_lengths of every split"
    if not path.is_file():
        raise RecastError(f"{root} has no {INFO}: {expected}")
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
        complete = all(
            {"name", "num_samples", "filenames", "shard_lengths"} <= set(split) for split in info["splits"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise RecastError(f"cannot make sense of {path}: {expected}")
    return info


def _classes(root: Path, info: Mapping[str, Any]) -> list[str]:
    path = root / "classes.txt"
    if path.is_file():
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    names = info.get("class_names")
    if isinstance(names, list) and names:
        return [str(name) for name in names]
    count = info.get("num_classes")
    if isinstance(count, int) and count > 0:
        return [str(index) for index in range(count)]
    raise RecastError(f"how many classes have the shards in {root}? Write their names into classes.txt, one a line")
