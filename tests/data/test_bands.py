import io
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import timm
import torch
from data_helpers import write_deep
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.v2.functional import pil_to_tensor

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import load_data
from recast.lab.data.augment import resolve
from recast.lab.data.bands import as_picture, as_validation, band_transform, open_bands
from recast.lab.data.fingerprint import fingerprint_of
from recast.lab.data.images import resize_and_crop
from recast.lab.data.trees import Archive
from recast.models.build import build
from recast.models.config import ModelConfig

GREY = np.arange(64, dtype=np.uint8).reshape(8, 8)
NINE = np.arange(6 * 5 * 9, dtype=np.uint16).reshape(6, 5, 9)


def content_of(save: Callable[..., None], *args: Any, **kwargs: Any) -> bytes:
    """Return what `save` writes to a file."""
    file = io.BytesIO()
    save(file, *args, **kwargs)
    return file.getvalue()


def in_classes(root: Path, count: int, ending: str = "npy") -> Iterator[Path]:
    """Yield a path for each of `count` images, in the class folders a and b in turns."""
    for number in range(count):
        path = root / "ab"[number % 2] / f"{number:02}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path


def test_values_of_files(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", NINE, photometric="minisblack", planarconfig="contig")
    tifffile.imwrite(tmp_path / "b.tiff", np.moveaxis(NINE, -1, 0), photometric="minisblack")
    np.save(tmp_path / "c.npy", NINE)
    np.savez(tmp_path / "d.npz", any_name=NINE)
    expected = torch.from_numpy(NINE.astype(np.float32) / 65535).permute(2, 0, 1)
    for path in sorted(tmp_path.iterdir()):
        assert open_bands(str(path), 9).equal(expected), path
    np.save(tmp_path / "f.npy", NINE.astype(np.float32) - 3)  # no fixed white level: as they are
    assert open_bands(str(tmp_path / "f.npy"), 9).equal(expected * 65535 - 3)


def test_values_of_pictures(tmp_path: Path) -> None:
    sixteen_bits = GREY.astype(np.uint16) * 256
    grey, deep = (
        torch.from_numpy(GREY / np.float32(255))[None],
        torch.from_numpy(sixteen_bits / np.float32(65535))[None],
    )
    for picture, expected in (
        (Image.fromarray(GREY), grey),
        (Image.fromarray(GREY), grey.expand(3, -1, -1)),
        (Image.fromarray(GREY).convert("RGB"), grey),
        (Image.fromarray(sixteen_bits), deep),
    ):
        picture.save(tmp_path / "a.png")
        assert open_bands(str(tmp_path / "a.png"), len(expected)).equal(expected)


def test_a_tiff_of_bytes_is_read_as_other_pictures_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    for mode in ("RGB", "P", "CMYK", "L"):
        colours.convert(mode).save(tmp_path / f"{mode}.tif", compression="tiff_lzw")  # tifffile alone: imagecodecs
        colours.convert(mode).convert("RGB").save(tmp_path / f"{mode}.png")
        for bands in (1, 3):
            png, tif = (open_bands(str(tmp_path / f"{mode}.{ending}"), bands) for ending in ("png", "tif"))
            assert tif.equal(png), (mode, bands)
    nir = NINE[..., :4].astype(np.uint8)
    tifffile.imwrite(tmp_path / "nir.tif", nir, photometric="rgb", planarconfig="contig", extrasamples=["unspecified"])
    with pytest.raises(RecastError, match="has 4 bands"):
        open_bands(str(tmp_path / "nir.tif"), 3)
    with pytest.raises(RecastError, match=r"requires the 'imagecodecs' package. pip install imagecodecs$"):
        open_bands(str(tmp_path / "RGB.tif"), 5)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert open_bands(str(tmp_path / "RGB.tif"), 3).equal(open_bands(str(tmp_path / "RGB.png"), 3))
    with pytest.raises(RecastError, match=r"nir.tif require tifffile .*pip install 'recast-vision\[bands\]'"):
        open_bands(str(tmp_path / "nir.tif"), 4)


@pytest.mark.parametrize("compression", ["LZW", "JPEG", "LERC", "ZSTD", "WEBP", "JPEG2000"])
def test_a_compression_that_needs_a_package_names_it(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, NINE, photometric="minisblack", planarconfig="contig")
    with tifffile.TiffFile(path, mode="r+b") as file:  # nothing here writes these
        file.pages[0].tags["Compression"].overwrite(tifffile.COMPRESSION[compression])
    with pytest.raises(RecastError, match=r"requires the 'imagecodecs' package. pip install imagecodecs$"):
        open_bands(str(path), 9)


@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_sixteen_bits_of_a_png_are_all_kept(tmp_path: Path, bands: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 4096, (9, 7, bands), dtype=np.uint16)  # 12 bits
    write_deep(tmp_path / "a.png", pixels)
    expected = torch.from_numpy(pixels.astype(np.float32) / 65535).permute(2, 0, 1)
    assert open_bands(str(tmp_path / "a.png"), bands).equal(expected)
    if bands in (2, 4):  # opacity
        assert open_bands(str(tmp_path / "a.png"), bands - 1).equal(expected[:-1])
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.png", "a.png")
    assert Archive(tmp_path / "a.zip").bands("a.png", bands).equal(expected)


@pytest.mark.parametrize(("name", "bands"), [("a.png", 1), ("a.png", 2), ("a.png", 3), ("a.tif", 3), ("a.ppm", 3)])
def test_bits_that_rgb_does_not_keep_are_reported(tmp_path: Path, name: str, bands: int) -> None:
    for number, path in enumerate(in_classes(tmp_path, 4)):
        pixels = np.full((8, 8, bands), 40000, np.uint16)
        if number == 1:  # the others have 8 bits
            write_deep(path.with_name(name), pixels)
            continue
        Image.fromarray(pixels[..., 0].astype(np.uint8)).save(path.with_suffix(".png"))
    with pytest.warns(UserWarning, match=rf"{name} has 16-bit pixels, .*--in-chans N") as caught:
        load_data(DataConfig("folder", str(tmp_path), img_size=8))
    assert len(caught) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_what_rgb_does_not_show_of_a_file_is_reported(tmp_path: Path, packed: bool) -> None:
    orientation, picture = Image.Exif(), Image.fromarray(NINE[..., :3].astype(np.uint8))
    orientation[274] = 6
    for number, path in enumerate(in_classes(tmp_path / "set", 3)):
        if number == 1:
            picture.save(path.with_suffix(".jpg"), exif=orientation)
        else:
            picture.save(path.with_suffix(".gif"), save_all=True, append_images=[picture.rotate(90)] * (number == 2))
    config = DataConfig("folder", str(tmp_path / "set"), img_size=8)
    if packed:
        config = DataConfig("zip", shutil.make_archive(str(tmp_path / "set"), "zip", tmp_path / "set"), img_size=8)
    pages, orientation_of = (
        pytest.warns(UserWarning, match=text) for text in (r"02\.gif has 2 pages", r"01\.jpg has an EXIF orientation")
    )
    with pages, orientation_of:
        load_data(config)


def test_sixteen_bits_of_a_pnm(tmp_path: Path) -> None:
    pixels = np.arange(63, dtype=np.uint16).reshape(9, 7, 1) * 1000
    write_deep(tmp_path / "a.pgm", pixels)
    assert open_bands(str(tmp_path / "a.pgm"), 1).equal(torch.from_numpy(pixels[None, ..., 0] / np.float32(65535)))
    write_deep(tmp_path / "a.ppm", pixels.repeat(3, 2))
    with pytest.raises(RecastError, match=r"a\.ppm: 16-bit colour .*PNG or TIFF"):
        open_bands(str(tmp_path / "a.ppm"), 3)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_white_is_zero_in_any_number_of_bits(tmp_path: Path, dtype: Any) -> None:
    most = np.iinfo(dtype).max
    pixels = np.linspace(0, most, 64).astype(dtype).reshape(8, 8)
    for photometric, stored in (("minisblack", pixels), ("miniswhite", most - pixels)):
        tifffile.imwrite(tmp_path / "a.tif", stored, photometric=photometric)
        expected = torch.from_numpy(pixels.astype(np.float32) / np.float32(most))[None]
        torch.testing.assert_close(open_bands(str(tmp_path / "a.tif"), 1), expected, rtol=1e-6, atol=0)
    tifffile.imwrite(tmp_path / "b.tif", np.stack([most - pixels] * 2), photometric="miniswhite")  # two pages
    torch.testing.assert_close(open_bands(str(tmp_path / "b.tif"), 2), expected.expand(2, -1, -1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_white_is_zero_without_a_known_black_is_refused(tmp_path: Path, dtype: Any) -> None:
    tifffile.imwrite(tmp_path / "a.tif", GREY.astype(dtype), photometric="miniswhite")
    with pytest.raises(RecastError, match=r"a\.tif: 0 is white.*convert to unsigned"):
        open_bands(str(tmp_path / "a.tif"), 1)


def test_numbers_of_a_palette_are_refused(tmp_path: Path) -> None:
    colours = np.zeros((3, 2**16), np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", GREY.astype(np.uint16), photometric="palette", colormap=colours)
    with pytest.raises(RecastError, match=r"a\.tif: .*palette: convert to RGB"):
        open_bands(str(tmp_path / "a.tif"), 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
@pytest.mark.parametrize("packed", [False, True])
def test_floats_of_bytes_among_bytes_are_refused(tmp_path: Path, dtype: Any, packed: bool) -> None:
    for number, path in enumerate(in_classes(tmp_path / "set", 12)):
        np.save(path, (GREY + number).astype(dtype if number % 3 else np.uint8)[..., None])
    if packed:
        shutil.make_archive(str(tmp_path / "set"), "zip", tmp_path / "set")
    config = DataConfig("zip", str(tmp_path / "set.zip")) if packed else DataConfig("folder", str(tmp_path / "set"))
    with pytest.raises(RecastError, match=r"unlike .*\.npy: store all images as the same kind of number"):
        load_data(config.replace(img_size=8), in_chans=1)
    for path in (tmp_path / "set").rglob("*.npy"):
        pixels = np.load(path)
        np.save(path, pixels / np.float32(255) if pixels.dtype != np.uint8 else pixels)  # 0 to 1, as bytes become
    assert load_data(DataConfig("folder", str(tmp_path / "set"), img_size=8), in_chans=1).val[0][0].max() <= 1


@pytest.mark.parametrize("layout", ["contig", "separate"])
@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.float32])
def test_bands_without_a_photometric_tag(tmp_path: Path, dtype: Any, layout: Any) -> None:
    pixels = np.arange(6 * 5 * 13).reshape(6, 5, 13).astype(dtype)
    stored = pixels if layout == "contig" else np.moveaxis(pixels, -1, 0)
    tifffile.imwrite(tmp_path / "a.tif", stored, planarconfig=layout)
    expected = torch.from_numpy(pixels.astype(np.float32) / (65535 if dtype == np.uint16 else 1)).permute(2, 0, 1)
    assert open_bands(str(tmp_path / "a.tif"), 13).equal(expected)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", content_of(np.save, NINE), "has 9 bands, the network takes 4"),
        ("a.npy", content_of(np.save, np.zeros((2, 2, 2, 4))), r"got \(2, 2, 2, 4\)"),
        ("a.npy", content_of(np.save, np.zeros((0, 2, 4))), r"got \(0, 2, 4\)"),
        ("a.npy", content_of(np.save, np.full((2, 2, 4), np.nan)), "NaN"),
        ("a.npy", content_of(np.save, np.array([{}])), "allow_pickle"),
        ("a.npy", b"nothing", "cannot read image"),
        ("a.npz", content_of(np.savez, a=NINE, b=NINE), "2 arrays"),
        ("a.tif", b"II*\0nothing", "is not an image"),
        ("a.png", content_of(Image.fromarray(GREY).save, "png"), "has 1 bands, the network takes 4"),
    ],
)
def test_one_line_with_the_path(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(RecastError, match=words) as caught:
        open_bands(str(path), 4)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pages_of_a_tiff_are_reported(tmp_path: Path) -> None:
    for path in in_classes(tmp_path, 4, "tif"):
        tifffile.imwrite(path, np.moveaxis(NINE, -1, 0).astype(np.uint8), photometric="minisblack")
    with pytest.warns(UserWarning, match="has 9 pages"):
        load_data(DataConfig("folder", str(tmp_path), img_size=8))
    assert load_data(DataConfig("folder", str(tmp_path), img_size=8), in_chans=9).val[0][0].shape == (9, 8, 8)
    archive = shutil.make_archive(str(tmp_path / "set"), "zip", tmp_path)
    with pytest.warns(UserWarning, match=r"set.zip: .*tif has 9 pages"):
        load_data(DataConfig("zip", archive, img_size=8))
    for name in "ab":
        shutil.rmtree(tmp_path / name)
    with pytest.raises(RecastError, match=r"images in set\.zip use --data zip"):
        load_data(DataConfig("folder", str(tmp_path), img_size=8))


@pytest.mark.parametrize(("size", "side"), [((90, 60), 32), ((64, 64), 64), ((40, 130), 100), ((20, 20), 32)])
def test_validation_cuts_bands_as_it_cuts_a_picture(size: tuple[int, int], side: int) -> None:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (7, 7, 3), np.uint8)).resize(size, Image.BICUBIC)
    ours = as_validation(pil_to_tensor(image).float() / 255, side)
    theirs = pil_to_tensor(resize_and_crop(image, side)).float() / 255
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 4 / 255  # Pillow rounds to bytes after each axis


@pytest.mark.parametrize("augment", [None, Augmentation(crop="random"), Augmentation(crop="simple")])
def test_resizing_leaves_the_range_of_unsigned_integers(augment: Augmentation | None) -> None:
    edges = torch.rand(3, 9, 9).round().repeat_interleave(5, 1).repeat_interleave(5, 2)  # overshoot where resized
    resize = band_transform(32, augment and resolve(augment, 32))
    assert as_picture(resized := resize(edges)) is resized
    assert resize(edges * 2).max() > 1


def arrays(root: Path, bands: int) -> DataConfig:
    rng = np.random.default_rng(0)
    for number, path in enumerate(in_classes(root, 24)):
        np.save(path, rng.normal(300 * (number % 2), 20, (20, 20, bands)).astype(np.float32))
    return DataConfig("folder", str(root), img_size=16, val_fraction=0.25)


@pytest.mark.parametrize("crop", ["none", "pad", "random", "simple"])
def test_a_folder_of_arrays(tmp_path: Path, crop: Any) -> None:
    augment = Augmentation(crop=crop, auto_augment="rand-m9", color_jitter=0.4)
    data = load_data(arrays(tmp_path, 5), augment, in_chans=5)
    image, _ = data.train[0]
    assert image.shape == (5, 16, 16) == tuple(data.example.shape[1:])
    first, same_seed, next_seed = (data.train.batch([0], [seed])[0] for seed in (1, 1, 2))
    assert first.equal(same_seed)
    assert crop == "none" or not first.equal(next_seed)
    pixels = data.train.plain().batch(range(len(data.train)))[0]
    assert data.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), rel=1e-2)
    assert data.std == pytest.approx(pixels.std((0, 2, 3)).tolist(), rel=1e-2)
    with pytest.raises(RecastError, match="5 numbers each"):
        load_data(arrays(tmp_path, 5).replace(mean=(0.1, 0.2, 0.3)), in_chans=5)


@pytest.mark.parametrize("ending", ["npy", "tif", "png"])
@pytest.mark.filterwarnings("ignore:auto_augment")
def test_a_zip_is_read_as_its_folder(tmp_path: Path, ending: str) -> None:
    bands, rng = 1 if ending == "png" else 5, np.random.default_rng(0)
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for path in in_classes(tmp_path / "set", 24, ending):
            pixels = rng.integers(0, 60_000, (20, 20, bands), np.uint16)
            if ending == "npy":
                np.save(path, pixels)
            elif ending == "tif":
                tifffile.imwrite(path, pixels, planarconfig="contig")
            else:
                Image.fromarray(pixels[..., 0]).save(path)
            archive.write(path, path.relative_to(tmp_path))
        archive.writestr("set/README.txt", "")
    folder, zipped = (
        load_data(DataConfig(kind, str(tmp_path / name), img_size=16, val_fraction=0.25), in_chans=bands)
        for kind, name in (("folder", "set"), ("zip", "set.zip"))
    )
    for loose, packed in ((folder.val, zipped.val), (folder.train.plain(), zipped.train.plain())):
        rows = range(len(loose))
        assert all(map(torch.equal, loose.batch(rows), packed.batch(rows)))
    assert (folder.mean, folder.std, folder.classes) == (zipped.mean, zipped.std, zipped.classes)
    augmented, plain = (part.batch([0, 1], [3, 4])[0] for part in (zipped.train, zipped.train.plain()))
    assert augmented.shape == (2, bands, 16, 16)
    assert not augmented.equal(plain)
    assert load_data(DataConfig("zip", str(tmp_path / "set.zip")), in_chans=bands).img_size == 20
    assert fingerprint_of(zipped)["val"]["contents"][0] != fingerprint_of(zipped)["val"]["contents"][1]
    if ending != "png":
        with pytest.raises(RecastError, match=r"set.zip: set/a/.*--in-chans N"):
            load_data(DataConfig("zip", str(tmp_path / "set.zip")))
        with pytest.raises(RecastError, match=r"set.zip: set/a/.* has 5 bands, the network takes 4"):
            load_data(DataConfig("zip", str(tmp_path / "set.zip")), in_chans=4)


def test_arrays_beside_pictures_are_no_images(tmp_path: Path) -> None:
    config = arrays(tmp_path, 3)
    for name in "ab":
        for stem in "xy":
            Image.fromarray(GREY).save(tmp_path / name / f"{stem}.png")
    with pytest.warns(UserWarning, match="skipped 24"):
        data = load_data(config)
    assert len(data.train) + len(data.val) == 4


@pytest.mark.filterwarnings("ignore:.*labels[.]")
@pytest.mark.parametrize("task", ["csv", "csv_multilabel"])
def test_arrays_in_a_table(tmp_path: Path, task: Any) -> None:
    arrays(tmp_path / "data", 5)
    rows = [f"{number:02},{'ab'[number % 2]}" for number in range(24)]  # without folder and ending
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
    config = DataConfig(task, str(tmp_path / "data"), labels_file=str(tmp_path / "labels.csv"), img_size=16)
    data = load_data(config, in_chans=5)
    assert data.val[0][0].shape == (5, 16, 16)
    assert len(data.train) + len(data.val) == 24


def test_grey_images_in_memory() -> None:
    data = load_data(DataConfig(num_val=20), in_chans=1)
    rgb = load_data(DataConfig(num_val=20))
    assert data.val.batch([3])[0].equal(rgb.val.batch([3])[0][:, :1])
    assert data.train.batch([3], [5])[0].shape == (1, 1, 32, 32)
    with pytest.raises(RecastError, match="in_chans=4"):
        load_data(DataConfig(), in_chans=4)


@pytest.mark.parametrize("in_chans", [1, 4, 12])
def test_weights_of_rgb_are_adapted_as_timm_does(tmp_path: Path, in_chans: int) -> None:
    torch.manual_seed(0)
    rgb = timm.create_model("test_resnet.r160_in1k")
    save_file(rgb.state_dict(), tmp_path / "rgb.safetensors")
    config = ModelConfig("test_resnet.r160_in1k", str(tmp_path / "rgb.safetensors"), in_chans=in_chans)
    network = build(config).eval()
    name, first = next((name, value) for name, value in rgb.state_dict().items() if value.dim() == 4)
    assert network.state_dict()[name].equal(timm.models.adapt_input_conv(in_chans, first))
    grey = torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(1)).expand(-1, in_chans, -1, -1)
    if in_chans != 4:  # timm repeats R, G, B and scales by 3/4
        torch.testing.assert_close(network(grey), rgb.eval()(grey[:, :1].expand(-1, 3, -1, -1)))
    for name in ("torchvision:resnet18", "upernet:resnet18"):
        with pytest.raises(RecastError, match="in_chans requires"):
            build(ModelConfig(name, in_chans=in_chans))


@pytest.mark.parametrize(("scale", "is_stated"), [(1.0, True), (255.0, False)])
def test_what_the_network_states_is_for_numbers_up_to_one(tmp_path: Path, scale: float, is_stated: bool) -> None:
    rng = np.random.default_rng(0)
    for path in in_classes(tmp_path, 8):
        np.save(path, (scale * rng.random((8, 8, 3))).astype(np.float32))
    network, config = timm.create_model("test_resnet"), DataConfig("folder", str(tmp_path), img_size=8)
    data = load_data(config, in_chans=3)
    fitted, line = data.fitted_to(network)
    assert (fitted.mean == tuple(network.pretrained_cfg["mean"])) == is_stated
    assert (fitted.mean == data.mean) != is_stated
    assert ("not in [0, 1]" in line) != is_stated
    fixed = load_data(config.replace(mean=(0.1, 0.2, 0.3)), in_chans=3).fitted_to(network)[0]
    assert fixed.mean == (0.1, 0.2, 0.3)
    line = load_data(config.replace(test_size=16, crop_pct=0.9), in_chans=3).fitted_to(network)[1]
    assert "8x8 pixels, tested at 16x16, test crop 0.9, " in line


def test_bands_for_the_eye() -> None:
    pixels = torch.arange(4.0).view(1, 4, 1, 1) * 100 + torch.arange(25.0).view(1, 1, 5, 5)
    assert as_picture(pixels).shape == (1, 3, 5, 5)
    assert as_picture(pixels, (4,))[0, 0].flatten().diff().ge(0).all()
    assert as_picture(pixels[:, :1]).shape == (1, 3, 5, 5)
    assert as_picture(rgb := torch.rand(3, 5, 5)).equal(rgb)
    with pytest.raises(RecastError, match="1 to 4"):
        as_picture(pixels, (5, 1, 2))


def test_what_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.reading.LARGEST", 2**16)
    zeros = np.zeros((256, 256, 4), dtype=np.uint8)
    np.savez_compressed(tmp_path / "a.npz", zeros)
    tifffile.imwrite(tmp_path / "b.tif", zeros, photometric="minisblack", compression="zlib")
    with zipfile.ZipFile(tmp_path / "c.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for number in range(4):
            file.writestr(f"{'ab'[number % 2]}/{number}.npy", content_of(np.save, zeros))
    for name in ("a.npz", "b.tif"):
        with pytest.raises(RecastError, match=f"{name}: unpacked it is larger than"):
            open_bands(str(tmp_path / name), 4)
    with pytest.raises(RecastError, match="npy: unpacked it is larger than"):
        load_data(DataConfig("zip", str(tmp_path / "c.zip"), img_size=8), in_chans=4)
    noise = np.random.default_rng(0).integers(0, 99, zeros.shape, dtype=np.uint8)
    np.savez_compressed(tmp_path / "noise.npz", noise)  # a little larger than their files
    tifffile.imwrite(tmp_path / "noise.tif", noise, photometric="minisblack", compression="zlib")
    np.savez(tmp_path / "stored.npz", zeros)  # no larger than their files
    np.save(tmp_path / "stored.npy", zeros)
    tifffile.imwrite(tmp_path / "stored.tif", zeros, photometric="minisblack")
    for name in ("noise.npz", "noise.tif", "stored.npz", "stored.npy", "stored.tif"):
        assert open_bands(str(tmp_path / name), 4).shape == (4, 256, 256)


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_a_header_with_more_than_the_file_holds(ending: str, tmp_path: Path) -> None:
    head = {"descr": "<f4", "fortran_order": False, "shape": (2**40, 1, 1)}
    content = content_of(np.lib.format.write_array_header_1_0, head) + bytes(64)
    path = tmp_path / f"a.{ending}"
    if ending == "npy":
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", content)
    with pytest.raises(RecastError, match="truncated, it states an array"):
        open_bands(str(path), 1)
