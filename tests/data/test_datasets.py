from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image

from recast.data.datasets import Augment, ImageFiles, ImageTensors, augment_batch, file_transform
from recast.errors import RecastError


def make_tensors(count: int = 12, size: int = 16, augment: Augment = "none") -> ImageTensors:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return ImageTensors(pixels, torch.arange(count), augment)


def test_items_are_pixels_and_int_labels() -> None:
    data = make_tensors()
    image, label = data[3]
    assert image.dtype == torch.float32
    assert image.equal(data.pixels[3].float() / 255)
    assert (label, type(label)) == (3, int)
    with pytest.raises(IndexError):
        data[12]
    assert len(list(data)) == 12  # iteration by index ends


def test_torch_loader_can_use_it() -> None:
    images, labels = next(iter(torch.utils.data.DataLoader(make_tensors(), batch_size=5)))
    assert images.shape == (5, 3, 16, 16)
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_crop_is_a_window_of_the_padded_image_and_differs_per_image() -> None:
    torch.manual_seed(0)
    image = torch.rand(1, 3, 16, 16)
    padded = torch.nn.functional.pad(image, [2] * 4)
    windows = {(top, left): padded[0, :, top : top + 16, left : left + 16] for top in range(5) for left in range(5)}
    for augment, flips in (("crop", {False}), ("crop_flip", {False, True})):
        found = set()
        for cropped in augment_batch(image.expand(400, -1, -1, -1), augment):  # type: ignore[arg-type]
            hits = [
                (*place, flip)
                for place, window in windows.items()
                for flip in (False, True)
                if cropped.equal(window.flip(-1) if flip else window)
            ]
            assert len(hits) == 1
            found.add(hits[0])
        assert len(found) == 25 * len(flips)
        assert {hit[2] for hit in found} == flips


@pytest.mark.parametrize("augment", ["crop", "crop_flip", "imagenet"])
def test_augmented_pixels_stay_in_range_and_plain_is_without(augment: Augment) -> None:
    data = make_tensors(augment=augment)
    images, _ = data.batch(range(12))
    assert images.shape == (12, 3, 16, 16)
    assert images.min() >= 0
    assert images.max() <= 1
    assert not images.equal(data.plain().batch(range(12))[0])
    assert data.plain().batch([4])[0][0].equal(data.pixels[4].float() / 255)


@pytest.mark.parametrize("augment", ["none", "crop", "crop_flip", "imagenet"])
def test_file_transforms_give_pixels_and_can_be_pickled(augment: Augment) -> None:
    transform = pickle.loads(pickle.dumps(file_transform(32, augment)))
    for _ in range(20):
        image = transform(Image.new("RGB", (80, 60), (255, 128, 0)))
        assert image.shape == (3, 32, 32)
        assert image.dtype == torch.float32
        assert 0 <= image.min() <= image.max() <= 1


def test_files_are_read_when_asked_for(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    Image.new("RGB", (10, 10), (255, 0, 0)).save(paths[0])
    paths[1].write_bytes(b"broken")
    data = ImageFiles([str(path) for path in paths], torch.tensor([7, 8]), 8)
    image, label = data[0]
    assert label == 7
    torch.testing.assert_close(image.mean((1, 2)), torch.tensor([1.0, 0.0, 0.0]))
    with pytest.raises(RecastError, match=r"b\.png"):
        data[1]
    assert data.subset(torch.tensor([1])).paths == [str(paths[1])]
