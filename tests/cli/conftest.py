"""A tiny run and its parts, made once; `cli` calls the command in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import timm
import torch
from commands import TINY
from safetensors.torch import save_file

import recast.papers.networks  # noqa: F401  registers digits_resnet with timm
from recast.lab.cli import main


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`cli("plan", "resnet18")` → exit code, standard output, standard error."""

    def call(*words: str | Path) -> Done:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return call


@pytest.fixture
def refused(cli: Callable[..., Done]) -> Callable[..., str]:
    """Call a command that must fail as a user's mistake does, and give its one line."""

    def call(*words: str | Path) -> str:
        done = cli(*words)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith("recast")
        assert "error: " in done.err
        return done.err

    return call


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights.safetensors, a recipe of seconds in tiny.yaml, and the run of that recipe in run/."""
    folder = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    save_file(timm.create_model("digits_resnet", num_classes=10).state_dict(), folder / "weights.safetensors")
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    assert main(["train", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "--json"]) == 0
    return folder
