"""A user's mistake ends in exit code 2 and one line on standard error, or in RecastError; nothing is left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from cli_mistakes import API, Case, cases
from commands import call, inside, prepare

SLOW = bool(os.environ.get("RECAST_SLOW"))


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """The scratch folder in which mistakes are made."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        prepare(folder)
        yield folder


def fault(case: Case, folder: Path) -> str:
    """What is wrong with the answer to a mistaken command line; empty if nothing is."""
    line, files = case
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    before = sorted(folder.rglob("*"))
    with inside(folder):
        code, _, err = call(line)
    faults = []
    if code != 2 or err.count("\n") != 1 or "error: " not in err:
        faults.append(f"exit code {code}, standard error {err[:500]!r}")
    changed = set(folder.rglob("*")) ^ set(before)
    if line.startswith("evaluate"):  # suites that were measured before the refused one stay
        changed = {path for path in changed if folder / "run" not in path.parents}
    if changed:
        faults.append(f"files made or removed: {sorted(map(str, changed))[:5]}")
    for name in (*files, "new.csv", "new"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return "; ".join(faults)


def test_a_mistake_is_one_line_and_exit_code_2(scratch: Path) -> None:
    tried = cases() if SLOW else cases()[::4]
    faults = {f"recast {case[0]} {case[1] or ''}": found for case in tried if (found := fault(case, scratch))}
    assert not faults


def test_the_check_sees_a_command_that_succeeds(scratch: Path) -> None:
    assert "exit code 0" in fault(("plan digits_resnet --img-size 16", {}), scratch)


@pytest.mark.parametrize("snippet", API)
def test_a_mistake_in_python_is_a_recast_error(snippet: str, tmp_path: Path) -> None:
    import safetensors.torch
    from torch import nn

    import recast
    import recast.lab.networks
    from recast.lab.data import Data
    from recast.lab.data.datasets import ImageTensors

    def net(classes: int = 10) -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = timm.create_model("digits_resnet", num_classes=classes).eval()
        return model

    images = ImageTensors(torch.zeros(4, 3, 16, 16).byte(), torch.arange(4))
    data = Data("zeros", images, images, list("abcd"), (0.5,) * 3, (0.5,) * 3, 16)
    namespace: dict[str, Any] = {
        "recast": recast, "torch": torch, "nn": nn, "safetensors": safetensors, "net": net, "data": data,
        "x": torch.zeros(1, 3, 16, 16), "folder": tmp_path,
    }  # fmt: skip
    with pytest.raises(recast.RecastError) as caught:
        exec(snippet, namespace)
    assert "\n" not in str(caught.value)
