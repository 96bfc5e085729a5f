import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recast.surgery.plan import Plan

Cli = Callable[..., Any]
Refused = Callable[..., str]
MODEL = ("digits_resnet", "--img-size", "16")


def test_plan_prints_a_table_or_the_plan(cli: Cli) -> None:
    words = ("plan", *MODEL, "--where", "layer3.1.conv1")
    done = cli(*words)
    assert done.code == 0
    assert done.err == ""
    assert "1 of 11 convolutions recast" in done.out
    assert [step.name for step in Plan.from_json(cli(*words, "--json").out).steps] == ["layer3.1.conv1"]


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    # the usage, since a plan takes seconds: it is written in one piece when the command is done, as a plan is
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "recast", "--help"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_verify_says_same_or_not_and_shows_its_control(cli: Cli, refused: Refused) -> None:
    done = cli("verify", *MODEL, "--num-images", "2")
    assert done.code == 0
    assert "2 convolutions recast, 2 images of 16×16" in done.out
    assert "control, attention of one layer added: " in done.out
    assert done.out.endswith("same function\n")
    done = cli("verify", *MODEL, "--num-images", "2", "--gate", "linear")
    assert done.code == 0
    assert "4 convolutions recast" in done.out
    assert "control, two heads of one layer swapped: " in done.out
    done = cli("verify", *MODEL, "--num-images", "2", "--gate", "sigmoid")
    assert done.code == 1
    assert "NOT the same function" in done.out
    on_data = ("verify", "digits_resnet", "--data", "digits", "--num-images", "2")
    assert "2 images of 12×12" in cli(*on_data, "--img-size", "12").out
    assert "square" in refused(*on_data, "--img-size", "12x10")


def test_verify_says_where_only_the_layers_were_compared(cli: Cli, tmp_path: Path, monkeypatch: Any) -> None:
    """As a detector with random weights, which finds no boxes whatever its layers do."""
    (tmp_path / "quiet.py").write_text(
        "from torch import nn\n"
        "class Quiet(nn.Sequential):\n"
        "    def forward(self, x): return super().forward(x)[:0]\n"
        "def net(): return Quiet(nn.Conv2d(3, 4, 3))\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    done = cli("verify", "quiet:net", "--img-size", "9", "--num-images", "2")
    assert done.code == 0
    assert done.out.endswith("same function, by its layers\n")
    assert done.err.startswith("note: the control does not change the outputs")
    done = cli("verify", "quiet:net", "--img-size", "9", "--num-images", "2", "--gate", "sigmoid")
    assert done.code == 1
    assert done.out.endswith("NOT the same function, by its layers\n")


def test_attention_pooling_is_planned_and_verified(cli: Cli) -> None:
    alone = (*MODEL, "--where", "none", "--pool", "per_class")
    shown = cli("plan", *alone)
    assert "0 of 11 convolutions recast, attention pooling" in shown.out
    assert "a token for every class" in shown.out
    assert cli("verify", *alone, "--num-images", "2").code == 0
    done = cli("verify", *alone, "--start", "paper", "--num-images", "2")
    assert done.code == 1
    assert "0 convolutions recast, attention pooling (per class), 2 images" in done.out
    assert "NOT the same function" in done.out
    assert done.err.startswith("note: --start paper")
