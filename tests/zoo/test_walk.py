"""The walk: a row per architecture, resumed, and what becomes of a process that dies."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from recast.errors import RecastError
from recast.zoo import walk as walking
from recast.zoo.examine import ZooRow
from recast.zoo.subjects import architectures
from recast.zoo.summary import summary
from recast.zoo.walk import _finished, _Job, _start_some, read_zoo, walk, write_zoo

NAMES = ["torchvision:swin_t", "timm:efficientvit_m0", "torchvision:r3d_18"]


def test_rows_are_appended_and_not_computed_again(tmp_path: Path) -> None:
    out = tmp_path / "zoo.csv"
    seen: list[str] = []
    first = walk(NAMES[:1], out, done=lambda row: seen.append(row.model))
    rows = walk(NAMES, out, workers=2, done=lambda row: seen.append(row.model))
    assert sorted(seen) == sorted(NAMES)  # the first was not run again
    assert [row.model for row in rows] == NAMES
    assert [row.status for row in rows] == ["no spatial convolution", "exact", "no two-dimensional convolution"]
    assert first[0].status == rows[0].status
    assert {row.model for row in read_zoo(out)} == set(NAMES)
    found = rows[1]
    assert found.last_split_bitwise is True
    assert 0 < found.last_dense_error < 1e-5  # type: ignore[operator]
    assert found.peak_gib > 0
    assert found.seconds > 0
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


@pytest.mark.parametrize(("target", "cause"), [(os._exit, "ended with code 3"), (time.sleep, "took longer than")])
def test_a_process_that_dies_or_hangs_leaves_a_row(target: Any, cause: str) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(3 if target is os._exit else 60,))
    started = time.monotonic() - (0 if target is os._exit else 100)
    process.start()
    if target is os._exit:
        sender.close()  # as `walk` does: the child holds the other end, and here it is dead
    row = None
    while row is None:
        row = _finished(_Job("timm:x", process, receiver, started, 0), timeout=90)  # type: ignore[arg-type]
    assert row.status == "failed"
    assert cause in row.cause
    assert not process.is_alive()


def test_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest waits until it is alone; smaller ones go before it."""

    class Process:
        def start(self) -> None: ...

    class Context:
        def Pipe(self, duplex: bool) -> Any:
            return multiprocessing.Pipe(duplex)

        def Process(self, **_: Any) -> Process:
            return Process()

    monkeypatch.setattr(walking, "_needed", {"a": 6, "big": 30, "b": 3}.__getitem__)
    waiting, running = ["a", "big", "b"], []
    _start_some(waiting, running, {}, Context(), workers=3, memory=10)
    assert [job.name for job in running] == ["a", "b"]
    running.clear()
    _start_some(waiting, running, {}, Context(), workers=3, memory=10)
    assert [job.name for job in running] == ["big"]


def test_globs_of_names() -> None:
    assert architectures(["torchvision:resnet1*", "timm:resnet18"]) == [
        "timm:resnet18", "torchvision:resnet101", "torchvision:resnet152", "torchvision:resnet18",
    ]  # fmt: skip
    assert "timm:cifar_resnet20" not in architectures(["timm:*"])  # ours, not timm's
    with pytest.raises(RecastError, match="no architecture matches 'resnet18'"):
        architectures(["resnet18"])


def test_the_summary_names_what_falls_short() -> None:
    exact = ZooRow("timm:a", "exact", last_split_bitwise=True, all_split_bitwise=True, last_dense_error=2e-7)
    exact.control, exact.all_recast = 0.3, 5
    rows = [exact, ZooRow("timm:b", "vacuous", "moves nothing"), ZooRow("timm:c", "no spatial convolution")]
    text = summary([*rows, ZooRow("torchvision:d", "failed", "an error")])
    assert "timm: 1 of 2 architectures with a spatial convolution recast exactly" in text
    assert "1 of 3 have none" in text
    assert "timm:b: vacuous, moves nothing" in text
    assert "torchvision: 0 of 1" in text
    assert "torchvision:d: failed, an error" in text
