"""The command that a message names works as it is typed."""

from __future__ import annotations

import os
import sys

import pytest

from recast.models.trust import follow_up


def test_a_command_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    for script, printed in ((".venv/bin/recast", ".venv/bin/recast train"), ("lib/pytest/__main__.py", "recast train")):
        monkeypatch.setattr(sys, "argv", [script])
        assert follow_up("train") == printed
