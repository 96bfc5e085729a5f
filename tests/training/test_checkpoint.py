"""A run that was interrupted and resumed ends with the weights of one that was not, bit for bit."""

import os
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
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.config import ClassifyConfig, RegularizationConfig
from recast.lab.folder.run import RunFolder
from recast.lab.training import checkpoint, loop, signals
from recast.lab.training.distributed import Interrupted
from recast.lab.training.metrics import read_metrics
from recast.lab.training.signals import stop_signals, uninterrupted
from recast.layers.cmhsa import gated_layers
from recast.layers.forms import Forms
from recast.models.weights import read_header

CtrlC = Callable[[str, int], AbstractContextManager[None]]
After = Callable[[str, int, Callable[[], object]], AbstractContextManager[None]]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "optim": {"gate_l1": 0.3, "clip_grad": 1.0},
        "regularization": RegularizationConfig(ema_decay=0.9),
        "task": ClassifyConfig(mixup=0.8, cutmix=1.0, erasing=0.5, label_smoothing=0.1),
        "accumulate": 2,
        "save_steps": 2,
    },
    "balanced": {"task": ClassifyConfig(sampler="balanced"), "save_steps": 2},
    "lamb": {"optim": {"opt": "lamb"}},
}


@pytest.mark.parametrize(
    ("settings", "where", "calls"),
    [
        ("everything", "update", 1),
        ("everything", "update", 8),
        ("everything", "measure", 1),
        ("plain", "measure", 3),
        ("lamb", "update", 8),
        ("balanced", "update", 8),
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
    damaged = log.read_text(encoding="utf-8").replace('"val_top1": ', '"val_top1" ', 1)
    log.write_text(damaged + '{"epoch": 3, "train_', encoding="utf-8")  # and a line that was cut off
    with pytest.warns(UserWarning, match=r"metrics\.jsonl lacks epoch 0"):
        rows = small_fit(tmp_path / "run", resume=True)
    assert without_clocks(rows) == without_clocks(expected[1:])
    assert_same(tmp_path / "straight", tmp_path / "run")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("enforce fail at inline")])
def test_a_failed_save_leaves_the_states_before_it(tmp_path: Path, error: Exception) -> None:
    full_disk = mock.patch.object(torch, "save", wraps=torch.save, side_effect=[*3 * [mock.DEFAULT], error])
    message = r"cannot save the state in .*; the newest state is .*00001-00000004\.pt"
    with full_disk, pytest.raises(RecastError, match=message):
        small_fit(tmp_path / "run", save_steps=2)
    files = sorted(path.name for path in (tmp_path / "run" / "resume").iterdir())
    assert files == ["state-00001-00000002.pt", "state-00001-00000004.pt"]
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


@pytest.mark.parametrize("update", [1, 7])
def test_a_resumed_run_keeps_the_forms_that_were_timed(
    update: int, ctrl_c: CtrlC, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = iter(("dense", "dense", "split"))

    def tuned(model: nn.Module, images: Tensor, **_: Any) -> str:
        assert images.shape == (8, 3, 8, 8)
        gated_layers(model)["4"].tuned = (Forms("cpu", (4, 4), None, next(fastest)),)
        return "timed"

    monkeypatch.setattr(loop, "tune_", tuned)
    small_fit(tmp_path / "straight", straight := small_child(), tune=True)
    with ctrl_c("update", update), pytest.raises(Interrupted):
        small_fit(tmp_path / "run", small_child(), tune=True)
    small_fit(tmp_path / "run", child := small_child(), tune=True, resume=True)
    assert next(fastest) == "split", "timed once a training"
    assert gated_layers(child)["4"].tuned == gated_layers(straight)["4"].tuned
    assert_same(straight, child)
    saved = read_header(tmp_path / "run/weights.safetensors")["forms"]["layers"]
    assert saved == {"4": [["cpu", [4, 4], None, "dense"]]}


@pytest.fixture
def stopped(ctrl_c: CtrlC, tmp_path: Path) -> Path:
    with ctrl_c("update", 2), pytest.raises(Interrupted):
        small_fit(tmp_path / "run", small_parent())
    return tmp_path / "run"


def test_a_state_of_something_else_is_refused(stopped: Path) -> None:
    parent = small_parent()
    with pytest.raises(RecastError, match=r"other settings, epochs \(3, now 9\), optim\.lr \(0.01, now 0.5\)"):
        small_fit(stopped, parent, optim={"lr": 0.5}, epochs=9, resume=True)
    with pytest.raises(RecastError, match="state of a different model"):
        small_fit(stopped, small_child(), resume=True)
    fewer = replace(small_data(), train=small_data().train.subset(torch.arange(32)))
    with pytest.raises(RecastError, match="trained on 40 images, now there are 32"):
        small_fit(stopped, parent, data=fewer, resume=True)


def test_damaged_states_are_skipped_and_dropped(ctrl_c: CtrlC, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "KEPT", 4)
    small_fit(tmp_path / "straight", save_steps=1)
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        small_fit(tmp_path / "run", save_steps=1)
    _, flipped, cut = RunFolder(tmp_path / "run").saved_states()[-3:]
    weight = torch.load(flipped, weights_only=True)["model"]["0.weight"].numpy().tobytes()
    content = bytearray(flipped.read_bytes())
    content[content.index(weight)] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:1000])
    (tmp_path / "run" / "resume" / "state-00009-00000000.pt").mkdir()
    with ctrl_c("update", 1), pytest.warns(UserWarning, match="skipping it") as warned, pytest.raises(Interrupted):
        small_fit(tmp_path / "run", resume=True, save_steps=1)
    skipped = ("00001-00000004.pt", "00001-00000003.pt")
    assert all(name in str(warning.message) for name, warning in zip(skipped, warned, strict=True))
    newest = "state-00001-00000003.pt"  # later states belong to an abandoned continuation
    assert [path.name for path in RunFolder(tmp_path / "run").saved_states()][-1] == newest
    small_fit(tmp_path / "run", resume=True, save_steps=1)
    assert_same(tmp_path / "straight", tmp_path / "run")


@pytest.mark.filterwarnings("ignore:.*skipping it")
def test_what_is_no_state_is_refused_and_never_run(stopped: Path) -> None:
    *older, path = RunFolder(stopped).saved_states()
    for state in older:
        state.unlink()

    class Opens:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(stopped / "was run"),)

    for content in ({"weights": torch.ones(1)}, {"version": 1, "model": Opens()}):
        torch.save(content, path)
        with pytest.raises(RecastError, match="holds no complete state"):
            small_fit(stopped, small_parent(), resume=True)
    assert not (stopped / "was run").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_other_signals_save_too(after: After, tmp_path: Path, name: str) -> None:
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # whoever started the tests may have had it ignored
    with after("update", 1, lambda: signal.raise_signal(number)), pytest.raises(Interrupted):
        small_fit(tmp_path, save_steps=3)
    assert RunFolder(tmp_path).saved_states()[-1].name == "state-00001-00000001.pt"
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
