from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_a_run_is_checked_against_its_own_parent(cli: Callable[..., Any], shared: Path) -> None:
    done = cli("check", shared / "run", "--json")
    found = {finding["claim"]: finding for finding in json.loads(done.out)["findings"]}
    assert (done.code, done.err) == (0, "")
    assert found["parent"]["holds"] is True
    assert "recorded: bitwise equal; same prediction on 20 of 20 images" in found["same function"]["told"]
    assert found["saved weights"]["holds"] is None  # it was trained
    words = ("--parent", "digits_resnet", "--checkpoint", shared / "weights.safetensors")
    other = cli("check", shared / "run", *words)
    assert other.code == 0


def test_what_is_no_saved_file_is_refused(refused: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    assert "not written by recast.save" in refused("check", shared / "weights.safetensors")
    assert "no such file" in refused("check", tmp_path)
    assert "FILE|RUN is missing" in refused("check")
    assert "no model" in refused("check", shared / "run", "--parent", "resnet5000")
