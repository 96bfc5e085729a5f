import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recast.errors import RecastError
from recast.files import check_place, replaced, write_text
from recast.lab.folder.files import LOCK, check_ours, locked, read_lines
from recast.lab.folder.records import Difference, Row, Wakefulness, write_records
from recast.lab.folder.tables import read_records

HOLDS = """
import sys, time
from recast.lab.folder.files import locked
with locked(sys.argv[1]):
    print(1, flush=True)
    time.sleep(60)
"""


def test_a_folder_has_one_writer_and_a_dead_one_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(RecastError, match="mine is in use by another process or thread"):
            with locked(folder):
                pass
        (folder / f".classes.json.{writer.pid}.tmp").touch()
        (folder / "resume").mkdir()
        (folder / "resume" / f".state-00001-00000009.pt.{writer.pid}.tmp").touch()
        (folder / ".notes.tmp").touch()
        (folder / f".report.html.{os.getpid()}.tmp").touch()
        writer.kill()
    names = [".notes.tmp", f".report.html.{os.getpid()}.tmp", "resume"]
    with locked(folder):
        assert sorted(path.name for path in folder.rglob("*")) == [LOCK, *names]
    assert sorted(path.name for path in folder.rglob("*")) == names


def test_what_lies_in_the_place_of_the_lock_is_not_written(tmp_path: Path) -> None:
    for name in ("link", "folder", "file"):
        (tmp_path / name).mkdir()
    (tmp_path / "file" / LOCK).write_text("mine", encoding="utf-8")
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "file" / LOCK)
    (tmp_path / "folder" / LOCK).mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "unmounted")
    for name, message in (("link", f"remove {LOCK}"), ("folder", f"remove {LOCK}"), ("nowhere", "unmounted, which is")):
        with pytest.raises(RecastError, match=message), locked(tmp_path / name):
            pass
    with locked(tmp_path / "file"):
        pass
    assert (tmp_path / "link" / LOCK).read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "folder" / LOCK).is_dir()
    assert not (tmp_path / "unmounted").exists()


def test_a_thread_may_ask_again_another_may_not_and_nothing_stays(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"

    def enter() -> None:
        with locked(folder):
            pass

    with locked(folder), locked(folder), locked(folder / "finetuned"), ThreadPoolExecutor(1) as threads:
        with pytest.raises(RecastError, match="in use by another process or thread"):
            threads.submit(enter).result()
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
    with pytest.raises(FileNotFoundError) as error:
        write_text(tmp_path / "missing" / "page.html", "text")
    assert error.value.filename == str(tmp_path / "missing" / "page.html")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/below", "folder"])
def test_a_path_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    reason = r"too long|null|Not a directory|folder"
    with pytest.raises(RecastError, match=reason):
        write_text(path, "text")
    with pytest.raises(RecastError, match=reason):
        check_place(path, "--out", "page.html")
    if name != "folder":
        with pytest.raises(RecastError, match=reason), locked(path):
            pass


def test_a_lock_that_cannot_be_taken_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("recast.lab.folder.files.FileLock.acquire", denied)
    with pytest.raises(RecastError) as error, locked(tmp_path):
        pass
    assert str(error.value) == f"cannot lock {tmp_path}: Permission denied; the folder must be writable"


# tables


HEAD = "run,model,suite,dataset,metric,value,n,low,high\n"
ROW = Row("runs/a, b", "recast", "clean", "digits", "top1", 100 / 3, 500)
MORE = [
    replace(ROW, metric="loss", value=0.1),
    replace(ROW, model="pärent", value=float("inf"), n=7, low=-0.5, high=1e-300),
]


def test_round_trip_is_exact(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.csv", Row, [ROW, *MORE])
    assert read_records(tmp_path / "rows.csv", Row) == [ROW, *MORE]
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").startswith(HEAD)


def test_differences(tmp_path: Path) -> None:
    path = tmp_path / "differences.csv"
    line = Difference("r", "recast", "parent", "clean", "digits", "top1", 1 / 3, -0.1, 0.7, 50)
    write_records(path, Difference, [line, replace(line, against="finetuned")])
    write_records(path, Difference, [replace(line, suite="pgd")])
    assert read_records(path, Difference) == [line, replace(line, against="finetuned"), replace(line, suite="pgd")]
    path.write_text(path.read_text(encoding="utf-8").replace("0.7", "", 1), encoding="utf-8")
    with pytest.raises(RecastError, match=r"line 2: (value|low|high) must be a number"):
        read_records(path, Difference)


def test_what_stands_of_a_suite_was_measured_together_and_is_of_one_run(tmp_path: Path) -> None:
    """Else a curve could join points of 300 and of 40 images, or a renamed folder have every line twice."""
    pgd = replace(ROW, suite="pgd", metric="top1@1")
    write_records(tmp_path / "rows.csv", Row, [ROW, *MORE, pgd])
    new = replace(ROW, run="renamed", value=1.0, n=3)
    write_records(tmp_path / "rows.csv", Row, [new])
    assert read_records(tmp_path / "rows.csv", Row) == [replace(pgd, run="renamed"), new]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    write_records(tmp_path / "rows.csv", Row, [])
    assert len(read_records(tmp_path / "rows.csv", Row)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must start with the columns run,model"),
        ("a,b\n1,2\n", "must start with the columns .* got 'a,b'"),
        (HEAD + "r,m,s,d\n", "line 2: expected 9 cells"),
        (HEAD + "r,m,s,d,t,high,3,,\n", "line 2: (value|low|high) must be a number"),
        (HEAD + "r,m,s,d,t,1.5,3.5,,\n", "line 2: n must be a whole number, got '3.5'"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    for use in (lambda: read_records(path, Row), lambda: write_records(path, Row, [ROW])):
        with pytest.raises(RecastError, match=message):
            use()
    assert path.read_text(encoding="utf-8") == text


def test_failed_write_keeps_the_old_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    write_records(tmp_path / "rows.csv", Row, [ROW])
    monkeypatch.setattr("recast.files.os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_records(tmp_path / "rows.csv", Row, MORE)
    assert read_records(tmp_path / "rows.csv", Row) == [ROW]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_an_error_of_a_full_disk_names_the_file_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("before", encoding="utf-8")
    with pytest.raises(OSError, match="No space left") as raised, replaced(path):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(path)
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("rows.csv", "before")]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EROFS])
def test_files_are_replaced_where_modes_cannot_be_set(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError(number, "not here", str(path))

    monkeypatch.setattr(Path, "chmod", refuse)
    for text in ("first", "second"):
        write_text(tmp_path / "a", text)
    assert [(file.name, file.read_text(encoding="utf-8")) for file in tmp_path.iterdir()] == [("a", "second")]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch(mode)
    path.chmod(mode)
    (tmp_path / "link").symlink_to(path)
    for target in (path, tmp_path / "link"):
        with replaced(target) as temporary:
            temporary.write_text("secret", encoding="utf-8")
            assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        assert stat.S_IMODE(target.stat().st_mode) == mode
    new = tmp_path / "new"
    before = os.umask(0o027)
    try:
        write_text(new, "")
    finally:
        os.umask(before)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_remedy_is_none_that_the_run_has_already() -> None:
    uniform = Wakefulness(heads=9, awake=0, entropy=1.0)
    assert "--query-key images" in uniform.remedy("zero")
    assert uniform.remedy("images") == "raise --qk-lr"
    assert Wakefulness(9, 9, 1.0).remedy("zero") == ""
