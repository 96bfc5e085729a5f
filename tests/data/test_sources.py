"""Folders, zips and digits: the same images wherever they lie, subsets, sizes; bad input is one clear line."""

import csv
import shutil
import unicodedata
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import load_data

COLORS = {"zebra": (255, 0, 0), "ant": (0, 255, 0), "Bee": (0, 0, 255)}
CLASSES = ["Bee", "ant", "zebra"]  # upper case sorts first


def make_tree(root: Path, counts: Mapping[str, int] | int = 10, size: int = 16) -> Path:
    """CLASS/i.png of one colour per class; the grey level of the first pixel tells the images of a class apart."""
    for name, count in (dict.fromkeys(COLORS, counts) if isinstance(counts, int) else counts).items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            image = Image.new("RGB", (size, size), COLORS.get(name, (9, 9, 9)))
            image.putpixel((0, 0), (number, number, number))
            image.save(root / name / f"{number}.png")
    return root


def make_zip(tree: Path, path: Path, folders: bool = False) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for item in sorted(tree.rglob("*"), reverse=True):
            if item.is_file() or folders:
                archive.write(item, item.relative_to(tree).as_posix())
    return path


def make_index(root: Path, header: tuple[str, ...], *rows: tuple[str, ...]) -> DataConfig:
    with (root / "index.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return folder(root)


def folder(path: Path, **options: Any) -> DataConfig:
    return DataConfig("zip" if path.suffix == ".zip" else "folder", str(path), **options)


def color_of(image: torch.Tensor) -> tuple[int, ...]:
    return tuple((image[:, 8, 8] * 255).round().int().tolist())


def test_digits() -> None:
    data = load_data(DataConfig())
    assert (len(data.train), len(data.val), data.img_size, data.test_size) == (1297, 500, 32, 32)
    assert data.val.labels.bincount().tolist() == [50] * 10
    assert (data.train.augment.crop, data.train.augment.flip) == ("pad", False)
    image, _ = data.val[0]
    assert image[0].equal(image[2])
    pixels = data.train.plain().batch(range(1297))[0]
    assert pixels.mean().item() == pytest.approx(data.mean[0], abs=1e-3)
    assert pixels.std().item() == pytest.approx(data.std[0], abs=1e-3)
    held_out = {image.numpy().tobytes() for image in data.val.batch(range(500))[0]}
    assert not {image.numpy().tobytes() for image in pixels} & held_out


def test_index_gives_labels_of_all_imagenet_classes(tmp_path: Path) -> None:
    make_tree(tmp_path, {"n01496331": 1, "n01514859": 1})
    header = ("file", "wnid", "class_index", "name")
    ray = ("n01496331/0.png", "n01496331", "5", "electric ray, torpedo")
    data = load_data(make_index(tmp_path, header, ("n01514859/0.png", "n01514859", "8", "hen"), ray))
    assert (data.val.labels.tolist(), len(data.train), len(data.classes), data.img_size) == ([8, 5], 0, 1000, 224)
    assert (data.classes[5], data.classes[0]) == ("electric ray, torpedo", "tench, Tinca tinca")
    renumbered = make_index(tmp_path, header, ("n01514859/0.png", "n01514859", "3", ""))
    assert load_data(renumbered).classes == ["0", "1", "2", "n01514859"]


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (("file", "label"), ("a/0.png", "1"), "missing: class_index"),
        (("file", "class_index"), ("a/0.png", "-1"), r"line 2 \(a/0\.png\): class_index must be >= 0, got '-1'"),
        (("file", "class_index"), ("a/0.png", "100000"), r"line 2 \(a/0\.png\): class_index must be < 100000"),
        (("file", "class_index"), ("a/9.png", "1"), "does not exist: .*9.png"),
    ],
)
def test_bad_index_is_one_clear_line(tmp_path: Path, header: tuple, row: tuple, message: str) -> None:
    make_tree(tmp_path, {"a": 1})
    with pytest.raises(RecastError, match=message):
        load_data(make_index(tmp_path, header, row))


@pytest.mark.parametrize("again", ["a/0.png", "./a/0.png", "b/../a/0.png"])
def test_an_image_twice_in_an_index_is_an_error(tmp_path: Path, again: str) -> None:
    make_tree(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(RecastError, match=r"several rows for an image \(1: .*0\.png\); keep one each"):
        load_data(make_index(tmp_path, ("file", "class_index"), ("a/0.png", "1"), (again, "2")))


def test_two_archives_equal_the_folder(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree" / "train")
    make_tree(tmp_path / "tree" / "test", 3, size=24)
    for part in ("train", "test"):
        make_zip(tmp_path / "tree" / part, tmp_path / f"{part}.zip", folders=part == "test")
    zipped = load_data(DataConfig(name="zip", data_dir=str(tmp_path), img_size=16, num_train=6))
    loose = load_data(folder(tmp_path / "tree", img_size=16, num_train=6))
    assert zipped.classes == loose.classes == CLASSES
    for part, twin in ((zipped.train, loose.train), (zipped.val, loose.val)):
        rows = range(len(part))
        assert all(map(torch.equal, part.plain().batch(rows), twin.plain().batch(rows)))
    assert (zipped.train.augment.crop, zipped.train.augment.flip, zipped.name) == ("pad", True, tmp_path.name)
    path = str(make_zip(tmp_path / "tree", tmp_path / "all.zip"))
    named, inferred = (load_data(DataConfig(name, path, img_size=16)) for name in ("zip", "folder"))
    assert (inferred.name, inferred.train.augment) == (named.name, named.train.augment) == ("all", zipped.train.augment)
    assert inferred.val.batch(range(9))[0].equal(loose.val.batch(range(9))[0])


@pytest.fixture(params=["folder", "zip"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], DataConfig]:
    def config(tree: Path) -> DataConfig:
        return folder(make_zip(tree, tmp_path / "packed.zip") if request.param == "zip" else tree, img_size=8)

    return config


def sizes(data: Any) -> tuple[list[str], int, int]:
    return data.classes, len(data.train), len(data.val)


def test_class_folders_alone_are_split(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    config = packed(make_tree(tmp_path / "tree", {"ant": 8, "Bee": 20})).replace(val_fraction=0.25)
    data: Any = load_data(config)
    assert (data.val.labels.bincount().tolist(), data.train.labels.bincount().tolist()) == ([5, 2], [15, 6])
    fewer, same = (load_data(config.replace(num_train=0.2)).train.plain() for _ in range(2))
    assert fewer.labels.bincount().tolist() == [3, 1]  # of every class
    assert fewer[1][0].equal(same[1][0])
    if config.name == "folder":
        assert not set(data.train.items) & set(data.val.items)
        assert data.val.items == load_data(config).val.items  # type: ignore[attr-defined]


def test_class_folders_are_checked(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    for part in ("train", "val"):
        make_tree(tmp_path / "tree" / part, 2)
    wasps = (tmp_path / "tree" / "val" / "ant").rename(tmp_path / "tree" / "val" / "wasp")
    with pytest.raises(RecastError, match=r"only in .*train: ant; only in .*val: wasp"):
        load_data(packed(tmp_path / "tree"))
    for path in wasps.iterdir():
        path.rename(path.with_suffix(".heic"))
    with pytest.raises(RecastError, match=r"without images: wasp in .*val"):
        load_data(packed(tmp_path / "tree"))


@pytest.mark.filterwarnings("ignore:.*(part|not used)")
@pytest.mark.parametrize(
    ("train", "val"),
    [pair.split() for pair in ("Training Testing", "seg_train/seg_train seg_test/seg_test", "train_images valid_set")]
    + [pair.split() for pair in ("images/train images/test", "TrainingSet dev", "train2017 val2017")],
)
def test_parts_are_known_by_their_usual_names(
    tmp_path: Path, packed: Callable[[Path], DataConfig], train: str, val: str
) -> None:
    make_tree(tmp_path / "tree" / train, 3)
    make_tree(tmp_path / "tree" / val, 2)
    assert sizes(load_data(packed(tmp_path / "tree"))) == (CLASSES, 9, 6)


def test_one_held_out_part_is_chosen_and_the_others_are_named(
    tmp_path: Path, packed: Callable[[Path], DataConfig]
) -> None:
    for part, count in (("train", 3), ("Val", 2), ("test", 1), ("extra", 1)):
        make_tree(tmp_path / "tree" / part, count)
    with pytest.warns(UserWarning, match="validation part Val; not used: extra, test"):
        assert sizes(load_data(packed(tmp_path / "tree"))) == (CLASSES, 9, 6)
    make_tree(tmp_path / "tree" / "VAL")
    with pytest.raises(RecastError, match="VAL and Val"):
        load_data(packed(tmp_path / "tree"))


@pytest.mark.parametrize("names", [("A", "B"), ("train", "holdout"), ("cat", "test_tubes")])
def test_folders_that_hold_the_same_folders_are_refused(
    tmp_path: Path, packed: Callable[[Path], DataConfig], names: tuple[str, str]
) -> None:
    for name in names:
        make_tree(tmp_path / "tree" / name, {"p": 2, "q": 2})
    with pytest.raises(RecastError, match=r"hold the same folders \(p, q\).*--data csv"):
        load_data(packed(tmp_path / "tree"))


def test_folders_inside_of_a_class_are_reported(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    for name, inner in (("ant", "pq"), ("bee", "xyz")):
        make_tree(tmp_path / "tree" / name, dict.fromkeys(inner, 4))
    with pytest.warns(UserWarning, match=r"ant is one class, with all its folders \(p, q\)$"):
        assert sizes(load_data(packed(tmp_path / "tree"))) == (["ant", "bee"], 18, 2)


def test_what_is_no_part(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    """An inner folder of every class, as in Tiny ImageNet; vehicles that may be trains."""
    for name in CLASSES:
        make_tree(tmp_path / "tree" / name, {"images": 4})
    assert load_data(packed(tmp_path / "tree")).classes == CLASSES
    make_tree(tmp_path / "vehicles", {"train": 4, "bus": 4, "car": 4})
    assert load_data(packed(tmp_path / "vehicles")).classes == ["bus", "car", "train"]
    make_tree(tmp_path / "vehicles", {"val": 4})
    with pytest.warns(UserWarning, match="val is read as a class"):
        assert load_data(packed(tmp_path / "vehicles")).classes == ["bus", "car", "train", "val"]


@pytest.mark.parametrize("part", ["val", "Valid", "validation", "test", "val2017"])
def test_a_held_out_part_without_class_folders(tmp_path: Path, packed: Callable[[Path], DataConfig], part: str) -> None:
    """ImageNet's official val; none of the training images takes its place."""
    make_tree(tmp_path / "tree" / "train")
    make_tree(tmp_path / "tree", {part: 4})
    with pytest.raises(RecastError, match=rf"{part} has images without class folders \(.*as in train, or move it"):
        load_data(packed(tmp_path / "tree"))
    make_tree(tmp_path / "tree" / "testing", 2)  # comes after each of them
    with pytest.raises(RecastError, match=f"{part} has images without"):
        load_data(packed(tmp_path / "tree"))


def test_unlabelled_images_beside_a_held_out_part(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    for part in ("train", "val"):
        make_tree(tmp_path / "tree" / part, 2)
    make_tree(tmp_path / "tree", {"test": 4})
    with pytest.warns(UserWarning, match="not used: test"):
        assert sizes(load_data(packed(tmp_path / "tree"))) == (CLASSES, 6, 6)


def test_an_empty_held_out_part(tmp_path: Path) -> None:
    make_tree(tmp_path / "train")
    (tmp_path / "val").mkdir()
    with pytest.raises(RecastError, match="val has no images"):
        load_data(folder(tmp_path))


def test_what_systems_and_tools_leave_does_not_count(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    tree = make_tree(tmp_path / "tree", {"cat": 6, "dog": 6})
    tools = ".ipynb_checkpoints .Trash-1000/files @eaDir/0.png __MACOSX/cat $RECYCLE.BIN lost+found #recycle".split()
    tools += ["System Volume Information", ".AppleDouble", "sub/@Recycle"]
    for number, place in enumerate(tools):
        where = tree / ("cat" if number % 2 else "") / place
        where.mkdir(parents=True)
        shutil.copy(tree / "cat" / "0.png", where / "copy.png")
    for name in ("._0.png", "notes.txt", "Thumbs.db", ".DS_Store"):
        (tree / "dog" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match="skipped 14 "):
        data: Any = load_data(packed(tree))
    assert len(data.train) + len(data.val) == 12


def test_class_names_have_one_form(tmp_path: Path, packed: Callable[[Path], DataConfig]) -> None:
    for part, form in (("train", "NFC"), ("val", "NFD")):
        make_tree(tmp_path / "tree" / part, {unicodedata.normalize(form, name): 2 for name in ("Café", "Größe")})
    assert sizes(load_data(packed(tmp_path / "tree"))) == (["Café", "Größe"], 4, 4)
    make_tree(tmp_path / "tree" / "train", {unicodedata.normalize("NFD", "Café"): 2})
    with pytest.raises(RecastError, match="two class folders Café"):
        load_data(packed(tmp_path / "tree"))
    make_tree(tmp_path / "alike", {"a\nb": 2, "a\\nb": 2, "cow": 2})
    with pytest.raises(RecastError, match=r"two class folders a\\nb"):
        load_data(folder(tmp_path / "alike"))
    make_tree(tmp_path / "control", {"red\x1b[31m": 4, "b": 4})
    assert load_data(packed(tmp_path / "control")).classes == ["b", r"red\x1b[31m"]


@pytest.mark.parametrize("name", ["a//0.png", "./a/0.png"])
def test_an_image_twice_in_a_zip_is_refused(tmp_path: Path, name: str) -> None:
    path = make_zip(make_tree(tmp_path / "tree", {"a": 2, "b": 2}), tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, (tmp_path / "tree" / "b" / "0.png").read_bytes())
    with pytest.raises(RecastError, match=r"holds a/0\.png twice"):
        load_data(folder(path))


@pytest.mark.parametrize("start", ["", "photos\\", ".\\", "C:\\photos\\"])
def test_a_zip_with_backslashes_in_its_names(tmp_path: Path, start: str) -> None:
    tree = make_tree(tmp_path / "tree", {"a": 2, "b": 2})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(f"{start}a\\", "")  # a folder
        for path in sorted(tree.rglob("*.png")):
            archive.write(path, start + str(path.relative_to(tree)).replace("/", "\\"))
    plain, zipped = load_data(folder(tree, img_size=8)), load_data(folder(tmp_path / "a.zip", img_size=8))
    assert (zipped.classes, len(zipped.train), len(zipped.val)) == (plain.classes, len(plain.train), len(plain.val))
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        archive.writestr(f"{start}a\\0.png".replace("\\", "/"), "")
    with pytest.raises(RecastError, match=r"holds .*a/0\.png twice"):
        load_data(folder(tmp_path / "a.zip"))


@pytest.mark.parametrize("target", ["..", "../ant", "../../../other/up", "../ant/0.png"])
def test_a_link_that_would_count_images_twice_is_refused(tmp_path: Path, target: str) -> None:
    tree = make_tree(tmp_path / "data" / "tree")
    make_tree(tmp_path / "other")
    (tmp_path / "other" / "up").symlink_to(tmp_path / "other")
    data = load_data(folder(tree))
    link = tree / "zebra" / ("link.png" if target.endswith("png") else "link")
    link.symlink_to(target)
    with pytest.raises(RecastError, match=r"is a link to .*, whose images would count twice"):
        load_data(folder(tree))
    link.unlink()
    (tree / "zebra" / "link").symlink_to(tmp_path / "other" / "ant")  # images from elsewhere
    (tree / "zebra" / "loop").symlink_to("loop")
    with pytest.warns(UserWarning, match="skipped 1 .*: zebra/loop"):
        assert len(load_data(folder(tree)).train) == len(data.train) + 9


def test_bad_archives_are_named(tmp_path: Path) -> None:
    config, path = folder(tmp_path / "a.zip"), tmp_path / "a.zip"
    content = bytearray(make_zip(make_tree(tmp_path / "tree", {"ant": 4, "Bee": 4}), path).read_bytes())
    content[content.index(b"IDAT") + 8] ^= 0xFF
    path.write_bytes(bytes(content))
    with pytest.raises(RecastError, match=r"cannot read image .*a\.zip: (ant|Bee)/\d\.png: Bad CRC-32"):
        load_data(config)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(RecastError, match=r"cannot read archive .*a\.zip.*complete"):
        load_data(config)


def test_images_of_an_archive_that_cannot_be_read_can_be_left_out(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"ant": 10, "Bee": 10})
    for number in range(10):
        if number != 4:
            (tree / "Bee" / f"{number}.png").write_bytes(b"broken")
    config = folder(make_zip(tree, tmp_path / "a.zip"), bad_image="skip")
    data = load_data(config)
    assert ["a.zip: Bee/" in name for name in data.bad_images] == [True] * 9
    assert (len(data.train) + len(data.val), data.img_size) == (11, 16)
    for label, color in enumerate(("Bee", "ant")):
        chosen = (data.train.labels == label).nonzero().flatten().tolist()
        assert all(color_of(data.train.plain()[index][0]) == COLORS[color] for index in chosen)
    with pytest.raises(RecastError, match=r"cannot read image .*a\.zip: Bee/"):
        load_data(config.replace(bad_image="stop"))
    for path in tree.rglob("*.png"):
        path.write_bytes(b"broken")
    with pytest.raises(RecastError, match=r"no image could be read"):
        load_data(config.replace(data_dir=str(make_zip(tree, tmp_path / "b.zip"))))


def test_validation_has_a_size_of_its_own(tmp_path: Path) -> None:
    for part, size in (("train", 20), ("val", 30)):
        make_zip(make_tree(tmp_path / "tree" / part, size=size), tmp_path / f"{part}.zip")
    for name, where in (("digits", None), ("folder", tmp_path / "tree"), ("zip", tmp_path)):
        config = DataConfig(name, where and str(where), img_size=16, test_size=24)
        data = load_data(config)
        assert (data.img_size, data.test_size) == (16, 24)
        assert data.train[0][0].shape == data.train.plain()[0][0].shape == (3, 16, 16)
        assert data.val[0][0].shape == (3, 24, 24)
        assert load_data(config.replace(test_size=None)).test_size == 16


def test_crop_pct_says_how_much_validation_sees(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 40), (255, 0, 0))
    image.paste((0, 0, 255), (10, 10, 30, 30))
    for part in ("train", "val"):
        (tmp_path / "tree" / part / "a").mkdir(parents=True)
        image.save(tmp_path / "tree" / part / "a" / "0.png")
        make_zip(tmp_path / "tree" / part, tmp_path / f"{part}.zip")
    for name, where in (("folder", tmp_path / "tree"), ("zip", tmp_path)):
        for crop_pct, share in ((None, 0.25), (1.0, 0.25), (0.5, 1.0)):
            data = load_data(DataConfig(name, str(where), img_size=20, crop_pct=crop_pct))
            assert data.val[0][0][2].mean().item() == pytest.approx(share, abs=0.02)
            unshifted = data.train.augmented(Augmentation(crop="none", flip=False))[0][0]
            assert unshifted.equal(data.val[0][0])  # crop=none: as in validation
    full, middle = (load_data(DataConfig(img_size=16, crop_pct=crop_pct)).val[0][0] for crop_pct in (1.0, 0.5))
    assert middle.mean() > full.mean()  # the middle of a digit is brighter than its border


def test_mean_and_std_of_the_data(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"ant": 4, "Bee": 4}, size=40)
    data: Any = load_data(folder(tree, img_size=40, mean="data", std="data", val_fraction=0.5))
    pixels = data.train.plain().batch(range(4))[0]
    assert data.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-4)
    assert data.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=4e-3)
    assert load_data(folder(tree, img_size=40, std="data")).mean[0] == 0.485
    with pytest.raises(RecastError, match="mean must be"):
        folder(tree, mean="dota")
    with pytest.raises(RecastError, match="divide those of 0 to 255 by 255"):
        load_data(folder(tree, img_size=40, mean=(123.7, 116.3, 103.5)))
    assert load_data(folder(tree, img_size=40, mean=(0, 0, 0), std=(1, 1, 1))).std == (1, 1, 1)


def test_class_folders_whose_names_hardly_differ_are_named(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"sea_lion": 2, "Sea Lion": 2})
    with pytest.warns(UserWarning, match="'Sea Lion' and 'sea_lion'"):
        assert load_data(folder(tree, img_size=8)).classes == ["Sea Lion", "sea_lion"]
