"""Hostile pictures and folders of pictures."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from judging import Case
from mutations import damages, drawn
from PIL import Image

VERIFY = "verify digits_resnet --img-size 16 --num-images 2"
FOLDER, ZIP, SHARDS = (
    f"{VERIFY} --num-classes 2 --data {name} --data-dir {place}"
    for name, place in (("folder", "data"), ("zip", "data.zip"), ("wds/x", "shards"))
)
LEARN = (
    "train folder --model digits_resnet --num-classes 2 --data-dir data --img-size 16 --epochs 0 --batch-size 2 "
    "--device cpu --out new"
)
LOOK = "explain run images/a.png --out new.html --json"
SHEET = "explain run images --out new.png"


def image_cases(scale: int, number: int, world: Path) -> Iterator[Case]:
    """All of this module, `scale` cases of a kind."""
    chance = random.Random(number + 40)
    pictures = _pictures()
    every = [(name, where, words) for name in pictures for where, words in (
        ("images/a.png", LOOK), ("images/a.png", SHEET), ("data/val/a/0.png", FOLDER), ("data/train/a/0.png", LEARN),
        ("data/val/b/1.png", f"{LEARN} --bad-image skip"),
    )]  # fmt: skip
    for name, where, words in chance.sample(every, min(len(every), 2 * scale)):
        yield Case(
            "pictures", f"{name}: {words.split()[0]}{' sheet' * (words == SHEET)}", words.split(),
            partial(_put, where=where, content=pictures[name]),
            codes=(0, 1, 2),
        )  # fmt: skip
    for i, damage in enumerate(drawn(damages(), 2 * scale, number + 41)):
        where, words = (
            ("data.zip", ZIP),
            ("shards/val-0.tar", SHARDS),
            ("shards/_info.json", SHARDS),
            ("data/val/a/0.png", FOLDER),
            ("images/a.png", LOOK),
        )[i % 5]

        def harm(folder: Path, where: str = where, damage: Callable[[bytes], bytes] = damage) -> None:
            (folder / where).write_bytes(damage((folder / where).read_bytes()))

        yield Case("data, damaged", f"{where}-{damage!r}", words.split(), harm, codes=(0, 1, 2))
    folders = sorted(FOLDERS)
    every_folder = [(name, words) for name in folders for words in _readers(name)]
    for name, words in chance.sample(every_folder, min(len(every_folder), 2 * scale)):
        yield Case(
            "folders of data", f"{name}: {words.split()[0]}", words.split(), FOLDERS[name], codes=(0, 1, 2),
            refused=name in REFUSED,
        )  # fmt: skip


def _put(folder: Path, where: str, content: bytes) -> None:
    (folder / where).write_bytes(content)


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"", extra: bytes = b"") -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    )


def _text_chunk(size: int) -> bytes:
    content = b"Comment\0\0" + zlib.compress(bytes(size), 9)
    return struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))


def _pictures() -> dict[str, bytes]:
    """Name → the bytes of a file that calls itself a picture."""
    noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    good = _encoded(noise, "PNG")
    return {
        "empty": b"", "text": b"hello", "html": b"<html>", "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "half": good[: len(good) // 2], "head": good[:8], "30,000 a side": _png(30_000, 30_000),
        "2 billion a side": _png(2**31 - 1, 2**31 - 1),
        "no width": _png(0, 0), "no data": _png(16, 16), "a bomb of a comment": _png(16, 16, data=bytes(16 * 49),
        extra=_text_chunk(2**28)),
        "100,000 × 1": _png(100_000, 1, data=bytes(300_001)), "1 × 100,000": _png(1, 100_000, data=bytes(400_000)),
        "one pixel": _encoded(noise.crop((0, 0, 1, 1)), "PNG"),
        "16 bits": _encoded(Image.fromarray(np.full((16, 16), 40_000, np.uint16)), "PNG"),
        "a palette": _encoded(noise.convert("P"), "PNG"),
        "a wrong palette": _encoded(noise.convert("P"), "PNG").replace(b"PLTE", b"plte"),
        "transparent": _encoded(noise.convert("RGBA"), "PNG"),
        "one bit": _encoded(noise.convert("1"), "PNG"), "CMYK": _encoded(noise.convert("CMYK"), "JPEG"),
        "YCbCr": _encoded(noise, "JPEG", quality=1),
        "float TIFF": _encoded(Image.fromarray(np.full((16, 16), 0.5, np.float32)), "TIFF"),
        "32-bit TIFF": _encoded(Image.fromarray(np.full((16, 16), 7, np.int32)), "TIFF"),
        "float of nan": _encoded(Image.fromarray(np.full((16, 16), np.nan, np.float32)), "TIFF"),
        "a cut TIFF": _encoded(noise, "TIFF")[:200],
        "moving GIF": _encoded(noise, "GIF", save_all=True, append_images=[noise] * 5),
        "a cut JPEG": _encoded(noise, "JPEG")[:-30],
        "a JPEG without end": _encoded(noise, "JPEG")[:-2], "WebP": _encoded(noise, "WEBP"),
        "a cut WebP": _encoded(noise, "WEBP")[:60],
        "BMP": _encoded(noise, "BMP"), "PPM": b"P6 16 16 255\n" + bytes(768),
        "a PPM of terabytes": b"P6 1000000 1000000 255\n", "PPM of −1": b"P6 -1 -1 255\n",
        "a PPM without end": b"P3 " + b"1" * 100_000, "PGM of 65535": b"P5 16 16 65535\n" + bytes(512),
        "PFM": b"Pf 16 16 -1.0\n" + bytes(1024),
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n(canary) run\n",
        "ICO": b"\0\0\1\0\1\0" + bytes(40),
        "a bad profile": _encoded(noise, "PNG", icc_profile=b"nonsense"),
        "odd EXIF": _encoded(noise, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
        "a zip": b"PK\3\4" + bytes(100), "FITS": b"SIMPLE  =                    T".ljust(2880),
        "an XPM": b"/* XPM */ static char *x[] = {", "a PSD": b"8BPS\0\1" + bytes(100),
        "an MPO": b"\xff\xd8\xff\xe2\0\x10MPF\0" + bytes(50), "a DDS": b"DDS " + bytes(200),
        "a JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(50), "an AVIF": b"\0\0\0\x1cftypavif" + bytes(50),
    }  # fmt: skip


GOOD = _encoded(Image.fromarray(np.random.default_rng(2).integers(0, 256, (16, 16, 3), dtype=np.uint8)), "PNG")
STRANGE = (
    "$\\frac{1}$", "$", "a\x1b[2J", "a\nb", "\u202egnp", "<b>x</b>", "{{7*7}}", "-x", "--help", " ", "a b", "é" * 60,
    "\udcff\udcfe", "x" * 250, "a,b", "=1+1",
    "a;b", "'\"", "%s", "\\", "null", "~", "...", "\u0000"[:0] + "\t", "𝕏", "a\u0301", "CON",
)  # fmt: skip


def _classes(folder: Path, names: tuple[str, ...]) -> None:
    import shutil

    shutil.rmtree(folder / "data")
    for part in ("train", "val"):
        for name in names:
            place = os.fsencode(folder / "data" / part) + b"/" + os.fsencode(name)
            os.makedirs(place, exist_ok=True)
            for number in (b"0", b"1", b"2", b"3"):
                with open(place + b"/" + number + b".png", "wb") as file:
                    file.write(GOOD)


def _link(folder: Path, at: str, to: str) -> None:
    (folder / at).symlink_to(to, target_is_directory=True)


def _emptied(folder: Path, at: str) -> None:
    for path in (folder / at).rglob("*.png"):
        path.unlink()


def _deep(folder: Path) -> None:
    here = folder / "data" / "val" / "a"
    for _ in range(60):
        here = here / ("d" * 50)
    with suppress(OSError):
        here.mkdir(parents=True)
        (here / "x.png").write_bytes(GOOD)


def _index(folder: Path, content: bytes) -> None:
    (folder / "data" / "index.csv").write_bytes(content)


def _zipped(folder: Path, members: tuple[tuple[str, bytes], ...], how: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(folder / "data.zip", "w", how) as file:
        for name, content in members:
            file.writestr(name, content)


def _spoilt(folder: Path, how: int) -> None:
    """A zip whose compressed bytes are others: what reads them fails in its own way."""
    _zipped(
        folder,
        tuple((f"{part}/{name}/{n}.png", GOOD) for part in ("train", "val") for name in "ab" for n in range(2)),
        how,
    )
    content = bytearray((folder / "data.zip").read_bytes())
    content[60:700] = bytes(b ^ 0x5A for b in content[60:700])
    (folder / "data.zip").write_bytes(content)


def _locked_zip(folder: Path) -> None:
    content = bytearray((folder / "data.zip").read_bytes())
    for at in range(len(content) - 4):
        if content[at : at + 4] == b"PK\3\4":
            content[at + 6] |= 1
        if content[at : at + 4] == b"PK\1\2":
            content[at + 8] |= 1
    (folder / "data.zip").write_bytes(content)


def _tarred(folder: Path, members: tuple[tuple[str, bytes], ...], kind: bytes = tarfile.REGTYPE) -> None:
    with tarfile.open(folder / "shards" / "val-0.tar", "w") as file:
        for name, content in members:
            one = tarfile.TarInfo(name)
            one.size, one.type, one.linkname = len(content), kind, "/etc/passwd"
            file.addfile(one, io.BytesIO(content))


def _info(folder: Path, **changed: object) -> None:
    path = folder / "shards" / "_info.json"
    found = json.loads(path.read_text()) | changed
    path.write_text(json.dumps(found))


def _bomb(folder: Path) -> None:
    _zipped(
        folder,
        tuple((f"{part}/{name}/0.png", bytes(2**28)) for part in ("train", "val") for name in "ab"),
        zipfile.ZIP_DEFLATED,
    )


FOLDERS: dict[str, Callable[[Path], object]] = {
    **{f"classes {name[:12]!r}": partial(_classes, names=(name, "other")) for name in STRANGE},
    "one class": partial(_classes, names=("a",)),
    "same but for case": partial(_classes, names=("a", "A")),
    "300 classes": partial(_classes, names=tuple(f"c{i}" for i in range(300))),
    "a link to the parent": partial(_link, at="data/val/a/up", to=".."),
    "a link to itself": partial(_link, at="data/val/a/me", to="me"),
    "a link to the root": partial(_link, at="data/val/a/root", to="/"),
    "a class that is the root": partial(_link, at="data/val/c", to="/"),
    "a class that is another": partial(_link, at="data/val/c", to="a"),
    "a class that is /proc": partial(_link, at="data/val/c", to="/proc"),
    "a picture that is /dev/zero": lambda folder: (folder / "data/val/a/z.png").symlink_to("/dev/zero"),
    "a picture that is a pipe": lambda folder: os.mkfifo(folder / "data/val/a/z.png"),
    "a picture that is a folder": lambda folder: (folder / "data/val/a/z.png").mkdir(),
    "a dangling picture": lambda folder: (folder / "data/val/a/z.png").symlink_to("nowhere"),
    "an empty class": lambda folder: (folder / "data/val/c").mkdir(),
    "an empty part": partial(_emptied, at="data/val"),
    "nothing": partial(_emptied, at="data"),
    "a deep class": _deep,
    **{
        f"index.csv {i}": partial(_index, content=content)
        for i, content in enumerate((
            b"", b"\0\0\0", b"\xff\xfe", b"file,class_index\n", b"file,class_index\nx,0\n",
            b"file,class_index\nval/a/0.png,x\n", b"file,class_index\nval/a/0.png\n",
            b"file,class_index\nval/a/0.png,99999999999999999999\n", b"file,class_index\nval/a/0.png,-1\n",
            b"file,class_index\nval/a/0.png,\xc2\xb2\n",
            b"file,class_index\n" + b"x" * 300_000 + b",0\n", b'file,class_index\n"val/a/0.png,0\n',
            b"file,class_index\n/dev/zero,0\n", b"file,class_index\n../../../../../etc/passwd,0\n",
            b"file,class_index\nval/a/0.png,0\nval/a/0.png,1\n", b"file,class_index\nval/a\0/0.png,0\n",
            b"file;class_index\nval/a/0.png;0\n", b"path,label\nval/a/0.png,a\n",
            b"file,class_index,name\nval/a/0.png,0,$\\frac{1}$\nval/b/1.png,1,\x1b[2J\n",
            b"\xef\xbb\xbffile,class_index\nval/a/0.png,0\n", b"file,file,class_index\nval/a/0.png,x,0\n",
        ))
    },
    "zip: a class named ..": partial(_zipped, members=(("train/../../x.png", GOOD), ("val/a/x.png", GOOD))),
    "zip: absolute names": partial(_zipped, members=(("/train/a/x.png", GOOD), ("/val/a/x.png", GOOD))),
    "zip: nothing": partial(_zipped, members=()),
    "zip: texts": partial(_zipped, members=(("train/a/x.png", b"no"), ("val/a/x.png", b"no"))),
    "zip: top/images": partial(_zipped, members=tuple((f"top/images/{name}/{i}.png",
    GOOD) for name in "ab" for i in range(3))),
    "zip: the same name twice": partial(_zipped, members=(("train/a/x.png", GOOD), ("val/a/x.png", GOOD))),
    "zip: strange names": partial(_zipped, members=tuple((f"{part}/{name}/0.png", GOOD) for part in ("train",
    "val") for name in ("a\x1b[2J", "$\\frac{1}$", "\u202ex"))),
    "zip: 1 GiB of nothing": _bomb,
    **{f"zip: damaged {how}": partial(_spoilt, how=how) for how in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2,
    zipfile.ZIP_LZMA)},
    "zip: with a password": _locked_zip,
    "tar: no label": partial(_tarred, members=tuple((f"{i}.png", GOOD) for i in range(4))),
    "tar: no picture": partial(_tarred, members=tuple((f"{i}.cls", b"0") for i in range(4))),
    "tar: a large label": partial(_tarred, members=tuple((f"{i}.{key}", c) for i in range(4) for key, c in (("png",
    GOOD), ("cls", b"9" * 5000)))),
    "tar: a wrong label": partial(_tarred, members=tuple((f"{i}.{key}", c) for i in range(4) for key, c in (("png",
    GOOD), ("cls", b"-7")))),
    "tar: a label of words": partial(_tarred, members=tuple((f"{i}.{key}", c) for i in range(4) for key, c in (("png",
    GOOD), ("cls", b"\xff\xfe")))),
    "tar: links": partial(_tarred, members=tuple((f"{i}.{key}", b"") for i in range(4) for key in ("png", "cls")),
    kind=tarfile.SYMTYPE),
    "tar: pipes": partial(_tarred, members=tuple((f"{i}.{key}", b"") for i in range(4) for key in ("png", "cls")),
    kind=tarfile.FIFOTYPE),
    "tar: a pickle": partial(_tarred, members=tuple((f"{i}.{key}", c) for i in range(4) for key, c in (("pyd",
    b"cos\nsystem\n(S'touch canary_ran'\ntR."), ("png", GOOD), ("cls", b"0")))),
    "tar: a cut one": lambda folder: os.truncate(folder / "shards/val-0.tar", 700),
    **{
        f"info: {name} {i}": partial(_info, **{name: value})
        for name in ("splits", "num_classes", "class_names")
        for i, value in enumerate((None, -1, 10**12, "x", [], {}, {"train": 3},
        {"train": {"filenames": ["/dev/zero"]}}, {"train": {"filenames": 3}}, [1, 2],
        {"validation": {"filenames": ["val-0.tar"], "num_samples": -5, "shard_lengths": [-5]}},
        {"validation": {"filenames": ["../../../x"], "num_samples": 10**15, "shard_lengths": [10**15]}}))
    },
}  # fmt: skip
REFUSED = {
    "a link to the parent", "a link to the root", "a class that is the root", "a class that is another",
    "a class that is /proc", "an empty class", "an empty part",
    "nothing", "zip: nothing", "zip: texts", "tar: no label", "tar: no picture", "tar: a large label",
    "tar: a wrong label", "tar: a label of words",
    "tar: links", "tar: pipes", "tar: a cut one",
}  # fmt: skip


def _readers(name: str) -> tuple[str, ...]:
    if name.startswith("zip"):
        return (ZIP,)
    if name.startswith(("tar", "info")):
        return (SHARDS,)
    learn = LEARN if name.startswith(("classes", "one", "same")) else LEARN.replace(" --num-classes 2", "")
    if name.startswith("classes"):
        return FOLDER, learn, "explain digits_resnet data/val --num-classes 2 --img-size 16 --out new.html --json"
    return (FOLDER.replace("--num-classes 2 ", ""),) if name.startswith("index") or name in REFUSED else (FOLDER, learn)
