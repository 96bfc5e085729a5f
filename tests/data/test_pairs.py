import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import Augmentation, DataConfig
from recast.lab.data import Loader, load_data
from recast.papers.dense.segment.pairs import IGNORE, ImagePairs

pytestmark = pytest.mark.filterwarnings("ignore:.* masks. [0-9]")


def coloured(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 40x56 in which the grey level of a pixel is ten times its class, in blocks."""
    blocks = torch.randint(0, 20, (count, 5, 7), generator=torch.Generator().manual_seed(0))
    masks = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2).to(torch.uint8)
    return (masks * 10)[:, None].repeat(1, 3, 1, 1), masks


def test_image_and_mask_move_together() -> None:
    pairs = ImagePairs(*coloured(), 32, augment=Augmentation(crop="random", flip=True))
    batches = {size: list(Loader(pairs, size, shuffle_seed=1)) for size in (2, 6)}
    images, masks = (torch.cat(parts) for parts in zip(*batches[2], strict=True))
    assert torch.equal(images, batches[6][0][0])
    assert torch.equal(masks, batches[6][0][1])
    inside = masks != IGNORE
    difference, shifted = ((images[:, 0].float() - 10 * mask).abs()[inside] for mask in (masks, masks.roll(6, 2)))
    assert difference.median() <= 2, "edges are blurred by the resizing, blocks are not"
    assert shifted.median() > 20
    assert set(images[~inside.unsqueeze(1).expand_as(images)].tolist()) <= {124, 116, 104}
    sizes = [int((mask != IGNORE).sum()) for mask in masks]
    assert min(sizes) < 32 * 32 == max(sizes), "some are smaller than the cut, some are not"
    images, masks = pairs.plain().batch([0])
    assert images.shape == (1, 3, 32, 32)
    assert (images[0, 0] * 255 - masks[0] * 10).abs().median() <= 2


def write(folder: Path, *, mask: object = None, part: str = "", count: int = 4) -> Path:
    """A folder of pairs; the first mask is this one, if it is given."""
    images, masks = coloured(count)
    for i in range(count):
        for name, pixels in (("images", images[i].permute(1, 2, 0)), ("masks", masks[i])):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(folder / part / name / f"{i}.png")
    if mask is not None:
        Image.fromarray(np.asarray(mask)).save(folder / part / "masks" / "0.png")
    return folder


def read(folder: Path, **config: object) -> object:
    data = load_data(DataConfig("masks", data_dir=str(folder), img_size=32, **config))  # type: ignore[arg-type]
    list(Loader(data.train, 1, shuffle_seed=0))
    return data, next(iter(Loader(data.val, 8)))


def test_a_folder_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("\n".join(f"level {i}" for i in range(20)))
    data, (_, masks) = read(write(tmp_path), val_fraction=0.25)
    assert (len(data.train), len(data.val), data.classes[3], data.train.augment.crop) == (3, 1, "level 3", "random")
    assert masks.max() < 20
    write(tmp_path, part="train", count=5)
    write(tmp_path, part="val", count=2)
    with pytest.warns(UserWarning, match="not used: images, masks"):
        data, _ = read(tmp_path)
    assert (len(data.train), len(data.val)) == (5, 2)


def test_gaps_grey_and_sixteen_bits(tmp_path: Path) -> None:
    """Without classes.txt the numbers in the masks are the classes; the image may be grey, with 16 bits."""
    mask = np.full((40, 56), 700, np.uint16)
    mask[:9], mask[20:] = 3, IGNORE
    folder = write(tmp_path, mask=mask, count=2)
    Image.fromarray(np.full((40, 56), 2**15, np.uint16)).save(folder / "images" / "0.png")
    Image.fromarray(np.full((40, 56), 12, np.uint8)).save(folder / "masks" / "1.png")
    with pytest.warns(UserWarning, match=r"0\.png has 16-bit pixels, .*scale its values"):
        data, _ = read(folder, max_ignored=0.3)
    assert data.classes == ["3", "12", "700"]
    parts = {name: pairs for pairs in (data.train.plain(), data.val) for name in pairs.items}
    image, mask = parts[str(folder / "images" / "0.png")][0]
    assert mask.unique().tolist() == [0, 2, IGNORE]
    assert image.sub(0.5).abs().max() < 0.01


def save_ade(folder: Path, part: str, number: int, mask: list[list[int]]) -> None:
    """A pair of ADE20K; the mask has a palette, whose colours are not the classes."""
    picture = Image.fromarray(np.kron(mask, np.ones((4, 4))).astype(np.uint8))
    picture.putpalette(bytes(range(255, -1, -1)) * 3)
    for name, image in (
        (f"images/{part}/{number}.jpg", Image.new("RGB", (8, 8))),
        (f"annotations/{part}/{number}.png", picture),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(folder / name)


@pytest.mark.parametrize("named", [False, True])
def test_ade(tmp_path: Path, named: bool) -> None:
    """0 is no class but what nobody knows; the names are the release's own."""
    folder = tmp_path / "ADEChallengeData2016"
    for part, number in (("training", 0), ("training", 1), ("training", 2), ("validation", 0)):
        save_ade(folder, part, number, [[0, 3], [1, 1]])
    if named:
        lines = [f"{i}\t0.1\t9\t9\t{name}" for i, name in enumerate(("wall", "building, edifice", "sky"), 1)]
        (folder / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *lines]))
    data, (_, masks) = read(tmp_path)
    assert (len(data.train), len(data.val)) == (3, 1)
    assert data.classes == (["wall", "building, edifice", "sky"] if named else ["1", "3"])
    assert masks[0, ::16, ::16].tolist() == [[IGNORE, 2 if named else 1], [0, 0]]
    if named:
        Image.fromarray(np.full((8, 8), 4, np.uint8)).save(folder / "annotations" / "validation" / "0.png")
        with pytest.raises(RecastError, match="has class 4, expected 1 to 3, or 0 for unknown"):
            read(folder)


def test_names_have_either_unicode_form_and_parts_lie_within(tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs")
    for name, form in (("images", "NFD"), ("masks", "NFC")):
        for i, part in enumerate(("Train", "Train", "Train", "test")):
            (tmp_path / name / part).mkdir(parents=True, exist_ok=True)
            path = tmp_path / name / part / unicodedata.normalize(form, f"é{i}.png")
            (pairs / name / f"{i}.png").rename(path)
    shutil.rmtree(pairs)
    with pytest.warns(UserWarning, match="training part Train, validation part test"):
        data, _ = read(tmp_path)
    assert (len(data.train), len(data.val)) == (3, 1)


MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no masks": (lambda f: (f / "images").mkdir(), "has no folder masks"),
    "missing": (lambda f: (write(f) / "masks" / "2.png").unlink(), "1 of 4 images in .* have no mask: the first is 2"),
    "size": (lambda f: write(f, mask=np.zeros((40, 55), np.uint8)), "different sizes, 40x56 and 40x55"),
    "below": (
        lambda f: Image.fromarray(np.full((40, 56), -3, np.int32)).save(write(f) / "masks" / "0.png", "TIFF"),
        "cannot read image .*: it has the class -3",
    ),
    "jpeg": (
        lambda f: (
            [path.unlink() for path in (write(f) / "masks").iterdir()]
            and [Image.new("L", (56, 40)).save(f / "masks" / f"{i}.jpg") for i in range(4)]
        ),
        "cannot read image .*masks/0.jpg: JPEG changes the numbers of a mask",
    ),
    "two": (lambda f: write(f) and (f / "masks/0.tif").touch(), "two files 0, 0.tif is one"),
    "colour": (lambda f: write(f, mask=np.zeros((40, 56, 3), np.uint8)), "it has pixels of mode RGB, a mask"),
    "unknown": (
        lambda f: ((f / "classes.txt").write_text("a\nb"), write(f)),
        "has class [0-9]+, expected 0 to 1, or 255 for unknown",
    ),
    "one class": (lambda f: write(f, mask=np.zeros((40, 56), np.uint8), count=1), "has 1 classes, expected 2 to 255"),
    "twice": (lambda f: ((f / "classes.txt").write_text("a\na"), write(f)), "names 'a' twice"),
    "damaged": (lambda f: (write(f) / "masks" / "0.png").write_bytes(b"x"), "cannot read image .*masks/0.png"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(tmp_path: Path, name: str) -> None:
    make, message = MISTAKES[name]
    make(tmp_path)
    with pytest.raises(RecastError, match=message) as error:
        read(tmp_path)
    assert "\n" not in str(error.value)


def painted(folder: Path, *values: int, names: str = "", dtype: type = np.uint8, share: float = 0.25) -> Path:
    """A folder of eight pairs, in whose masks the values follow one another; the last covers this share."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "masks").mkdir(exist_ok=True)
    others = np.resize(np.array(values[:-1], dtype), round(1600 * (1 - share)))
    mask = np.concatenate([others, np.full(1600 - len(others), values[-1], dtype)]).reshape(40, 40)
    for i in range(8):
        Image.new("RGB", (40, 40), (i, 0, 0)).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    if names:
        (folder / "classes.txt").write_text(names.replace(" ", "\n"))
    return folder


@pytest.mark.parametrize("white", [255, 65535])
@pytest.mark.parametrize("names", ["", "none lesion"])
def test_black_and_white_are_two_classes(tmp_path: Path, names: str, white: int) -> None:
    painted(tmp_path, 0, white, names=names, dtype=np.uint16 if white > 255 else np.uint8)
    with pytest.warns(UserWarning, match=rf"masks: 8, classes: 2 .*0( and |, ){white}.*; ignored .* 0 % of"):
        data, (_, masks) = read(tmp_path)
    assert data.classes == (names.split() or ["0", str(white)])
    assert masks.unique().tolist() == [0, 1]
    assert (masks == 1).double().mean().item() == pytest.approx(0.25, abs=0.03)
    odd = np.zeros((40, 40), np.uint8)
    odd[0] = 1  # then 255 may be what it is elsewhere: unknown
    Image.fromarray(odd).save(tmp_path / "masks" / "0.png")
    if white == 255:
        with pytest.raises(RecastError, match="are 255, which is unknown"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        ((0, 128, 255), "a b", "128, expected 0 to 1, or 255 for unknown pixels .values 0, 128, 255 in 8 of 8 masks."),
        ((0, 128), "a b", "values 0, 128 in 8 of 8 masks"),
        ((1, 2), "a b", "has class 2, expected 0 to 1"),
        ((0, 254, 255), "a b", "values 0, 254, 255 in 8 of 8"),
        ((0, 255), "a b c", "25 % of the pixels of all masks are 255, .* allow it with --max-ignored 0.25$"),
        ((0, 1, 255), "a b", "25 % of the pixels"),
        ((0, 7, 255), "", "25 % of the pixels"),
        ((0, 0), "a b", "masks have no pixel of b: nothing can be learned"),
    ],
)
def test_numbers_that_are_no_class(tmp_path: Path, values: tuple[int, ...], names: str, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        read(painted(tmp_path, *values, names=names))


def test_the_share_that_is_ignored(tmp_path: Path) -> None:
    """It is said of each part, and one part alone is enough to be refused."""
    painted(tmp_path / "train", 0, 1, 255, share=0.04)
    painted(tmp_path / "val", 0, 1, 255, share=0.0)
    (tmp_path / "classes.txt").write_text("a\nb\nc")
    with pytest.warns(UserWarning, match=r"4 % of training \(no pixel of c\), 0 % of validation"):
        read(tmp_path)
    painted(tmp_path / "val", 0, 1, 255, share=0.5)
    with pytest.raises(RecastError, match="50 % of the pixels of validation masks"):
        read(tmp_path)
    with pytest.warns(UserWarning, match="50 % of validation"):
        read(tmp_path, max_ignored=0.5)
    with pytest.raises(RecastError, match="max_ignored requires name masks, got coco"):
        DataConfig("coco", max_ignored=0.5)


def test_a_mask_without_an_image_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "images" / "2.png").unlink()
    with pytest.warns(UserWarning, match=r"skipped 1 .*masks/2.png \(has no image\)"):
        read(tmp_path)


def test_skipped_masks(tmp_path: Path) -> None:
    painted(tmp_path, 0, 1, names="a b")
    (tmp_path / "masks" / "0.png").write_bytes(b"x")
    Image.fromarray(np.full((40, 40), 9, np.uint8)).save(tmp_path / "masks" / "1.png")
    with pytest.warns(UserWarning, match="masks: 7 of 8, .*skipped 1 with numbers that are no class"):
        data = load_data(DataConfig("masks", data_dir=str(tmp_path), img_size=32, bad_image="skip"))
    loader = Loader(data.train, 1, shuffle_seed=0, bad_image="skip")
    assert {int(mask.max()) for _, mask in loader} <= {0, 1, IGNORE}
    assert len(loader.bad_images) == 2
