"""Hostile annotations of objects, and masks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from judging import Case
from mutations import as_json, drawn, edits
from PIL import Image

LEARN = "--img-size 64 --epochs 1 --batch-size 2 --no-control --device cpu --out new"
DETECT = f"train detect --data coco --data-dir boxes {LEARN}"
SEGMENT = f"train segment --data masks --data-dir pairs {LEARN}"


def dense_cases(scale: int, number: int, world: Path) -> Iterator[Case]:
    """All of this module, `scale` cases of a kind; none in the smallest sample, as each is a training."""
    if scale == 1:
        return
    document = json.loads((world / "boxes" / "train.json").read_text(encoding="utf-8"))
    for i, edited in enumerate(drawn(edits(document), scale, number + 60)):
        files = (("train.json",), ("val.json",), ("train.json", "val.json"))[i % 3]
        yield Case(
            "objects, edited", f"{', '.join(files)}-{i}", DETECT.split(),
            partial(_write, files=files, content=as_json(edited)), codes=(0, 2),
        )  # fmt: skip
    chance = random.Random(number + 61)
    for name in chance.sample(sorted(OBJECTS), min(len(OBJECTS), scale)):
        edit, refused = OBJECTS[name]
        content = as_json(_with(document, edit))
        put = partial(_write, files=("train.json", "val.json"), content=content)
        yield Case("objects", name, DETECT.split(), put, codes=(0, 2), refused=refused)
    for name in chance.sample(sorted(MASKS), min(len(MASKS), scale)):
        make, refused = MASKS[name]
        yield Case("masks", name, SEGMENT.split(), make, codes=(0, 2), refused=refused)


def _write(folder: Path, files: tuple[str, ...], content: bytes) -> None:
    for name in files:
        (folder / "boxes" / name).write_bytes(content)


def _with(document: dict[str, list[dict[str, object]]], edit: Callable[[dict[str, object]], object]) -> object:
    """A copy of the annotations whose first object, of the first image, is another."""
    found = json.loads(json.dumps(document))
    edit(found["annotations"][0])
    return found


def _set(**changed: object) -> Callable[[dict[str, object]], object]:
    return lambda one: one.update(changed)


def _runs(*counts: object, size: tuple[object, ...] = (24, 32)) -> Callable[[dict[str, object]], object]:
    return _set(segmentation={"size": list(size), "counts": list(counts)})


OBJECTS: dict[str, tuple[Callable[[dict[str, object]], object], bool]] = {
    "a box of nan": (_set(bbox=[float("nan")] * 4), True),
    "a box of 1e308": (_set(bbox=[1e308, 0, 1e308, 10]), True),
    "a box of −1e308": (_set(bbox=[-1e308, 0, 1e308, 10]), True),
    "a box outside": (_set(bbox=[500, 500, 10, 10]), True),
    "a box below 0": (_set(bbox=[-500, -500, 10, 10]), True),
    "a flat box": (_set(bbox=[3, 3, 10, 0]), False),
    "a thin box": (_set(bbox=[3, 3, 10, 1e-9]), False),
    "a box of words": (_set(bbox=["3", "3", "x", "9"]), True),
    "a box of lists": (_set(bbox=[[1, 2], [3, 4], [5, 6], [7, 8]]), True),
    "a box of three": (_set(bbox=[1, 2, 3]), True),
    "a box larger than the image": (_set(bbox=[-100, -100, 1000, 1000]), False),
    "an area of words": (_set(area="large"), True),
    "an area of nan": (_set(area=float("nan")), True),
    "an area of −5": (_set(area=-5), True),
    "no area": (lambda one: one.pop("area"), False),
    "all a crowd": (_set(iscrowd=1), False),
    "a crowd of words": (_set(iscrowd="no"), True),
    "a list as id": (_set(image_id=[1]), True),
    "another image": (_set(image_id=99), True),
    "another category": (_set(category_id=2), True),
    "the category as text": (_set(category_id="1"), True),
    "runs below 0": (_runs(-51, 120, 699), True),
    "runs of 1e15": (_runs(10**15, 120, 597), True),
    "runs of words": (_runs("51", "120", "597"), True),
    "runs of halves": (_runs(51.5, 119.5, 597), True),
    "runs too short": (_runs(51, 120), True),
    "no runs": (_runs(), True),
    "a mask of another size": (_runs(51, 120, 597, size=(32, 24)), True),
    "a mask of no size": (_runs(51, 120, 597, size=()), True),
    "a mask of words": (_set(segmentation="mask"), True),
    "a mask of 7": (_set(segmentation=7), True),
    "a mask of no object": (_runs(768), False),
    "compressed rubbish": (_set(segmentation={"size": [24, 32], "counts": "\x00\x01zz"}), True),
    "compressed, endless": (_set(segmentation={"size": [24, 32], "counts": "o" * 5000}), True),
    "a polygon": (_set(segmentation=[[2, 3, 12, 3, 12, 15, 2, 15]]), False),
    "a polygon of two numbers": (_set(segmentation=[[1, 2]]), True),
    "a polygon of nan": (_set(segmentation=[[float("nan")] * 8]), True),
    "a polygon of 1e30": (_set(segmentation=[[1e30] * 8]), True),
    "a polygon of words": (_set(segmentation=[["a"] * 8]), True),
    "an empty polygon": (_set(segmentation=[[]]), True),
}
"""Name → what is done to one object, and whether it must be refused."""


def _mask(values: np.ndarray, name: str = "0.png", mode: str | None = None) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        image = Image.fromarray(values)
        path = folder / "pairs/train/masks/0.png"
        path.unlink()
        (image if mode is None else image.convert(mode)).save(path.with_name(name))

    return put


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "pairs/train/masks/0.png").write_bytes(content)


def _classes(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "pairs/classes.txt").write_text(text, encoding="utf-8")


ONES = np.ones((24, 32), dtype=np.uint8)
MASKS: dict[str, tuple[Callable[[Path], object], bool]] = {
    "another size": (_mask(ONES[:20]), True),
    "turned": (_mask(np.ascontiguousarray(ONES.T)), True),
    "in colour": (_mask(ONES, mode="RGB"), True),
    "transparent": (_mask(ONES, mode="RGBA"), True),
    "one bit": (_mask(ONES, mode="1"), False),
    "a palette": (_mask(ONES, mode="P"), False),
    "16 bits": (_mask(ONES.astype(np.uint16)), False),
    "40,000 in 16 bits": (_mask(ONES.astype(np.uint16) * 40_000), False),
    "32 bits, below 0": (_mask(-ONES.astype(np.int32), "0.tif"), True),
    "float": (_mask(ONES.astype(np.float32) / 2, "0.tif"), True),
    "all unknown": (_mask(ONES * 255), False),
    "empty": (_bytes(b""), True),
    "text": (_bytes(b"hello"), True),
    "half a head": (_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"), True),
    "none": (lambda folder: (folder / "pairs/train/masks/0.png").unlink(), True),
    "no folder": (lambda folder: (folder / "pairs/train/masks").rename(folder / "pairs/train/mask"), True),
    "two for one": (lambda folder: (folder / "pairs/train/masks/0.jpg").write_bytes(b"x"), True),
    "a folder for one": (lambda folder: (folder / "pairs/train/masks/9.png").mkdir(), False),
    "no images": (lambda folder: [p.unlink() for p in (folder / "pairs/train/images").iterdir()], True),
    "one image": (lambda folder: [(folder / f"pairs/train/images/{i}.png").unlink() for i in (1, 2)], False),
    "one class named": (_classes("a\n"), True),
    "a class twice": (_classes("a\nb\na\n"), True),
    "too few classes": (_classes("a\nb\n"), True),
    "strange classes": (_classes("$\\frac{1}$\n\x1b[2J\n<b>\n"), False),
    "300 classes": (_classes("".join(f"c{i}\n" for i in range(300))), True),
    "binary classes": (lambda folder: (folder / "pairs/classes.txt").write_bytes(b"\xff\xfe\0"), True),
}
"""Name → what is done to a mask, and whether it must be refused."""
