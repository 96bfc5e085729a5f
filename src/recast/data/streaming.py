"""WebDataset shards: tar files that are read from front to back, never by index.

The order of an epoch is one stream: shards shuffled by (seed, epoch), then a shuffle buffer. Every process and every
loader worker reads that whole stream but decodes only its own share, so that the batches are the same for any number
of them. Reading is cheap beside decoding; with dozens of readers on one disk, image folders are the better choice.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from recast.data.batches import Batch, Epoch, Loaded, joined
from recast.data.datasets import LabelledImages, Prepare
from recast.data.images import open_image
from recast.data.seeding import mix_seed
from recast.errors import RecastError
from recast.run.config import AugmentConfig

BUFFER = 2048
"""Undecoded images among which the next one is drawn; each reader holds so many in memory."""

IMAGE_KEYS = ("jpg", "jpeg", "png", "webp")


@dataclass(frozen=True, eq=False)
class ImageStream(LabelledImages):
    """Images of shards, in the order in which they come; what needs labels beforehand is refused with the reason."""

    shards: list[str]
    size: int
    """Images in the shards, as `_info.json` counts them."""
    num_classes: int
    img_size: int
    augment: AugmentConfig | None = None
    crop_pct: float | None = None
    label_key: str = ""
    """Field of the samples' .json that holds the label; empty: it is in .cls."""
    prepare: Prepare = field(init=False)

    def __post_init__(self) -> None:
        prepare = Prepare(self.img_size, self.augment, self.crop_pct)
        object.__setattr__(self, "prepare", prepare)
        object.__setattr__(self, "augment", prepare.augment)

    def __len__(self) -> int:
        return self.size

    def __getattr__(self, name: str) -> Any:
        if name == "labels":
            raise RecastError(
                "WebDataset shards are a stream, in which a label is known once its image is read: num_train, num_val "
                "and data_fraction cannot choose from it by class. Use an image folder, a zip or hfds/NAME for that"
            )
        raise AttributeError(name)

    def batch(self, indices: Sequence[int], seeds: Sequence[int] | None = None) -> Batch:
        raise RecastError("WebDataset shards are a stream: images come in its order (loader), not by index")

    def subset(self, indices: Tensor) -> ImageStream:
        raise RecastError("WebDataset shards are a stream: no part of it can be chosen beforehand")

    def augmented(self, augment: AugmentConfig | None) -> ImageStream:
        return replace(self, augment=augment)

    def samples(self, seed: int | None, epoch: int) -> Iterator[Mapping[str, Any]]:
        """Undecoded samples in the order of an epoch; seed None: as they lie in the shards."""
        if seed is None:
            return self._read(self.shards)
        draws = random.Random(mix_seed("stream", seed, epoch))
        shards = draws.sample(self.shards, len(self.shards))
        return _shuffled(self._read(shards), draws)

    def _read(self, shards: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        from webdataset.tariterators import group_by_keys, tar_file_expander

        for shard in shards:
            try:
                with open(shard, "rb") as stream:
                    yield from group_by_keys(tar_file_expander(iter([{"url": shard, "stream": stream}])))
            except (OSError, EOFError, ValueError, tarfile.TarError) as error:
                reason = str(error.args[0]) if error.args else type(error).__name__
                raise RecastError(f"cannot read shard {shard}: {reason}. Is it complete?") from None

    def image(self, sample: Mapping[str, Any], seed: int) -> Tensor:
        """(1, 3, S, S) pixels of a sample; raises RecastError naming it if it cannot be read."""
        name = sample_name(sample)
        content = next((sample[key] for key in IMAGE_KEYS if key in sample), None)
        if content is None:
            raise RecastError(f"no image in {name}: expected one of {', '.join(IMAGE_KEYS)}")
        return self.prepare([open_image(io.BytesIO(content), name)], [seed])

    def label(self, sample: Mapping[str, Any]) -> Tensor:
        """Label (1,) of a sample; raises RecastError naming it if it has none, or one out of range."""
        name, where = sample_name(sample), f"{self.label_key} of .json" if self.label_key else ".cls"
        try:
            label = int(json.loads(sample["json"])[self.label_key] if self.label_key else sample["cls"])
        except (KeyError, ValueError, TypeError):
            raise RecastError(f"no label in {name}: expected a number in {where}") from None
        if not 0 <= label < self.num_classes:
            raise RecastError(f"labels must be 0 to {self.num_classes - 1}, but {name} has {label}")
        return torch.tensor([label])


def sample_name(sample: Mapping[str, Any]) -> str:
    """How an error names a sample: shard and key."""
    return f"{sample.get('__url__')}: {sample.get('__key__')}"


def _shuffled(samples: Iterator[Mapping[str, Any]], draws: random.Random) -> Iterator[Mapping[str, Any]]:
    buffer = list(islice(samples, BUFFER))
    for sample in samples:
        place = draws.randrange(len(buffer))
        yield buffer[place]
        buffer[place] = sample
    draws.shuffle(buffer)
    yield from buffer


@dataclass(frozen=True, eq=False)
class StreamBatches(IterableDataset[Any]):
    """This part's share of every batch from `start` on; of several loader workers each gives every so manieth batch."""

    stream: ImageStream
    plan: Epoch
    start: int
    repeats: int

    def __len__(self) -> int:
        return len(self.plan) - self.start

    def __iter__(self) -> Iterator[Loaded | RecastError]:
        worker = get_worker_info()
        own, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        try:
            once = self.stream.samples(self.plan.seed, self.plan.epoch)
            samples = (sample for sample in once for _ in range(self.repeats))
            for number in range(len(self.plan)):
                positions = self.plan.positions(number)
                batch = list(islice(samples, len(positions)))
                if len(batch) < len(positions):
                    found = (positions.start + len(batch)) // self.repeats
                    raise RecastError(f"_info.json counts {self.stream.size} images, but the shards hold {found}")
                if number >= self.start and (number - self.start) % workers == own:
                    yield self._share(batch, positions)
            if self.plan.seed is None and next(samples, None) is not None:
                raise RecastError(f"_info.json counts {self.stream.size} images, but the shards hold more")
        except RecastError as error:
            yield error

    def _share(self, batch: Sequence[Mapping[str, Any]], positions: range) -> Loaded:
        slots = range(len(batch))[self.plan.part :: self.plan.parts]
        seeds = self.plan.seeds([positions[slot] for slot in slots], self.stream)
        bad: list[str] = []
        read = [self._read(batch, slot, seed, bad) for slot, seed in zip(slots, seeds, strict=True)]
        return joined([item for item in read if item is not None], bad)

    def _read(self, batch: Sequence[Mapping[str, Any]], slot: int, seed: int, bad: list[str]) -> Batch | None:
        """The image in that slot of the batch, or in training the next one of the batch that can be read."""
        tries = len(batch) if self.plan.skip and self.plan.seed is not None else 1
        for candidate in (i % len(batch) for i in range(slot, slot + tries)):
            label = self.stream.label(batch[candidate])
            try:
                return self.stream.image(batch[candidate], seed), label
            except RecastError as error:
                if not self.plan.skip:
                    raise
                reason = error
                bad.append(sample_name(batch[candidate]))
        if self.plan.seed is None:
            return None
        raise RecastError(f"a batch in which no image can be read; the last: {reason}")
