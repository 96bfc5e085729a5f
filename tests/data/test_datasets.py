from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from recast.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.errors import RecastError
from recast.run.config import AugmentConfig

SHIFTED = AugmentConfig(crop="pad", flip=True)
POLICY = AugmentConfig(crop="simple", auto_augment="rand-m9-mstd0.5-inc1")


def make_tensors(count: int = 12, size: int = 16, augment: AugmentConfig | None = None) -> ImageTensors:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return ImageTensors(pixels, torch.arange(count), augment)


def make_files(folder: Path, count: int = 6, augment: AugmentConfig | None = None) -> ImageFiles:
    paths = []
    for index, image in enumerate(make_tensors(count, 20).pixels):
        paths.append(str(folder / f"{index}.png"))
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(paths[-1])
    return ImageFiles(torch.arange(count), 16, paths, augment=augment)


def test_items_are_pixels_and_int_labels() -> None:
    data = make_tensors()
    image, label = data[3]
    assert image.dtype == torch.float32
    assert image.equal(data.pixels[3].float() / 255)
    assert (label, type(label)) == (3, int)
    assert data[-1][1] == 11
    with pytest.raises(IndexError):
        data[12]
    assert len(list(data)) == 12  # iteration by index ends
    assert data.img_size == 16


def test_torch_loader_can_use_it() -> None:
    images, labels = next(iter(torch.utils.data.DataLoader(make_tensors(), batch_size=5)))
    assert images.shape == (5, 3, 16, 16)
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("augment", [SHIFTED, POLICY, AugmentConfig(crop="random")])
@pytest.mark.parametrize("kind", ["tensors", "files"])
def test_an_image_follows_from_its_seed_alone(tmp_path: Path, kind: str, augment: AugmentConfig) -> None:
    data: LabelledImages = make_tensors(6) if kind == "tensors" else make_files(tmp_path)
    data = data.augmented(augment)
    seeds = [2**62 + 7 * index for index in range(6)]
    images, labels = data.batch(range(6), seeds)
    assert labels.tolist() == list(range(6))
    assert images.shape == (6, 3, 16, 16)
    assert images.min() >= 0
    assert images.max() <= 1
    turned, _ = data.batch([4, 1, 5], [seeds[4], seeds[1], seeds[5]])
    assert turned.equal(images[[4, 1, 5]])
    assert not data.batch(range(6), [seed + 1 for seed in seeds])[0].equal(images)
    torch.manual_seed(0)
    drawn = data.batch(range(6))[0]
    assert not drawn.equal(data.batch(range(6))[0])
    torch.manual_seed(0)
    assert drawn.equal(data.batch(range(6))[0])
    assert data.plain().augment is None
    assert data.plain().batch([4], [9])[0].equal(data.plain().batch([4])[0])


def test_no_augmentation_draws_nothing(tmp_path: Path) -> None:
    for data in (make_tensors(), make_files(tmp_path)):
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        data.batch([1, 2])
        assert torch.rand(1).equal(expected)


def test_files_are_read_when_asked_for(tmp_path: Path) -> None:
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    Image.new("RGB", (10, 10), (255, 0, 0)).save(paths[0])
    paths[1].write_bytes(b"broken")
    data = ImageFiles(torch.tensor([7, 8]), 8, [str(path) for path in paths])
    image, label = data[0]
    assert label == 7
    torch.testing.assert_close(image.mean((1, 2)), torch.tensor([1.0, 0.0, 0.0]))
    with pytest.raises(RecastError, match=r"b\.png"):
        data[1]
    assert data.subset(torch.tensor([1])).items == [str(paths[1])]
    assert data.image_name(1) == str(paths[1])
    assert data.batch([])[0].shape == (0, 3, 8, 8)


def test_another_librarys_images_keep_its_index() -> None:
    asked = []

    def read(index: int) -> Image.Image:
        asked.append(index)
        return Image.new("RGB", (8, 8), (index, 0, 0))

    data = ImageFiles(torch.tensor([5, 6, 7]), 8, [10, 20, 30], read, "torch/x train")
    part = data.subset(torch.tensor([2, 0]))
    images, labels = part.batch([0, 1])
    assert asked == [30, 10]
    assert labels.tolist() == [7, 5]
    assert (images[:, 0, 0, 0] * 255).round().tolist() == [30, 10]
    assert part.image_name(0) == "torch/x train 30"


def test_settings_are_checked_when_the_data_are_made(tmp_path: Path) -> None:
    for data in (make_tensors(), make_files(tmp_path)):
        with pytest.raises(RecastError, match="unknown auto_augment"):
            data.augmented(AugmentConfig(auto_augment="nothing"))
        assert data.augmented(AugmentConfig()).augment == AugmentConfig(crop="pad", flip=True)
