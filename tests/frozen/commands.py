"""Commands in this process, in a scratch folder; the platform that frozen numbers were made on."""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import timm
import torch

TINY = (
    "model: {name: digits_resnet, checkpoint: weights.safetensors}\n"
    "data: {img_size: 16, num_train: 40, num_val: 20, batch_size: 20}\n"
    "optim: {lr: 1e-4}\nepochs: 1\namp: off\ndevice: cpu\n"
)


def platform() -> dict[str, str]:
    """What decides the last digits of a float32 sum: MKL and oneDNN cut products by the processor's caches."""
    cpus = Path("/proc/cpuinfo")
    text = cpus.read_text() if cpus.exists() else ""
    words = re.findall(r"^(?:vendor_id|cpu family|model|cache size)\s*: (.*)$", text, re.M)
    processor = ", ".join(dict.fromkeys(words))
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "processor": processor}


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, with the width of help fixed, no colour and no folder of data."""
    before = Path.cwd()
    plain = {name: value for name, value in os.environ.items() if name not in ("RECAST_DATA", "FORCE_COLOR", "RANK")}
    with mock.patch.dict(os.environ, plain | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}, clear=True):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def call(words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `recast WORDS`, in this process."""
    from recast.lab.cli import main

    out, err = io.StringIO(), io.StringIO()
    torch.manual_seed(0)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(shlex.split(words))
        except SystemExit as done:
            code = int(done.code or 0)
        except Exception as error:  # a mistake that is not caught: said as what it is
            code = 1
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code, out.getvalue(), err.getvalue()


def prepare(folder: Path) -> None:
    """Lay out the scratch folder of `test_mistakes.py`."""
    from PIL import Image
    from safetensors.torch import save_file

    torch.manual_seed(0)
    save_file(timm.create_model("digits_resnet", num_classes=10).state_dict(), folder / "weights.safetensors")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    (folder / "notes.txt").write_text("mine\n", encoding="utf-8")
    (folder / "empty").mkdir()
    (folder / "images").mkdir()
    Image.new("RGB", (16, 16), (40, 90, 90)).save(folder / "images" / "a.png")
    with inside(folder):
        assert call("train tiny.yaml --epochs 0 --out run")[0] == 0
