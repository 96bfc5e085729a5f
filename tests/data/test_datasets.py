from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages


def make_tensors(count: int = 12, size: int = 16) -> ImageTensors:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return ImageTensors(pixels, torch.arange(count))


@pytest.fixture(params=["tensors", "files"])
def data(request: Any, tmp_path: Path) -> LabelledImages:
    if request.param == "tensors":
        return make_tensors(6)
    paths = [str(tmp_path / f"{index}.png") for index in range(6)]
    for path, image in zip(paths, make_tensors(6, 20).pixels, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return ImageFiles(torch.arange(6), 16, paths)


def test_items_are_pixels_and_int_labels() -> None:
    data = make_tensors()
    image, label = data[3]
    assert image.equal(data.pixels[3].float() / 255)
    assert (label, type(label), data[-1][1]) == (3, int, 11)
    with pytest.raises(IndexError):
        data[12]
    assert len(list(data)) == 12  # iteration by index ends
    images, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=5)))
    assert images.shape == (5, 3, 16, 16)
    assert labels.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "augment",
    [
        Augmentation(crop="pad", flip=True),
        Augmentation(crop="simple", auto_augment="rand-m9-mstd0.5-inc1"),
        Augmentation(crop="random"),
    ],
)
def test_an_image_follows_from_its_seed_alone(data: LabelledImages, augment: Augmentation) -> None:
    data = data.augmented(augment)
    seeds = [2**62 + 7 * index for index in range(6)]
    images, labels = data.batch(range(6), seeds)
    assert labels.tolist() == list(range(6))
    assert images.shape == (6, 3, 16, 16)
    assert 0 <= images.min() <= images.max() <= 1
    some, _ = data.batch([4, 1, 5], [seeds[4], seeds[1], seeds[5]])
    assert some.equal(images[[4, 1, 5]])
    assert not data.batch(range(6), [seed + 1 for seed in seeds])[0].equal(images)
    torch.manual_seed(0)
    drawn, drawn_next = (data.batch(range(6))[0] for _ in range(2))
    assert not drawn.equal(drawn_next)
    torch.manual_seed(0)
    assert drawn.equal(data.batch(range(6))[0])
    state = torch.get_rng_state()
    assert data.plain().batch([4], [9])[0].equal(data.plain().batch([4])[0])
    assert torch.get_rng_state().equal(state)  # without augmentation nothing is drawn


def test_more_than_memory_allows_is_refused_before_decoding() -> None:
    with pytest.raises(RecastError, match=r"big\.zip: 100,000,000 images of 224 pixels a side need"):
        ImageFiles(torch.zeros(100_000_000), 224, [], where="big.zip:").decoded(skip=False)
