"""Whatever goes wrong ends in one line and exit code 2, and what is asked for as JSON is nothing else."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors import SafetensorError

import recast
from recast.lab.cli import main
from recast.lab.cli.guard import guarded_streams
from recast.lab.cli.plan import Network

COMMAND = [sys.executable, "-m", "recast"]
ENV = os.environ | {"PYTHONPATH": str(Path(recast.__file__).parents[1])}


@pytest.mark.parametrize("command", ["report", "plan"])
def test_other_commands_than_train_and_evaluate_take_one_process(
    command: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    done = cli(command, "resnet18")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"torchrun started 2: start {command} without torchrun" in done.err
    monkeypatch.setenv("RANK", "1")
    done = cli(command, "resnet18")
    assert (done.code, done.out, done.err) == (2, "", "")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "f.csv"), "f.csv: No space left on device"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "not enough memory"),
        (ImportError("no such thing"), "ImportError: no such thing"),
        (SafetensorError("header too large"), "SafetensorError: header too large"),
        (ValueError("a\n\x1b[2J" + "x" * 5000), "ValueError: a"),
        (SystemExit("bye"), "(exit code bye)"),
    ],
)
def test_every_error_is_one_line(
    error: BaseException, message: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Network, "open", mock.Mock(side_effect=error))
    done = cli("plan", "resnet18")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("recast plan: error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert len(done.err) < 1100
    assert "\x1b" not in done.err


PRINTS = """
from torch import nn
print("imported")
class Net(nn.Sequential):
    def forward(self, x):
        print("forward")
        return super().forward(x)
def net():
    print("made")
    return Net(nn.Conv2d(3, 4, 3, padding=1))
"""


def test_json_is_nothing_but_json(tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printing.py").write_text(PRINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    done = cli("plan", "printing:net", "--where", "all", "--img-size", "8", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["model"] == "Net", done.err
    assert all(word in done.err for word in ("imported", "made", "forward"))


def test_quiet_leaves_errors_and_verbose_tells_where(cli: Callable[..., Any], shared: Path, tmp_path: Path) -> None:
    words = ["train", shared / "tiny.yaml", "--no-control", "--out"]
    assert "epoch   1/1" in cli(*words, tmp_path / "loud").err
    quiet = cli(*words, tmp_path / "quiet", "--quiet")
    assert (quiet.code, quiet.err) == (0, "")
    wrong = ["plan", tmp_path / "no.safetensors", "--quiet"]
    assert cli(*wrong).err.count("\n") == 1
    traceback = cli(*wrong[:2], "--verbose").err
    assert traceback.startswith("Traceback")
    assert traceback.splitlines()[-1] == cli(*wrong[:2]).err.strip()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("shell", "code", "message"),
    [("> /dev/full", 2, "recast: error: standard output: No space left on device\n"), ("2> /dev/full", 0, "")],
)
def test_streams_that_cannot_be_used(shell: str, code: int, message: str) -> None:
    words = ["/bin/sh", "-c", f'"$0" -m recast --help {shell}', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("shell", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("nosuch", 2)])
def test_streams_that_are_closed(shell: str, words: str, code: int) -> None:
    done = subprocess.run(["/bin/sh", "-c", f'"$0" -m recast {words} {shell}', sys.executable], capture_output=True)
    assert done.returncode == code
    assert b"Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("is_closed", [True, False])
def test_streams_without_a_file(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [io.StringIO() if is_closed else None for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        if stream is not None:
            stream.close()
        monkeypatch.setattr(sys, name, stream)
    assert main(["--version"]) == 0
    assert main(["nosuch"]) == 2


def test_output_that_other_code_closes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with guarded_streams(False) as out:
        sys.stdout.close()
        print("lost")
        assert isinstance(out.failed, ValueError)


@pytest.mark.skipif(os.name == "nt", reason="descriptors are inherited")
def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    script = (
        "from recast.lab.cli.guard import guarded_streams\n"
        "with guarded_streams(False), open('f', 'w') as file:\n"
        "    file.write(str(file.fileno()))"
    )
    words = ["/bin/sh", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, script]
    subprocess.run(words, cwd=tmp_path, env=ENV, check=True)
    assert int((tmp_path / "f").read_text(encoding="utf-8")) > 2
