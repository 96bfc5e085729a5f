"""Hostile cases of every kind, a fixed sample of what `benchmarks/hostile.py` tries, end well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="cases are tried in children of a process, as Linux has them")
def test_hostile_cases_end_well(tmp_path: Path) -> None:
    """In a process of its own: children of one that has trained cannot train."""
    tried = tmp_path / "tried.jsonl"
    words = ["--sample", "--out", str(tried), "--table", str(tmp_path / "table.csv")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "hostile.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    cases = [json.loads(line) for line in tried.read_text("utf-8").splitlines()]
    assert len(cases) >= 45
    assert sum(case["code"] == 2 for case in cases) > len(cases) / 3  # they are hostile
