"""The walk: a row per architecture, resumed, and what becomes of a process that dies."""

import multiprocessing
import threading
import time
from pathlib import Path

import pytest
from zoo import walk as walking
from zoo.architectures import architectures
from zoo.rows import ZooRow, read_zoo, summary, write_zoo
from zoo.walk import Job, next_name, walk

from recast.errors import RecastError

NAMES = ["torchvision:swin_t", "timm:efficientvit_m0", "torchvision:r3d_18"]


def test_rows_are_appended_and_not_computed_again(tmp_path: Path) -> None:
    out = tmp_path / "zoo.csv"
    walked: list[str] = []
    write_zoo(out, [ZooRow(NAMES[0], "no spatial convolution")])
    rows = walk(NAMES, out, workers=2, done=lambda row: walked.append(row.model))
    assert sorted(walked) == sorted(NAMES[1:])  # the first was not run again
    assert [row.model for row in rows] == NAMES
    assert [row.status for row in rows] == ["no spatial convolution", "exact", "no two-dimensional convolution"]
    assert {row.model for row in read_zoo(out)} == set(NAMES)
    assert rows[1].last_split_bitwise is True
    assert 0 < rows[1].last_dense_error < 1e-5
    assert rows[1].peak_gib > 0
    write_zoo(out, reversed(read_zoo(out)))
    assert [row.model for row in read_zoo(out)] == sorted(NAMES)


def test_a_row_survives_the_file(tmp_path: Path) -> None:
    row = ZooRow("timm:x", "exact", 'a "cause", with commas', "96×128", 5, 3, 2, "1× left; 2× other", True, 0.0, 1.5e-7)
    row.control, row.open_layers, row.seconds, row.peak_gib = 0.25, 2, 12.5, 0.0
    write_zoo(tmp_path / "zoo.csv", [row])
    assert read_zoo(tmp_path / "zoo.csv") == [row]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(RecastError, match="no table of a walk"):
        read_zoo(tmp_path / "other.csv")


@pytest.mark.parametrize(("timeout", "cause"), [(0.2, "took longer than"), (3600.0, "was killed")])
def test_a_process_that_hangs_or_dies_leaves_a_row(tmp_path: Path, timeout: float, cause: str) -> None:
    others = set(multiprocessing.active_children())

    def kill() -> None:
        while not (started := set(multiprocessing.active_children()) - others):
            time.sleep(0.01)
        started.pop().kill()

    if timeout > 1:
        threading.Thread(target=kill).start()
    (row,) = walk(["timm:dm_nfnet_f0"], tmp_path / "zoo.csv", timeout=timeout)
    assert row.status == "failed"
    assert cause in row.cause
    assert read_zoo(tmp_path / "zoo.csv") == [row]


def test_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest waits until it is alone; smaller ones go before it."""
    needs = {"a": 6, "big": 30, "b": 3}
    monkeypatch.setattr(walking, "needed", needs.__getitem__)
    running = [Job("a", 6, 0.0)]
    assert next_name(["big", "b"], running, workers=3, memory=10) == "b"
    assert next_name(["big"], running, workers=3, memory=10) is None
    assert next_name(["big"], [], workers=3, memory=10) == "big"


def test_globs_of_names() -> None:
    assert architectures(["torchvision:resnet1*", "timm:resnet18"]) == [
        "timm:resnet18",
        "torchvision:resnet101",
        "torchvision:resnet152",
        "torchvision:resnet18",
    ]
    assert "timm:cifar_resnet20" not in architectures(["timm:*"])  # ours, not timm's
    with pytest.raises(RecastError, match="no architecture matches 'resnet18'"):
        architectures(["resnet18"])


def test_the_summary_names_what_falls_short() -> None:
    exact = ZooRow("timm:a", "exact", last_split_bitwise=True, all_split_bitwise=True, last_dense_error=2e-7)
    exact.control, exact.all_recast = 0.3, 5
    rows = [exact, ZooRow("timm:b", "vacuous", "moves nothing"), ZooRow("timm:c", "no spatial convolution")]
    text = summary([*rows, ZooRow("torchvision:d", "failed", "an error")])
    for part in ("timm: 1 of 2 arch", "1 of 3 have none", "timm:b: vacuous, moves nothing", "torchvision: 0 of 1"):
        assert part in text
