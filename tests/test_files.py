"""One writer at a time, and what those leave that were killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from recast.errors import RecastError
from recast.files import check_place, replaced, write_text
from recast.lab.files import LOCK, check_ours, locked, read_lines

HOLDS = """
import sys, time
from recast.lab.files import locked
with locked(sys.argv[1]):
    print(1, flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_and_a_dead_one_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RecastError, match="mine is in use by another process or thread"):
            with locked(folder):
                pass
        (folder / f".classes.json.{other.pid}.tmp").touch()
        (folder / "resume").mkdir()
        (folder / "resume" / f".state-00001-00000009.pt.{other.pid}.tmp").touch()
        (folder / ".notes.tmp").touch()
        (folder / f".report.html.{os.getpid()}.tmp").touch()
        other.send_signal(signal.SIGKILL)
    left = [".notes.tmp", f".report.html.{os.getpid()}.tmp", "resume"]
    with locked(folder):
        assert sorted(path.name for path in folder.rglob("*")) == [LOCK, *left]
    assert sorted(path.name for path in folder.rglob("*")) == left


@pytest.mark.parametrize("make", [os.symlink, lambda _, lock: lock.mkdir()])
def test_what_lies_in_the_place_of_the_lock_is_not_written(tmp_path: Path, make: Any) -> None:
    notes, folder = tmp_path / "notes.txt", tmp_path / "run"
    notes.write_text("mine", encoding="utf-8")
    folder.mkdir()
    make(notes, folder / LOCK)
    with pytest.raises(RecastError, match=f"remove {LOCK}, which is a link or a folder"), locked(folder):
        pass
    assert notes.read_text(encoding="utf-8") == "mine"
    assert os.path.lexists(folder / LOCK)


def test_a_file_of_the_name_of_the_lock_stays(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("mine", encoding="utf-8")
    with locked(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text(encoding="utf-8") == "mine"


def test_a_link_to_nowhere_is_no_new_folder(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    with pytest.raises(RecastError, match="unmounted, which is not there"), locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "unmounted").exists()


def test_a_thread_may_ask_again_another_may_not_and_nothing_stays(tmp_path: Path) -> None:
    folder, refused = tmp_path / "runs" / "mine", []

    def other() -> None:
        try:
            with locked(folder):
                pass
        except RecastError as error:
            refused.append(str(error))

    with locked(folder), locked(folder), locked(folder / "finetuned"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "in use by another process or thread" in refused[0]
    assert list(tmp_path.iterdir()) == []


def test_lines_that_are_no_objects_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n\n{"a": 2}\n{"a": ' + b"[" * 100_000 + b'\n{"a": 3}\n{"a"')
    assert read_lines(path) == ([(1, {"a": 1}), (5, {"a": 2}), (7, {"a": 3})], [2, 3, 6, 8])


def test_only_what_we_wrote_is_replaced(tmp_path: Path) -> None:
    page, notes, photo = tmp_path / "a.html", tmp_path / "b.html", tmp_path / "c.png"
    check_ours(page)
    page.write_text('<!doctype html><meta name="generator" content="recast">', encoding="utf-8")
    check_ours(page)
    notes.write_text("<p>mine</p>", encoding="utf-8")
    photo.write_bytes(b"\x89PNG")
    for path in (notes, photo, Path(os.devnull)):
        with pytest.raises(RecastError, match="was not written by this command and is left as it is"):
            check_ours(path)


def test_a_temporary_name_cannot_be_guessed_and_no_link_is_followed(tmp_path: Path) -> None:
    precious, page = tmp_path / "precious", tmp_path / "page.html"
    precious.write_text("mine", encoding="utf-8")
    page.symlink_to(precious)
    names = set()
    for _ in range(2):
        with replaced(page) as temporary:
            names.add(temporary.name)
            temporary.write_text("ours", encoding="utf-8")
    assert len(names) == 2
    assert (precious.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")) == ("mine", "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "precious"]


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "missing" / "page.html", "text")
    assert error.value.filename == str(tmp_path / "missing" / "page.html")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/below", "folder"])
def test_a_path_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(RecastError, match=r"too long|null|Not a directory|is a folder"):
        write_text(path, "text")
    with pytest.raises(RecastError, match=r"too long|null|Not a directory|folder"):
        check_place(path, "--out", "page.html")
    if name != "folder":
        with pytest.raises(RecastError, match=r"too long|null|Not a directory"), locked(path):
            pass


def test_a_lock_that_cannot_be_taken_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("recast.lab.files.FileLock.acquire", denied)
    with pytest.raises(RecastError) as error, locked(tmp_path):
        pass
    assert str(error.value) == f"cannot lock {tmp_path}: Permission denied; the folder must be writable"
