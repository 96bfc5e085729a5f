"""A run that was interrupted and resumed ends with the weights of one that was not, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from small import assert_same, small_child, small_data, small_fit, small_parent, without_clocks

from recast.errors import RecastError
from recast.lab import signals
from recast.lab.config import AugmentConfig, RegularizationConfig
from recast.lab.signals import stop_signals, uninterrupted
from recast.lab.training import loop
from recast.lab.training.checkpoint import states
from recast.lab.training.distributed import Interrupted
from recast.lab.training.metrics import read_metrics

CtrlC = Callable[[str, int], AbstractContextManager[None]]
After = Callable[[str, int, Callable[[], object]], AbstractContextManager[None]]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "optim": {"gate_l1": 0.3, "clip_grad": 1.0},
        "regularization": RegularizationConfig(label_smoothing=0.1, ema_decay=0.9),
        "augment": AugmentConfig(mixup=0.8, cutmix=1.0, erasing=0.5),
        "accumulate": 2,
        "save_steps": 2,
    },
    "lamb": {"optim": {"opt": "lamb"}},
}


def position(folder: Path) -> tuple[int, int]:
    found = torch.load(states(folder)[-1], weights_only=True)["position"]
    return found["epoch"], found["step"]


@pytest.mark.parametrize(
    ("settings", "where", "calls"),
    [
        *(("everything", *stop) for stop in (("update", 1), ("update", 8), ("measure", 1), ("measure", 3))),
        ("plain", "update", 8),
        ("plain", "measure", 3),
        ("lamb", "update", 8),
    ],
)
def test_resumed_equals_uninterrupted(goes_on: Callable[..., Any], settings: str, where: str, calls: int) -> None:
    goes_on(small_fit, small_child, where, calls, **SETTINGS[settings])


def test_a_crash_between_row_and_state_repeats_the_epoch_once(tmp_path: Path) -> None:
    expected = small_fit(tmp_path / "straight")

    full_disk = [mock.DEFAULT, mock.DEFAULT, OSError("no space left on device")]  # epochs 0 and 1 are saved
    with mock.patch.object(loop, "save_state", wraps=loop.save_state, side_effect=full_disk):
        with pytest.raises(OSError, match="no space"):
            small_fit(tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    assert [row["epoch"] for row in read_metrics(log)] == [0, 1, 2]
    with log.open("a", encoding="utf-8") as file:
        file.write('{"epoch": 3, "train_')  # and a line that was cut off
    log.write_text(log.read_text(encoding="utf-8").replace('"val_top1": ', '"val_top1": 1', 1), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"run has lost epoch 0 of metrics.jsonl: it goes on without"):
        rows = small_fit(tmp_path / "run", resume=True)
    expected = expected[1:]
    assert without_clocks(rows) == without_clocks(expected)
    assert_same(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize("torch_says", [OSError(28, "No space left on device"), RuntimeError("enforce fail at inline")])
def test_a_failed_save_leaves_the_states_before_it(tmp_path: Path, torch_says: Exception) -> None:
    full_disk = mock.patch.object(torch, "save", wraps=torch.save, side_effect=[*3 * [mock.DEFAULT], torch_says])
    message = r"cannot save the state in .*; the newest state is .*00001-00000004\.pt"
    with full_disk, pytest.raises(RecastError, match=message):
        small_fit(tmp_path / "run", save_steps=2)
    kept = sorted(path.name for path in (tmp_path / "run" / "resume").iterdir())
    assert kept == ["state-00001-00000002.pt", "state-00001-00000004.pt"]
    small_fit(tmp_path / "run", resume=True, save_steps=2)
    small_fit(tmp_path / "straight", save_steps=2)
    assert_same(tmp_path / "straight", tmp_path / "run")


def test_a_finished_training_is_left_alone_and_resuming_nothing_starts(tmp_path: Path) -> None:
    rows, fresh = small_fit(tmp_path, epochs=1, resume=True), small_child()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RecastError, match="already holds a training"):
        small_fit(tmp_path, epochs=1)
    assert small_fit(tmp_path, fresh, epochs=1, resume=True) == rows
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert_same(fresh, tmp_path)


# --- what is no state of this run -------------------------------------------------------------------------------------


@pytest.fixture
def stopped(ctrl_c: CtrlC, tmp_path: Path) -> Path:
    """A folder with a training of the parent that was interrupted in its first epoch."""
    with ctrl_c("update", 2), pytest.raises(Interrupted):
        small_fit(tmp_path / "run", small_parent())
    return tmp_path / "run"


def test_a_state_of_something_else_is_refused(stopped: Path) -> None:
    parent = small_parent()
    with pytest.raises(RecastError, match=r"trained with another optim\.lr \(0.01, now 0.5\), epochs \(3, now 9\)"):
        small_fit(stopped, parent, optim={"lr": 0.5}, epochs=9, resume=True)
    with pytest.raises(RecastError, match="state of another model"):
        small_fit(stopped, small_child(), resume=True)
    fewer = replace(small_data(), train=small_data().train.subset(torch.arange(32)))
    with pytest.raises(RecastError, match="trained on 40 images, now there are 32"):
        small_fit(stopped, parent, data=fewer, resume=True)


def test_damaged_and_foreign_states_are_passed_over(ctrl_c: CtrlC, tmp_path: Path) -> None:
    fields = {"save_steps": 1, "keep": 4, "keep_every": 1}
    small_fit(tmp_path / "straight", **fields)
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        small_fit(tmp_path / "run", **fields)
    _, flipped, cut = states(tmp_path / "run")[-3:]
    weight = torch.load(flipped, weights_only=True)["model"]["0.weight"].numpy().tobytes()
    content = bytearray(flipped.read_bytes())
    content[content.index(weight)] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:1000])
    shutil.copy(states(tmp_path / "straight")[-1], tmp_path / "run" / "resume")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.warns(UserWarning, match="skipping it|lost") as warned:
        small_fit(tmp_path / "run", resume=True, **fields)
    skipped = ("00004-00000000.pt", "00001-00000004.pt", "00001-00000003.pt", "epoch-0000.safetensors")
    assert all(name in str(warning.message) for name, warning in zip(skipped, warned, strict=True))
    assert_same(tmp_path / "straight", tmp_path / "run")


@pytest.mark.filterwarnings("ignore:.*skipping it")
def test_a_state_without_permission_or_with_wrong_fields_is_called_that(stopped: Path) -> None:
    with mock.patch.object(torch, "load", side_effect=PermissionError(13, "Permission denied")):
        with pytest.raises(RecastError, match=r"cannot read .*\.pt: Permission denied"):
            small_fit(stopped, small_parent(), resume=True)
    path = states(stopped)[-1]
    content = torch.load(path, weights_only=True)
    for older in states(stopped)[:-1]:
        older.unlink()
    there = content["position"]
    for key, value in (
        ("position", {"epoch": "one"}), ("position", there | {"epoch": -5}), ("position", there | {"epoch": 10**9}),
        ("position", there | {"step": 5}), ("position", there | {"bad_images": 3}), ("optimizer", [1]),
        ("optimizer", content["optimizer"] | {"state": {}}), ("images", None), ("model", 3), ("rows", 1), ("kept", 1),
    ):  # fmt: skip
        torch.save(content | {key: value}, path)
        with pytest.raises(RecastError, match=r"to train again from the start|must be"):
            small_fit(stopped, small_parent(), resume=True)


@pytest.mark.filterwarnings("ignore:.*skipping it")
def test_truncated_foreign_and_pickled_states_are_refused(stopped: Path) -> None:
    path = states(stopped)[-1]
    for old in states(stopped)[:-1]:
        old.unlink()

    class Opens:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(stopped / "was run"),)

    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for content in (None, {"weights": torch.ones(1)}, {"version": 1, "model": Opens()}):
        if content is not None:
            torch.save(content, path)
        with pytest.raises(RecastError, match="holds no whole state"):
            small_fit(stopped, small_parent(), resume=True)
    assert not (stopped / "was run").exists()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_skipped(stopped: Path, make: Callable[[Path], object]) -> None:
    make(stopped / "resume" / "state-00009-00000000.pt")
    with pytest.warns(UserWarning, match=r"state-00009-00000000\.pt .*skipping it"):
        assert len(small_fit(stopped, small_parent(), resume=True)) == 4


def test_a_state_that_is_a_link_to_a_device_is_refused(stopped: Path) -> None:
    (stopped / "resume" / "state-00009-00000000.pt").symlink_to("/dev/zero")
    with pytest.raises(RecastError, match=r"00009-00000000\.pt is a link"):
        small_fit(stopped, small_parent(), resume=True)


@pytest.mark.filterwarnings("ignore:.*skipping it")
def test_states_of_a_future_given_up_are_dropped_not_the_new_one(ctrl_c: CtrlC, tmp_path: Path) -> None:
    fields = {"save_steps": 1, "keep": 3}
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        small_fit(tmp_path, **fields)
    for path in states(tmp_path)[-2:]:
        path.write_bytes(b"damaged")
    with ctrl_c("update", 1), pytest.raises(Interrupted):
        small_fit(tmp_path, resume=True, **fields)
    assert sorted(path.name for path in (tmp_path / "resume").iterdir()) == [
        "state-00001-00000002.pt", "state-00001-00000003.pt",
    ]  # fmt: skip


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_other_signals_save_too(after: After, tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # whoever started the tests may have had it ignored
    with after("update", 1, lambda: signal.raise_signal(number)), pytest.raises(Interrupted):
        small_fit(tmp_path, save_steps=3)
    assert position(tmp_path) == (1, 1)
    assert signal.signal(number, before) == signal.SIG_DFL


def test_a_closed_terminal_is_none_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
    signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_does_not_wait_and_others_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals() as stop:
        for _ in range(6):  # at once: one wish
            signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        monkeypatch.setattr(signals, "BURST", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_wait_until_a_state_is_written() -> None:
    with stop_signals() as stop:
        with uninterrupted():
            for _ in range(6):
                signal.raise_signal(signal.SIGINT)
            assert not stop.is_set()
        assert stop.is_set()
