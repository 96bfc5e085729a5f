from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recast.lab.cli import COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_once_with_dashes_and_an_example(
    command: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    done = cli(command, "--help")
    assert done.code == 0
    assert done.err == ""
    assert done.out.startswith(f"usage: recast {command} ")
    listed = re.findall(r"^  (--\S+)", done.out, flags=re.MULTILINE)
    assert "--json" in listed
    assert len(listed) == len(set(listed))
    assert not [name for name in listed if "_" in name or "+" in name]
    for noise in ("{true,false}", "CONFIG", "==SUPPRESS==", "ITEM", "None"):
        assert noise not in done.out
    assert re.search(rf"examples:\n  recast {command}\b", done.out)
    body = done.out[done.out.index("options:") : done.out.index("examples:")]
    assert max(map(len, body.splitlines())) <= 100  # a group's title is not broken
    assert cli("help", command).out == done.out


def test_the_usage_names_every_command(cli: Callable[..., Any]) -> None:
    for words in ([], ["--help"], ["help"]):
        done = cli(*words)
        assert done.code == 0
        assert all(f"  {name} " in done.out for name in COMMANDS)
    assert re.fullmatch(r"recast \d+\.\d+\S*\n", cli("--version").out)


def test_help_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys; from recast.lab.cli import main\n"
        f"for name in {list(COMMANDS)}: main([name, '--help'])\n"
        "print([m for m in ('torch', 'timm', 'numpy') if m in sys.modules])"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout.splitlines()[-1] == "[]"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5, "every help and Python's start"


COMPLETED = {
    "e": "evaluate explain export",
    "train attention_pool_": "attention_pool_quick",
    "train finetune --gate-": "--gate-l1 --gate-lr --gate-range",
    "plan resnet18 --query-key ": "zero random similar images",
    "train finetune --data-dir sr": "",
}


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
@pytest.mark.parametrize("line", COMPLETED)
def test_tab_completes(line: str, tmp_path: Path) -> None:
    """In a shell, with what the command prints for it."""
    command = tmp_path / "recast"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m recast "$@"\n')
    command.chmod(0o755)
    *words, begun = line.split(" ")
    ask = f"COMP_WORDS=(recast {' '.join(words)} {begun!r}); COMP_CWORD={len(words) + 1}; _recast"
    script = f'eval "$(recast --completion)"; {ask}; echo ${{COMPREPLY[*]}}'
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.stdout.strip() == COMPLETED[line]


def test_the_command_takes_a_number(
    cli: Callable[..., object], refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int | None] = []
    monkeypatch.setattr("recast.lab.cli.options.use_threads", numbers.append)
    cli("plan", "digits_resnet", "--num-classes", "10", "--img-size", "16", "--threads", "3")
    cli("report", "nowhere")
    assert numbers == [3]
    for number in ("0", "2000000", "x"):
        assert "--threads" in refused("plan", "digits_resnet", "--threads", number)
