"""The folder that hostile cases are tried in: one of everything that a command reads, made once and copied for each."""

from __future__ import annotations

import gc
import hashlib
import importlib
import io
import json
import os
import pkgutil
import shutil
import stat
import tarfile
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import recast
import recast.lab.networks
from recast.files import read_lines, sealed
from recast.lab.cli import main
from recast.lab.training.checkpoint import states
from recast.layers.gpsa import gpsa_layers

TINY = (
    "model: {name: digits_resnet}\n"
    "data: {img_size: 16, num_train: 40, num_val: 20, batch_size: 20}\n"
    "optim: {lr: 1e-3}\nepochs: 2\namp: off\ndevice: cpu\n"
)
LARGE = 100_000
"""Bytes."""
_DIGESTS: dict[tuple[int, int, int], str] = {}
RAN = "HOSTILE_RAN"
"""The variable that names a file: who runs `canary.py` writes it."""
CANARY = f"""
import os
open(os.environ[{RAN!r}], "a").write("ran")
from timm import create_model
def net(**kwargs):
    import recast.lab.networks
    return create_model("digits_resnet", num_classes=10)
"""


def import_all() -> None:
    """Whatever a command imports when it is called: once here, and not in every child."""
    for found in pkgutil.walk_packages(recast.__path__, "recast."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in (
        "sklearn.datasets.data", "sklearn.datasets.descr", "matplotlib.style", "matplotlib.backends.backend_agg",
        "matplotlib.backends.backend_svg", "webdataset", "torchvision.models", "torch._dynamo", "rich._emoji_codes",
        "torch.utils.serialization", "encodings.utf_8_sig", "encodings.cp437",
    ):  # fmt: skip
        importlib.import_module(name)
    Image.init()
    gc.freeze()  # children share what lies still


def make_world(folder: Path) -> Path:
    """Fill `folder`: weights, a recipe, a finished run, one that was cut short, a saved model, a plan, images, data."""
    assert recast.lab.networks
    torch.manual_seed(0)
    network = timm.create_model("digits_resnet", num_classes=10).eval()
    save_file(network.state_dict(), folder / "weights.safetensors")
    torch.save(network.state_dict(), folder / "weights.pth")
    planned = recast.plan(network, torch.randn(1, 3, 16, 16))
    (folder / "plan.json").write_text(planned.to_json(), encoding="utf-8")
    child = recast.recast_(network, planned)
    with torch.no_grad():
        for layer in gpsa_layers(child).values():
            layer.gamma.fill_(0.1)
    recast.save(child, folder / "child.safetensors", {"name": "digits_resnet", "kwargs": {"num_classes": 10}})
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (folder / "notes.txt").write_text("mine\n", encoding="utf-8")
    (folder / "canary.py").write_text(CANARY, encoding="utf-8")
    (folder / "empty").mkdir()
    _images(folder)
    _dense(folder)
    _runs(folder)
    return folder


def _images(folder: Path) -> None:
    """A picture or two, and data sets of 2 classes as folder, zip, list and shards."""
    draws = np.random.default_rng(0)

    def picture(side: int = 16) -> bytes:
        file = io.BytesIO()
        Image.fromarray(draws.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(file, "PNG")
        return file.getvalue()

    (folder / "images").mkdir()
    (folder / "shards").mkdir()
    for name in ("a.png", "b.png"):
        (folder / "images" / name).write_bytes(picture())
    lines = ["path,label,split"]
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        for part in ("train", "val"):
            with tarfile.open(folder / "shards" / f"{part}-0.tar", "w") as shard:
                for number in range(4):
                    name, content = f"{'ab'[number % 2]}/{number}.png", picture()
                    place = folder / "data" / part / name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(content)
                    archive.writestr(f"{part}/{name}", content)
                    lines.append(f"{part}/{name},{'ab'[number % 2]},{part}")
                    for suffix, inner in (("png", content), ("cls", str(number % 2).encode())):
                        member = tarfile.TarInfo(f"{number}.{suffix}")
                        member.size = len(inner)
                        shard.addfile(member, io.BytesIO(inner))
    info = {
        "splits": {
            part: {"name": part, "filenames": [f"{part}-0.tar"], "shard_lengths": [4], "num_samples": 4}
            for part in ("train", "validation")
        }
    }
    info["splits"]["validation"]["filenames"] = ["val-0.tar"]
    (folder / "shards" / "_info.json").write_text(json.dumps(info | {"num_classes": 2}))
    (folder / "index.csv").write_text("\n".join(lines) + "\n")


def _dense(folder: Path) -> None:
    """Images with COCO's JSON in `boxes`, with masks in `pairs`."""
    draws, images, objects = np.random.default_rng(1), [], []
    for number in range(3):
        for place in ("boxes", *(f"pairs/{part}/images" for part in ("train", "val"))):
            (folder / place).mkdir(parents=True, exist_ok=True)
            picture = draws.integers(0, 256, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(picture).save(folder / place / f"{number}.png")
        for part in ("train", "val"):
            (folder / f"pairs/{part}/masks").mkdir(exist_ok=True)
            Image.fromarray(picture[..., 0] % 3).save(folder / f"pairs/{part}/masks/{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 32, "height": 24})
        box = {"bbox": [2, 3, 10, 12], "area": 120, "segmentation": {"size": [24, 32], "counts": [51, 120, 597]}}
        objects.append({"id": number, "image_id": number, "category_id": 1 + 2 * (number % 2), "iscrowd": 0} | box)
    kinds = [{"id": 1, "name": "a"}, {"id": 3, "name": "b"}]
    for part in ("train", "val"):
        found = {"images": images, "annotations": objects, "categories": kinds}
        (folder / "boxes" / f"{part}.json").write_text(json.dumps(found), encoding="utf-8")


def _runs(folder: Path) -> None:
    for words in (
        "train tiny.yaml --out run --epochs 1 --keep 1 --keep-every 1",
        "evaluate run --suite clean,heads --num-images 10 --device cpu",
        "report run",
        "train tiny.yaml --out half --keep 9 --no-control",
    ):
        call(folder, words)
    shutil.rmtree(folder / "run" / "resume")
    shutil.rmtree(folder / "run" / "finetuned" / "resume")
    shutil.copy(folder / "canary.py", folder / "run")
    # as if it had been killed in its second epoch
    half = folder / "half"
    (half / "weights.safetensors").unlink()
    for state in states(half):
        if not state.name.startswith("state-00002"):
            state.unlink()
    rows, _ = read_lines(half / "metrics.jsonl")
    (half / "metrics.jsonl").write_text("".join(sealed(row) for _, row in rows if row["epoch"] < 2))


def call(folder: Path, words: str) -> str:
    """What a command that must not fail prints."""
    before, out, err = Path.cwd(), io.StringIO(), io.StringIO()
    os.chdir(folder)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(words.split())
    finally:
        os.chdir(before)
    assert code == 0, err.getvalue()
    return out.getvalue()


def copied(world: Path, folder: Path) -> None:
    """A copy of the world. Large files, of which nothing writes a part, are the same ones under another name."""

    def copy(source: str, target: str) -> None:
        if os.path.getsize(source) > LARGE:
            os.link(source, target)
        else:
            shutil.copyfile(source, target)

    shutil.copytree(world, folder, copy_function=copy)


def _digest(path: str, known: os.stat_result) -> str:
    key = known.st_ino, known.st_size, known.st_mtime_ns
    if known.st_size <= LARGE or key not in _DIGESTS:
        with open(path, "rb") as file:
            _DIGESTS[key] = hashlib.file_digest(file, "sha1").hexdigest()
    return _DIGESTS[key]


def snapshot(folder: Path) -> dict[str, str]:
    """What every path below `folder` is: files by a digest of what they hold."""
    found = {}
    for root, names, files in os.walk(folder):
        for name in (*names, *files):
            path = os.path.join(root, name)
            kind = os.lstat(path).st_mode
            if stat.S_ISLNK(kind):
                what = f"a link to {os.readlink(path)}"
            elif stat.S_ISREG(kind) and os.path.getsize(path) < 2**30:
                what = _digest(path, os.lstat(path))
            else:
                what = f"{stat.S_IFMT(kind)} {os.path.getsize(path) if stat.S_ISREG(kind) else 0}"
            found[os.path.relpath(path, folder)] = what
    return found
