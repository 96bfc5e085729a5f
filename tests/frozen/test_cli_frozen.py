"""The command line says what it said when its outputs were frozen: see `write_cli.py`, which writes them anew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import write_cli
from cli_mistakes import API

SLOW = bool(os.environ.get("RECAST_SLOW"))
slow = pytest.mark.skipif(not SLOW, reason="minutes: set RECAST_SLOW=1")


def check(found: str, path: Path, tolerance: float = 0.0) -> None:
    """Fail with the first line that differs from a frozen file."""
    if told := write_cli.difference(found, path.read_text(encoding="utf-8"), tolerance):
        pytest.fail(f"{path.relative_to(write_cli.FOLDER)} differs in {told}", pytrace=False)


def tolerance(folder: Path) -> float:
    """None on the platform that the files were made on, 1e-3 elsewhere."""
    return 0.0 if json.loads((folder / "platform.json").read_text()) == write_cli.platform() else 1e-3


@pytest.mark.parametrize("name", write_cli.HELPS)
def test_help(name: str) -> None:
    check(write_cli.shown_help(name), write_cli.HELP / f"{name}.txt")


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """The scratch folder that mistakes are made in."""
    with write_cli.prepared() as folder:
        yield folder


@pytest.mark.timeout(600)
def test_mistakes(scratch: Path) -> None:
    wrong = []
    for at, frozen in enumerate(json.loads(write_cli.ERRORS.read_text(encoding="utf-8"))):
        if not SLOW and (frozen.get("slow") or at % 4):
            continue
        found = write_cli.mistake((frozen["argv"], frozen.get("files", {})), scratch)
        if (found["code"], found["stderr"]) != (frozen["code"], frozen["stderr"]):
            wrong.append(f"recast {frozen['argv']} {frozen.get('files', '')}\n  frozen: {frozen['code']} "
                         f"{frozen['stderr']}  now:    {found['code']} {found['stderr']}")  # fmt: skip
    if wrong:
        pytest.fail(f"{len(wrong)} mistakes are answered otherwise, the first:\n{wrong[0]}", pytrace=False)


@pytest.mark.parametrize("name", json.loads(write_cli.API_ERRORS.read_text(encoding="utf-8")))
def test_mistakes_in_python(name: str, tmp_path: Path) -> None:
    frozen = json.loads(write_cli.API_ERRORS.read_text(encoding="utf-8"))[name]
    assert write_cli.api_mistake(API[name], tmp_path.resolve()) == frozen


@pytest.mark.parametrize("name", write_cli.REPORTS)
def test_report(name: str) -> None:
    for file, text in write_cli.report_texts(name, write_cli.RUN).items():
        check(text, write_cli.RUN / file)


@pytest.mark.parametrize("name", write_cli.RUNS)
def test_the_run_made_again(name: str, tmp_path: Path) -> None:
    near = 10.0 if tolerance(write_cli.RUN) else 0.0  # elsewhere a training of a few steps ends elsewhere
    check(write_cli.make_run(name, tmp_path.resolve()), write_cli.RUN / f"{name}.said.txt", near)
    frozen, made = write_cli.RUN / name, tmp_path / name
    files = {path.relative_to(frozen) for path in frozen.rglob("*") if path.is_file()}
    assert {path.relative_to(made) for path in made.rglob("*") if path.is_file()} == files
    for file in sorted(files):
        if file.suffix != ".npz":
            check((made / file).read_text(encoding="utf-8"), frozen / file, near)


@slow
@pytest.mark.timeout(900)
def test_quickstart(tmp_path: Path) -> None:
    near = tolerance(write_cli.QUICKSTART)
    found = write_cli.quickstart_texts(tmp_path.resolve())
    assert {*found, "platform.json"} == {path.name for path in write_cli.QUICKSTART.iterdir()}
    for name, text in found.items():
        check(text, write_cli.QUICKSTART / name, near)
