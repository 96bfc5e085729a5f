"""wds/NAME: WebDataset shards with timm's `_info.json`, tar files that are read from front to back, never by index.

An epoch is one stream: shards shuffled by (seed, epoch), then a shuffle buffer. Every process and every loader worker
reads the whole stream but decodes only its own share, so that batches are the same for any number of them. Reading is
cheap compared with decoding; with dozens of readers on one disk, use image folders.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from recast.config import CountOrZero, convert
from recast.errors import RecastError, first_line, optional_package
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data.datasets import Found, LabelledImages
from recast.lab.data.folders import MAX_CLASSES, data_dir
from recast.lab.data.images import PHOTO, open_image
from recast.lab.data.libraries import pick_splits
from recast.lab.data.parts import parts_note
from recast.lab.data.seeding import mix_seed
from recast.lab.data.trees import composed
from recast.reading import LARGEST, decode, parse_json, read_bytes

INFO = "_info.json"

BUFFER = 2048
"""Size of the shuffle buffer in undecoded images, for each reader."""

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")


class Sample(NamedTuple):
    """An undecoded image."""

    name: str
    content: bytes | None
    label: int


@dataclass(eq=False)
class ImageStream(LabelledImages):
    """Images of shards in stream order. Whatever needs labels or indices beforehand raises RecastError."""

    shards: list[str]
    size: int
    """Number of images according to `_info.json`."""
    num_classes: int
    label_key: str = ""
    """Field of the samples' .json that holds the label; empty: the label is in .cls."""
    img_size: int = PHOTO
    augment: Augmentation | None = None
    crop_pct: float | None = None

    def __len__(self) -> int:
        return self.size

    @property
    def labels(self) -> Tensor:  # type: ignore[override]
        raise RecastError(
            "WebDataset shards are a stream without labels beforehand: num_train, num_val and data_fraction cannot "
            "choose by class; use an image folder, a zip or hfds/NAME"
        )

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        raise RecastError("WebDataset shards are a stream: read images in order (Loader), not by index")

    def subset(self, indices: Tensor) -> ImageStream:
        raise RecastError("WebDataset shards are a stream: no subset can be chosen")

    def targets(self) -> list[str]:
        return []

    def image_name(self, index: int | Sample) -> str:
        return index.name if isinstance(index, Sample) else super().image_name(index)

    def order(self, seed: int | None, epoch: int, repeats: int) -> Iterator[Sample]:
        """Yield undecoded samples, each `repeats` times; seed None: in the order of the shards.

        Raises RecastError for a damaged shard, a missing or wrong label, and another number of images than in
        `_info.json`.
        """
        if seed is None:
            samples = self._read(self.shards)
        else:
            draws = random.Random(mix_seed("stream", seed, epoch))
            samples = _shuffled(self._read(draws.sample(self.shards, len(self.shards))), draws)
        counts = f"{INFO} counts {self.size} images, but the shards hold"
        for number in range(-(-self.size // repeats)):
            sample = next(samples, None)
            if sample is None:
                raise RecastError(f"{counts} {number}")
            if seed is None and number + 1 == self.size and next(samples, None) is not None:
                raise RecastError(f"{counts} more")
            yield from repeat(sample, repeats)

    def load(self, items: Sequence[Sample], seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.prepared(map(_decode, items), seeds), torch.tensor([sample.label for sample in items])

    def candidates(self, items: Sequence[Sample], slot: int) -> Sequence[Sample]:
        """Return the sample of the slot and those after it in the batch: a stream has no others at hand."""
        return [*items[slot:], *items[:slot]]

    def _read(self, shards: Sequence[str]) -> Iterator[Sample]:
        from webdataset.tariterators import group_by_keys

        for shard in shards:
            try:
                for fields in group_by_keys(_members(shard)):
                    yield self._sample(fields)
            except RecastError:
                raise
            except (OSError, EOFError, ValueError, tarfile.TarError) as error:
                raise RecastError(f"cannot read shard {shard}: {first_line(error)}; is it complete?") from None

    def _sample(self, fields: Mapping[str, Any]) -> Sample:
        name = f"{fields['__url__']}: {fields['__key__']}"
        try:
            value = json.loads(fields["json"])[self.label_key] if self.label_key else fields["cls"]
            label = int(value)
            if isinstance(value, float) and value != label:
                raise ValueError
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
            where = f"{self.label_key} of .json" if self.label_key else ".cls"
            raise RecastError(f"no label in {name}: expected a number in {where}") from None
        if not 0 <= label < self.num_classes:
            raise RecastError(f"labels must be 0 to {self.num_classes - 1}, but {name} has {label}")
        return Sample(name, next((fields[key] for key in IMAGE_KEYS if key in fields), None), label)


def _members(shard: str) -> Iterator[dict[str, Any]]:
    """Yield the files of a shard; `webdataset.tar_file_iterator` reads a file of any size into memory."""
    with open(shard, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if member.isreg() and not member.name.startswith("__"):  # metadata of webdataset
                if member.size > LARGEST:
                    raise OSError(f"{member.name} is larger than {LARGEST // 2**20} MiB")
                content = archive.extractfile(member)
                yield {"fname": member.name, "data": content.read() if content else b"", "__url__": shard}
            archive.members = []  # type: ignore[attr-defined]  # the list would grow with the stream


def _decode(sample: Sample) -> Image.Image:
    if sample.content is None:
        raise RecastError(f"no image in {sample.name}: expected one of {', '.join(IMAGE_KEYS)}")
    return open_image(io.BytesIO(sample.content), sample.name)


def _shuffled(samples: Iterator[Sample], draws: random.Random) -> Iterator[Sample]:
    buffer = list(islice(samples, BUFFER))
    for sample in samples:
        place = draws.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = sample
    draws.shuffle(buffer)
    yield from buffer


def find_shards(config: DataConfig) -> Found:
    """Read wds/NAME from data_dir: the shards listed in `_info.json`, in the format of timm's reader.

    Class names are the lines of classes.txt, else `class_names` or numbers below `num_classes` of `_info.json`. Raises
    RecastError for missing files and empty splits.
    """
    optional_package("webdataset", "webdataset", "wds/NAME requires webdataset")
    root = data_dir(config)
    info = _info(root)
    classes = _classes(root, info)

    def stream(split: str | None) -> ImageStream:
        if split is None:
            return ImageStream([], 0, len(classes))
        entry = info["splits"][split]
        shards = [str(root / name) for name in entry["filenames"]]
        if missing := [shard for shard in shards if not Path(shard).is_file()]:
            raise RecastError(f"{root / INFO} lists a shard that does not exist: {missing[0]}")
        if not entry["num_samples"]:
            raise RecastError(f"{root / INFO} lists no image in the split {split}")
        return ImageStream(shards, entry["num_samples"], len(classes), entry.get("alt_label", ""))

    train, val = pick_splits(str(root / INFO), info["splits"])
    notes = parts_note(str(root / INFO), train, val, info["splits"])
    return Found(config.name.partition("/")[2], stream(train), stream(val), classes, notes=notes)


def _info(root: Path) -> Mapping[str, Any]:
    path = root / INFO
    expected = "expected timm's format, with num_samples and filenames of every split"
    if not path.is_file():
        raise RecastError(f"{root} has no {INFO}: {expected}")
    try:
        info: Mapping[str, Any] = parse_json(decode(read_bytes(path), path), path)
        for split in info["splits"].values():
            convert(CountOrZero, split["num_samples"], "num_samples")
            convert(list[str], split["filenames"], "filenames")
            convert(str, split.get("alt_label", ""), "alt_label")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f" ({error})" if isinstance(error, RecastError) else ""
        raise RecastError(f"cannot read {path}{reason}: {expected}") from None
    return info


def _classes(root: Path, info: Mapping[str, Any]) -> list[str]:
    path = root / "classes.txt"
    if path.is_file():
        return [composed(line.strip()) for line in decode(read_bytes(path), path).splitlines() if line.strip()]
    names, count = info.get("class_names"), info.get("num_classes")
    if isinstance(names, list) and names:
        return list(map(str, names))
    if type(count) is int and 0 < count <= MAX_CLASSES:
        return list(map(str, range(count)))
    raise RecastError(f"no number of classes in {root / INFO}: write the class names into classes.txt, one per line")
