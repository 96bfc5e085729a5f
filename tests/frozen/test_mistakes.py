"""A user's mistake ends in exit code 2 and one line on standard error; nothing is left behind."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_mistakes import Case, cases
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
