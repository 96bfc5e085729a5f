"""The command that a message names works as it is typed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from recast.models.trust import follow_up


@pytest.mark.parametrize(
    ("script", "path", "printed"),
    [
        (".venv/bin/recast", "", ".venv/bin/recast train"),
        (".venv/bin/recast", ".venv/bin", "recast train"),
        ("lib/recast/__main__.py", "", ".venv/bin/python -m recast train"),
        ("lib/recast/__main__.py", ".venv/bin", "python -m recast train"),
        ("lib/pytest/__main__.py", "", "recast train"),
        ("", "", "recast train"),
    ],
)
def test_a_command_is_named_as_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, path: str, printed: str
) -> None:
    for name in (".venv/bin/recast", ".venv/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else os.devnull)
    assert follow_up("train") == printed
