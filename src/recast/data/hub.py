"""hfds/NAME: Hugging Face data sets (of the hub, its cache, or a local folder), read by timm's reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from recast.data.datasets import IndexedImages
from recast.data.images import decode_errors, open_image
from recast.data.parts import VAL_SPLITS, Found, sizes
from recast.data.splits import hold_out
from recast.errors import RecastError
from recast.run.config import DataConfig


def find_on_hub(config: DataConfig) -> Found:
    """hfds/NAME: NAME on the hub (what is cached works offline), or a local folder; data_dir is the cache.

    The image column is the first that holds images, the label column the first with named classes, else `label`.
    Without a validation split, val_fraction of every class of the train split is held out. Raises RecastError for a
    data set that cannot be loaded and for one without images, labels or a train or validation split.
    """
    source = _Source(config)
    train_size, test_size = sizes(config, 224)
    if source.val_split is None:
        train, val = source.images("train", train_size), source.images("train", test_size)
        train_rows, val_rows = hold_out(train.labels, config.val_fraction)
        return Found(source.name, train.subset(train_rows), val.subset(val_rows), source.classes(train))
    val = source.images(source.val_split, test_size)
    if source.has_train:
        train = source.images("train", train_size)
    else:
        train = source.images(source.val_split, train_size).subset(torch.empty(0, dtype=torch.long))
    return Found(source.name, train, val, source.classes(train, val))


class _Source:
    """A data set whose splits and columns are known; split by split it is opened by timm's reader."""

    def __init__(self, config: DataConfig) -> None:
        self.config, self.name = config, config.name.partition("/")[2]
        self.cache = None if config.data_dir is None else str(Path(config.data_dir).expanduser())
        splits = self._load()
        self.has_train = "train" in splits
        self.val_split = next((split for split in VAL_SPLITS if split in splits), None)
        if not self.has_train and self.val_split is None:
            raise RecastError(
                f"{config.name} has the splits {', '.join(splits)}: expected train or one of {', '.join(VAL_SPLITS)}"
            )
        self.image_key, self.label_key, self.names = self._columns(next(iter(splits.values())).features)

    def _load(self) -> Mapping[str, Any]:
        try:
            import datasets
        except ImportError:
            raise RecastError('hfds/NAME needs another package: pip install "recast-vision[data]"') from None
        try:
            splits: Mapping[str, Any] = datasets.load_dataset(self.name, cache_dir=self.cache)
        except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise RecastError(f"cannot load {self.config.name}: {reason}") from None
        return splits

    def _columns(self, features: Mapping[str, Any]) -> tuple[str, str, list[str] | None]:
        import datasets

        image = next((key for key, feature in features.items() if isinstance(feature, datasets.Image)), None)
        named = next((key for key, feature in features.items() if isinstance(feature, datasets.ClassLabel)), None)
        numbered = str(getattr(features.get("label"), "dtype", "")).startswith(("int", "uint"))
        label = named or ("label" if numbered else None)
        if image is None or label is None:
            raise RecastError(
                f"{self.config.name} has the columns {', '.join(features)}: expected one of images and one of labels "
                "(named classes, or whole numbers called label)"
            )
        return image, label, list(features[named].names) if named else None

    def images(self, split: str, img_size: int) -> IndexedImages:
        """All images of a split, without augmentation."""
        from timm.data.readers.reader_hfds import ReaderHfds

        reader = ReaderHfds(
            self.name, root=self.cache, split=split, input_key=self.image_key, target_key=self.label_key
        )
        labels = reader.dataset[self.label_key][:]
        where = f"{self.config.name} {split}"
        if None in labels:
            raise RecastError(f"{where} {labels.index(None)} has no label")
        return IndexedImages(
            torch.tensor(labels, dtype=torch.long),
            img_size,
            crop_pct=self.config.crop_pct,
            read=_Reader(reader, where),
            rows=torch.arange(len(labels)),
            where=where,
        )

    def classes(self, *parts: IndexedImages) -> list[str]:
        """Names of the classes; numbers where the data set has none."""
        if self.names is not None:
            return self.names
        labels = torch.cat([part.labels for part in parts])
        return [str(label) for label in range(int(labels.max()) + 1 if len(labels) else 0)]


@dataclass(frozen=True)
class _Reader:
    reader: Any
    where: str

    def __call__(self, index: int) -> Image.Image:
        name = f"{self.where} {index}"
        with decode_errors(name):
            file = self.reader[index][0]
        with file:
            return open_image(file, name)
