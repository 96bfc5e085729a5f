import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from recast.errors import RecastError
from recast.lab.data.images import FORMATS, open_image, resize_and_crop, to_bytes, to_pixels


def save_noise(path: Path, size: tuple[int, int] = (32, 32), seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def pixels_of(path: Path, side: int) -> torch.Tensor:
    return to_pixels(resize_and_crop(open_image(path), side))


@pytest.mark.parametrize("size", [(300, 256), (97, 150), (500, 333), (224, 224)])
def test_evaluation_pixels_are_those_of_timm(tmp_path: Path, size: tuple[int, int]) -> None:
    path = save_noise(tmp_path / "a.png", size)
    timm_transform = create_transform(224, interpolation="bicubic", crop_pct=0.875, mean=(0, 0, 0), std=(1, 1, 1))
    image = open_image(path)
    if size == (224, 224):  # timm would enlarge to 256 and crop
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    else:
        expected = timm_transform(image)
    torch.testing.assert_close(pixels_of(path, 224), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(tmp_path / "a.tif")
    torch.testing.assert_close(pixels_of(tmp_path / "a.tif", 8), torch.ones(3, 8, 8))


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 32768, dtype=np.uint16)).save(tmp_path / "a.png")
    assert pixels_of(tmp_path / "a.png", 8).mean().item() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_without_a_known_white_are_refused_not_black(tmp_path: Path, kind: type) -> None:
    Image.fromarray(np.full((8, 8), 1, dtype=kind)).save(tmp_path / "a.tif")
    with pytest.raises(RecastError, match=r"cannot read image .*a\.tif: 32-bit pixels .*convert to 8 bits"):
        pixels_of(tmp_path / "a.tif", 8)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    truncated = save_noise(tmp_path / "cut.jpg")
    truncated.write_bytes(truncated.read_bytes()[:-200])
    (tmp_path / "text.png").write_text("no image", encoding="utf-8")
    for path in (tmp_path / "a.png", Path("/dev/zero"), truncated, tmp_path / "text.png"):
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
