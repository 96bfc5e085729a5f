"""`recast plan` and `recast verify`."""

import json
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


def test_plan_prints_a_table_and_writes_the_plan(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = cli("plan", *MODEL, "--where", "layer3.1.conv1", "--out", out)
    assert done.code == 0
    assert done.err == ""
    assert "1 of 11 convolutions recast" in done.out
    written = Plan.from_json(out.read_text(encoding="utf-8"))
    assert [step.name for step in written.steps] == ["layer3.1.conv1"]
    # a plan replaces an older one
    shown = cli("plan", *MODEL, "--json", "--out", out)
    assert json.loads(shown.out) == json.loads(out.read_text(encoding="utf-8"))
    assert len(json.loads(shown.out)["steps"]) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_plan_leaves_a_file_that_is_no_plan_alone(refused: Refused, tmp_path: Path) -> None:
    for name, content in (("notes.txt", b"mine"), ("weights.pth", b"\x80\x02\xff")):
        (tmp_path / name).write_bytes(content)
        assert "exists and is not a plan" in refused("plan", *MODEL, "--out", tmp_path / name)
        assert (tmp_path / name).read_bytes() == content


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    # the usage, since a plan takes seconds: it is written in one piece when the command is done, as a plan is
    code = "import sys; from recast.lab.cli import main; sys.exit(main(['--help']))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_verify_says_same_or_not_and_shows_its_control(cli: Cli, refused: Refused) -> None:
    done = cli("verify", *MODEL, "--num-images", "2")
    assert done.code == 0
    assert "4 convolutions recast, 2 images of 16×16" in done.out
    assert done.out.endswith("same function\n")
    assert "control" in done.out
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
    assert done.err.startswith("note: the outputs do not show even the control")
    done = cli("verify", "quiet:net", "--img-size", "9", "--num-images", "2", "--gate", "sigmoid")
    assert done.code == 1
    assert done.out.endswith("NOT the same function, by its layers\n")


def test_an_edited_plan_is_shown_and_verified(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    cli("plan", *MODEL, "--where", "all", "--budget", "macs=1.9x", "--out", path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert 1 < len(document["steps"]) < 9
    document["steps"] = [{"name": "layer2.0.conv1"}, document["steps"][-1]]
    document["config"]["head_dim"] = 2
    path.write_text(json.dumps(document), encoding="utf-8")
    shown = json.loads(cli("plan", *MODEL, "--plan", path, "--json").out)
    assert [step["name"] for step in shown["steps"]] == ["layer2.0.conv1", document["steps"][-1]["name"]]
    assert shown["config"]["head_dim"] == 2
    done = cli("verify", *MODEL, "--plan", path, "--num-images", "1")
    assert done.code == 0
    assert "2 convolutions recast, 1 images" in done.out


def test_attention_pooling_is_planned_and_verified(cli: Cli, refused: Refused, tmp_path: Path) -> None:
    path, alone = tmp_path / "plan.json", (*MODEL, "--where", "none", "--pool", "per_class")
    shown = cli("plan", *alone, "--out", path)
    assert "0 of 11 convolutions recast, attention pooling" in shown.out
    assert "a token for every class" in shown.out
    assert cli("verify", *MODEL, "--plan", path, "--num-images", "2").code == 0
    assert "--plan names the layers" in refused("plan", *MODEL, "--plan", path, "--pool", "single")
    done = cli("verify", *alone, "--start", "paper", "--num-images", "2")
    assert done.code == 1
    assert "0 convolutions recast, attention pooling (per class), 2 images" in done.out
    assert "NOT the same function" in done.out
    assert done.err.startswith("note: --start paper")
