import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import InterpolationMode, TrivialAugmentWide

from recast.errors import RecastError
from recast.lab.config import Augmentation
from recast.lab.data.augment import file_transform, shift_and_flip
from recast.lab.data.datasets import ImageFiles, ImageTensors
from recast.lab.data.images import FORMATS, open_image, resize_and_crop, to_bytes, to_pixels


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels_of(path: Path, side: int) -> torch.Tensor:
    return to_pixels(resize_and_crop(open_image(path), side))


@pytest.mark.parametrize("size", [(300, 256), (97, 150), (500, 333), (224, 224)])
def test_evaluation_pixels_are_those_of_timm(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "a.png"
    noise(*size).save(path)
    timm_transform = create_transform(224, interpolation="bicubic", crop_pct=0.875, mean=(0, 0, 0), std=(1, 1, 1))
    image = open_image(path)
    expected = to_pixels(image) if size == (224, 224) else timm_transform(image)  # which would enlarge to 256 and crop
    torch.testing.assert_close(pixels_of(path, 224), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(tmp_path / "a.tif")
    torch.testing.assert_close(pixels_of(tmp_path / "a.tif", 8), torch.ones(3, 8, 8))


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 32768, dtype=np.uint16)).save(tmp_path / "a.png")
    assert pixels_of(tmp_path / "a.png", 8).mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_white_is_zero_in_any_number_of_bits(tmp_path: Path, kind: Any, photometric: Any) -> None:
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((8, 8), kind), photometric=photometric)
    assert pixels_of(tmp_path / "a.tif", 8).eq(photometric == "miniswhite").all()


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_without_a_known_white_are_refused_not_black(tmp_path: Path, kind: type) -> None:
    Image.fromarray(np.full((8, 8), 1, dtype=kind)).save(tmp_path / "a.tif")
    with pytest.raises(RecastError, match=r"cannot read image .*a\.tif: 32-bit pixels .*convert to 8 bits"):
        pixels_of(tmp_path / "a.tif", 8)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    truncated = tmp_path / "cut.jpg"
    noise(32, 32).save(truncated)
    truncated.write_bytes(truncated.read_bytes()[:-200])
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    (tmp_path / "empty.png").touch()  # as are the endless files of /proc
    paths = [tmp_path / name for name in ("a.png", "text.png", "empty.png")]
    for path in (*paths, truncated, Path("/dev/zero"), Path("/proc/kmsg")):
        with pytest.raises(RecastError, match=f"cannot read image .*{path.name}") as caught:
            open_image(path)
        assert "\n" not in str(caught.value)
    for path, message in ((tmp_path / "gone.png", r"no such image: .*gone\.png"), (tmp_path, "got a folder")):
        with pytest.raises(RecastError, match=message):
            open_image(path)


def test_a_program_for_ghostscript_is_not_run(tmp_path: Path) -> None:
    plain = Image.new("RGB", (8, 8))
    plain.save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(RecastError, match="not an image in a known format"):
        open_image(tmp_path / "x.png")
    for kind in FORMATS:
        plain.save(tmp_path / "x", format=kind)
        assert open_image(tmp_path / "x").size == (8, 8)


def test_an_image_as_thin_as_a_thread_is_cut_before_it_is_resized() -> None:
    thread = Image.fromarray(np.arange(9000, dtype=np.uint32).astype(np.uint8)[None].repeat(2, 0)).convert("RGB")
    assert resize_and_crop(thread, 64).size == (64, 64)
    middle = thread.crop((4400, 0, 4600, 2))
    difference = to_bytes(resize_and_crop(thread, 64)).float() - to_bytes(resize_and_crop(middle, 64)).float()
    assert difference.abs().max() <= 8  # the same place, up to a rounding of where the middle is


ALONE = {"crop": "none", "flip": False}


def draws(image: Image.Image, size: int, augment: Augmentation, count: int) -> Tensor:
    files = ImageFiles(torch.zeros(count), size, [image] * count, lambda item: item, augment=augment)
    return files.batch(range(count), range(1, count + 1))[0]


def spread_of(images: Tensor) -> Tensor:
    return images.flatten(1).amax(1) - images.flatten(1).amin(1)


def test_three_augment_takes_each_operation_a_third_of_the_time() -> None:
    image = noise(8, 8)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    data = ImageTensors(pixels.repeat(10_000, 1, 1, 1), torch.zeros(10_000), Augmentation(auto_augment="3a", **ALONE))
    images, _ = data.batch(range(10_000), range(10_000))
    grey = (images[:, :1] == images).flatten(1).all(1)
    solarised = (images == to_pixels(ImageOps.solarize(image, 128))).flatten(1).all(1)
    blurred = spread_of(images) < 0.99 * spread_of(to_pixels(image)[None])
    blurred &= ~grey & ~solarised
    for hit in (grey, solarised, blurred | ~(grey | solarised)):
        assert hit.float().mean().item() == pytest.approx(1 / 3, abs=0.015)
    assert images[grey].unique(dim=0).equal(to_pixels(image.convert("L").convert("RGB"))[None])
    assert blurred.sum() > 2500  # radius U(0.1, 2): the smallest ones hardly change an image
    assert len(images[blurred].unique(dim=0)) > 50


def test_simple_crop_is_a_window_of_the_reflected_image_at_its_own_aspect() -> None:
    image, size = noise(50, 30), 24
    resized = image.resize((40, 24), Image.Resampling.BICUBIC)
    padded = np.pad(np.asarray(resized), ((4, 4), (4, 4), (0, 0)), mode="reflect").transpose(2, 0, 1)
    windows = {
        padded[:, top : top + size, left : left + size].tobytes(): (top, left)
        for top in range(9)
        for left in range(48 - size + 1)
    }
    crops = (draws(image, size, Augmentation(crop="simple", flip=False), 300) * 255).round().to(torch.uint8)
    places = {windows[crop.numpy().tobytes()] for crop in crops}  # a KeyError: rescaled, or another padding
    assert {top for top, _ in places} == set(range(9))
    assert {left for _, left in places} == set(range(25))
    assert draws(noise(300, 500), 224, Augmentation(crop="simple"), 2).shape == (2, 3, 224, 224)


POLICIES = (
    "rand-m9-mstd0.5-inc1 rand-m7-mstd0.5-inc1-n2-p0.5-mmax12-t3aw rand-tweights augmix-m3-w3 augmix-m5-w4-d2-b1 3a "
    "original-mstd0.5 originalr v0 v0r ta_wide"
).split()


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_transforms_of_every_policy_give_pixels_and_can_be_pickled(policy: str | None) -> None:
    for crop in ("none", "pad", "random", "simple"):
        augment = Augmentation(crop=crop, auto_augment=policy, color_jitter=0.3)  # type: ignore[arg-type]
        image = pickle.loads(pickle.dumps(file_transform(32, augment)))(noise(80, 60))
        assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)


def test_trivial_augment_is_one_operation_of_14_and_nothing_else() -> None:
    image = noise(16, 16)
    transform = file_transform(16, Augmentation(auto_augment="ta_wide", color_jitter=0.3, **ALONE))  # type: ignore[arg-type]
    theirs = TrivialAugmentWide(interpolation=InterpolationMode.BICUBIC, fill=[124, 116, 104])
    results = []
    for seed in range(300):
        torch.manual_seed(seed)
        results.append(transform(image))
        torch.manual_seed(seed)
        assert results[-1].equal(to_bytes(theirs(image)))
    unchanged = sum(result.equal(to_bytes(image)) for result in results) / 300
    assert 1 / 14 < unchanged < 4 / 14  # Identity, AutoContrast of full contrast, and small magnitudes
    assert len(torch.stack(results).unique(dim=0)) > 100


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("crop", ["none", "pad"])
def test_shifts_are_windows_of_the_padded_image_all_equally_often(crop: str, flip: bool) -> None:
    image = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    before, pad = image.clone(), 2 if crop == "pad" else 0
    padded = torch.nn.functional.pad(image, [pad] * 4)[0]
    windows = [padded[:, y : y + 16, x : x + 16] for y in range(2 * pad + 1) for x in range(2 * pad + 1)]
    windows += [window.flip(-1) for window in windows] if flip else []
    seeds = torch.randint(2**62, (200 * len(windows),))
    augment = Augmentation(crop=crop, flip=flip)  # type: ignore[arg-type]
    shifted = shift_and_flip(image.repeat(len(seeds), 1, 1, 1), seeds, augment)
    counts = Counter(pixels.numpy().tobytes() for pixels in shifted)
    assert set(counts) == {window.contiguous().numpy().tobytes() for window in windows}
    assert all(140 < count < 270 for count in counts.values())
    shift_and_flip(image, seeds[:1], augment)
    assert image.equal(before)
