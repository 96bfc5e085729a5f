from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from recast.data import loader
from recast.data.datasets import ImageFiles, ImageTensors
from recast.errors import RecastError


def make_data(count: int = 23) -> ImageTensors:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return ImageTensors(pixels, torch.arange(count), "crop_flip")


def assert_same(batches: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> None:
    assert len(batches) == len(others)
    for (images, labels), (other_images, other_labels) in zip(batches, others, strict=True):
        assert labels.equal(other_labels)
        assert images.equal(other_images)


def test_every_image_once_and_the_last_batch_is_kept() -> None:
    batches = list(loader(make_data(), 5, shuffle_seed=1))
    assert [len(labels) for _, labels in batches] == [5, 5, 5, 5, 3]
    labels = torch.cat([labels for _, labels in batches])
    assert not labels.equal(torch.arange(23))
    assert labels.sort().values.equal(torch.arange(23))


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    labels = torch.cat([labels for _, labels in loader(make_data(), 5)])
    assert labels.equal(torch.arange(23))


def test_order_and_augmentation_follow_seed_and_epoch_only() -> None:
    first = list(loader(make_data(), 5, shuffle_seed=1, epoch=2))
    torch.rand(7)
    assert_same(first, list(loader(make_data(), 5, shuffle_seed=1, epoch=2)))
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        other = list(loader(make_data(), 5, shuffle_seed=seed, epoch=epoch))
        assert not first[0][1].equal(other[0][1])
    # In the order of the data, only the augmentation is left to differ.
    assert not next(iter(loader(make_data(), 5)))[0].equal(next(iter(loader(make_data(), 5, epoch=1)))[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_rest_of_the_epoch_bit_for_bit(workers: int) -> None:
    whole = list(loader(make_data(), 5, shuffle_seed=1, epoch=4))
    rest = loader(make_data(), 5, shuffle_seed=1, epoch=4, start=2, workers=workers)
    assert len(rest) == 3
    assert_same(whole[2:], list(rest))
    assert list(loader(make_data(), 5, shuffle_seed=1, epoch=4, start=5)) == []


def test_skipped_batches_are_not_loaded() -> None:
    class Counting(ImageTensors):
        loaded = 0

        def batch(self, indices: object) -> tuple[Tensor, Tensor]:
            Counting.loaded += 1
            return super().batch(indices)  # type: ignore[arg-type]

    data = make_data()
    assert len(list(loader(Counting(data.pixels, data.labels), 5, start=3))) == 2
    assert Counting.loaded == 2


def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    list(loader(make_data(), 5, shuffle_seed=1))
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


def test_any_map_style_data_set_is_taken() -> None:
    data = torch.utils.data.TensorDataset(torch.rand(6, 3, 4, 4), torch.arange(6))
    images, labels = next(iter(loader(data, 4)))  # type: ignore[arg-type]
    assert images.shape == (4, 3, 4, 4)
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_file_is_one_line_in_workers_too(tmp_path: Path, workers: int) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"broken")
    data = ImageFiles([str(tmp_path / "a.png"), str(tmp_path / "b.png")], torch.tensor([0, 1]), 8)
    batches = iter(loader(data, 1, workers=workers))
    next(batches)
    with pytest.raises(RecastError, match=r"cannot read image .*b\.png") as caught:
        next(batches)
    assert "\n" not in str(caught.value)


def test_nothing_to_train_on_and_bad_numbers_are_refused() -> None:
    empty = make_data().subset(torch.empty(0, dtype=torch.long))
    assert list(loader(empty, 4)) == []
    with pytest.raises(RecastError, match="no training images"):
        loader(empty, 4, shuffle_seed=0)
    with pytest.raises(RecastError, match="batch_size must be at least 1"):
        loader(make_data(), 0)
    with pytest.raises(RecastError, match="start must be between 0 and 5"):
        loader(make_data(), 5, start=6)
