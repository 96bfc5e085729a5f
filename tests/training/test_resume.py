"""A run that was interrupted and resumed ends with the weights of one that was not, bit for bit."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recast.data import Data
from recast.errors import RecastError
from recast.run.config import AugmentConfig, Recipe, RegularizationConfig
from recast.training import loop as fit_module
from recast.training.checkpoint import states
from recast.training.distributed import Interrupted, stop_signals
from recast.training.loop import fit
from recast.training.metrics import read_metrics

MakeChild = Callable[..., nn.Module]
MakeRecipe = Callable[..., Recipe]
CtrlC = Callable[[str, int], AbstractContextManager[None]]

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


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clock = ("seconds", "images_per_second", "data_wait")
    return [{key: value for key, value in row.items() if key not in clock} for row in rows]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("where", "calls"), [("update", 1), ("update", 8), ("measure", 1), ("measure", 3)])
def test_resumed_equals_uninterrupted(
    ctrl_c: CtrlC,
    make_child: MakeChild,
    data: Data,
    make_recipe: MakeRecipe,
    tmp_path: Path,
    where: str,
    calls: int,
    settings: str,
) -> None:
    recipe, child = make_recipe(**SETTINGS[settings]), make_child()
    straight, first, second = child, copy.deepcopy(child), copy.deepcopy(child)
    expected = fit(straight, data, recipe, tmp_path / "straight", progress=False)
    with ctrl_c(where, calls), pytest.raises(Interrupted, match="state saved"):
        fit(first, data, recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    torch.rand(7)
    rows = fit(second, data, recipe, tmp_path / "run", resume=True, progress=False)
    assert_same(straight, second)
    assert without_seconds(rows) == without_seconds(expected)
    assert without_seconds(read_metrics(tmp_path / "run" / "metrics.jsonl")) == without_seconds(expected)


def test_interrupted_twice_in_one_epoch(
    ctrl_c: CtrlC, make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe, child = make_recipe(regularization=RegularizationConfig(ema_decay=0.9)), make_child()
    models = [copy.deepcopy(child) for _ in range(3)]
    fit(child, data, recipe, tmp_path / "straight", progress=False)
    for number in (0, 1):
        with ctrl_c("update", 2), pytest.raises(Interrupted):
            fit(models[number], data, recipe, tmp_path / "run", resume=True, progress=False)
    position = torch.load(states(tmp_path / "run")[-1], weights_only=True)["position"]
    assert (position["epoch"], position["step"]) == (1, 4)
    fit(models[2], data, recipe, tmp_path / "run", resume=True, progress=False)
    assert_same(child, models[2])


def test_a_crash_between_row_and_state_repeats_the_epoch_once(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    child = make_child()
    first, second = copy.deepcopy(child), copy.deepcopy(child)
    expected = fit(child, data, make_recipe(), tmp_path / "straight", progress=False)

    def full_disk(state: Any, *args: Any) -> None:
        if state.position.epoch == 3:
            raise OSError("no space left on device")
        real(state, *args)

    real = fit_module.save_state
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fit_module, "save_state", full_disk)
        with pytest.raises(OSError, match="no space"):
            fit(first, data, make_recipe(), tmp_path / "run", progress=False)
    log = tmp_path / "run" / "metrics.jsonl"
    assert [row["epoch"] for row in read_metrics(log)] == [0, 1, 2]
    with log.open("a", encoding="utf-8") as file:
        file.write('{"epoch": 3, "train_')  # and a line that was cut off
    rows = fit(second, data, make_recipe(), tmp_path / "run", resume=True, progress=False)
    assert without_seconds(rows) == without_seconds(expected)
    assert_same(child, second)


@pytest.mark.parametrize("torch_says", [OSError(28, "No space left on device"), RuntimeError("enforce fail at inline")])
def test_a_failed_save_leaves_the_states_before_it(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    torch_says: Exception,
) -> None:  # fmt: skip
    recipe = make_recipe(save_steps=2)
    save, calls = torch.save, []

    def full(content: Any, path: Path) -> None:
        calls.append(1)
        if len(calls) < 4:
            save(content, path)
            return
        path.write_bytes(b"half")
        raise torch_says

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        RecastError, match=r"cannot save the state in .*; the newest state is .*state-00001-00000004\.pt"
    ):
        fit(copy.deepcopy(parent), data, recipe, tmp_path / "run", progress=False)
    monkeypatch.setattr(torch, "save", save)
    kept = sorted(path.name for path in (tmp_path / "run" / "resume").iterdir())
    assert kept == ["state-00001-00000002.pt", "state-00001-00000004.pt"]
    again = copy.deepcopy(parent)
    fit(again, data, recipe, tmp_path / "run", resume=True, progress=False)
    fit(parent, data, recipe, tmp_path / "straight", progress=False)
    assert_same(parent, again)


def test_the_last_k_states_are_kept(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    fit(parent, data, make_recipe(save_steps=2, keep=3), tmp_path, progress=False)
    assert [path.name for path in states(tmp_path)] == [
        "state-00003-00000002.pt", "state-00003-00000004.pt", "state-00004-00000000.pt",
    ]  # fmt: skip


def test_a_finished_training_is_left_alone(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    child = make_child()
    fresh = copy.deepcopy(child)
    rows = fit(child, data, make_recipe(), tmp_path, progress=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert fit(fresh, data, make_recipe(), tmp_path, resume=True, progress=False) == rows
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert_same(child, fresh)


def test_resuming_nothing_starts(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    assert len(fit(parent, data, make_recipe(epochs=1), tmp_path, resume=True, progress=False)) == 2


@pytest.fixture
def stopped(ctrl_c: CtrlC, parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    """A folder with a training that was interrupted in its first epoch."""
    with ctrl_c("update", 2), pytest.raises(Interrupted):
        fit(copy.deepcopy(parent), data, make_recipe(), tmp_path / "run", progress=False)
    return tmp_path / "run"


def test_another_recipe_is_refused_and_named(
    stopped: Path, parent: nn.Module, data: Data, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(RecastError, match=r"trained with another optim\.lr \(0.01, now 0.5\), epochs \(3, now 9\)"):
        fit(parent, data, make_recipe({"lr": 0.5}, epochs=9), stopped, resume=True, progress=False)


def test_another_model_is_refused(stopped: Path, make_child: MakeChild, data: Data, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecastError, match="state of another model"):
        fit(make_child(), data, make_recipe(), stopped, resume=True, progress=False)


def test_a_damaged_state_is_passed_over(
    ctrl_c: CtrlC, parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe, straight, again = make_recipe(save_steps=1, keep=3), copy.deepcopy(parent), copy.deepcopy(parent)
    fit(straight, data, recipe, tmp_path / "straight", progress=False)
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        fit(parent, data, recipe, tmp_path / "run", progress=False)
    newest = states(tmp_path / "run")[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"state-00001-00000004\.pt is truncated .* passed over"):
        fit(again, data, recipe, tmp_path / "run", resume=True, progress=False)
    assert_same(straight, again)


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_truncated_foreign_and_pickled_states_are_refused(
    stopped: Path, parent: nn.Module, data: Data, make_recipe: MakeRecipe
) -> None:
    for old in states(stopped)[:-1]:
        old.unlink()
    path = states(stopped)[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecastError, match="holds no whole state"):
        fit(parent, data, make_recipe(), stopped, resume=True, progress=False)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(RecastError, match="holds no whole state"):
        fit(parent, data, make_recipe(), stopped, resume=True, progress=False)

    class Opens:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(stopped / "was run"),)

    torch.save({"version": 1, "model": Opens()}, path)
    with pytest.raises(RecastError, match="holds no whole state"):
        fit(parent, data, make_recipe(), stopped, resume=True, progress=False)
    assert not (stopped / "was run").exists()


def test_the_state_holds_no_pickled_objects(stopped: Path) -> None:
    assert torch.load(states(stopped)[-1], weights_only=True)["position"]["step"] == 2


def test_sigterm_saves_too(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    update = fit_module.Update.__call__
    with pytest.MonkeyPatch.context() as monkeypatch:

        def told(self: Any, *args: Any) -> torch.Tensor:
            signal.raise_signal(signal.SIGTERM)
            return update(self, *args)

        monkeypatch.setattr(fit_module.Update, "__call__", told)
        with pytest.raises(Interrupted, match="state saved"):
            fit(parent, data, make_recipe(), tmp_path, progress=False)
    assert torch.load(states(tmp_path)[-1], weights_only=True)["position"]["step"] == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_ctrl_c_does_not_wait() -> None:
    done = []

    def work() -> None:
        with stop_signals() as stop:
            signal.raise_signal(signal.SIGINT)
            done.append(stop.requested)
            signal.raise_signal(signal.SIGINT)
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fit_works_in_a_thread(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    thread = threading.Thread(
        target=fit, args=(parent, data, make_recipe(epochs=1), tmp_path), kwargs={"progress": False}
    )
    thread.start()
    thread.join()
    assert (tmp_path / "weights.safetensors").exists()


def test_a_wish_in_the_last_validation_is_heard_when_the_weights_are_written(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = fit_module.measure, []

    def told_afterwards(*args: Any) -> tuple[float, float]:
        found = measure(*args)
        calls.append(1)
        if len(calls) == 4:  # before training and after each of 3 epochs
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(fit_module, "measure", told_afterwards)
    with pytest.raises(Interrupted, match="this training is finished"):
        fit(parent, data, make_recipe(), tmp_path, progress=False)
    assert (tmp_path / "weights.safetensors").is_file()


def test_weights_that_are_not_finite_are_never_saved(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, calls = fit_module.Update.__call__, []

    def spoilt(self: Any, *args: Any) -> torch.Tensor:
        loss = update(self, *args)
        calls.append(1)
        if len(calls) == 4:
            self.state.model[4].weight.data[0] = float("nan")
        return loss

    monkeypatch.setattr(fit_module.Update, "__call__", spoilt)
    with pytest.raises(RecastError, match=r"4\.weight is not finite after epoch 1, step 4.*state-00001-00000003\.pt"):
        fit(parent, data, make_recipe(save_steps=1), tmp_path, progress=False)
    assert states(tmp_path)[-1].name == "state-00001-00000003.pt"


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_states_of_a_future_given_up_are_dropped_not_the_new_one(
    ctrl_c: CtrlC, parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = make_recipe(save_steps=1, keep=3)
    with ctrl_c("update", 4), pytest.raises(Interrupted):
        fit(copy.deepcopy(parent), data, recipe, tmp_path, progress=False)
    for path in states(tmp_path)[-2:]:
        path.write_bytes(b"damaged")
    (tmp_path / "resume" / ".state-00001-00000009.pt.1.tmp").write_bytes(b"left by a process that was killed")
    with ctrl_c("update", 1), pytest.raises(Interrupted):
        fit(parent, data, recipe, tmp_path, resume=True, progress=False)
    assert sorted(path.name for path in (tmp_path / "resume").iterdir()) == [
        "state-00001-00000002.pt", "state-00001-00000003.pt",
    ]  # fmt: skip


def test_other_data_are_refused(stopped: Path, parent: nn.Module, data: Data, make_recipe: MakeRecipe) -> None:
    fewer = replace(data, train=data.train.subset(torch.arange(32)))
    with pytest.raises(RecastError, match="was trained on 40 images, now there are 32"):
        fit(parent, fewer, make_recipe(), stopped, resume=True, progress=False)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are POSIX's")
def test_a_queue_s_sigterm_reaches_loader_processes_too_and_the_state_is_saved(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from dataclasses import replace\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from small import small_data, small_parent, small_recipe\n"
        "from recast.training.loop import fit\n"
        "from recast.training.distributed import Interrupted\n"
        "os.setsid()\n"
        "recipe = small_recipe()\n"
        "recipe.data.workers = 2\n"
        "def told(epoch, step, loss):\n"
        "    if (epoch, step) == (1, 2):\n"
        "        os.killpg(0, signal.SIGTERM)\n"
        "try:\n"
        "    fit(small_parent(), small_data(), recipe, sys.argv[1], progress=False, on_step=told)\n"
        "except Interrupted:\n"
        "    sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 7, done.stderr[-2000:]
    position = torch.load(states(tmp_path)[-1], weights_only=True)["position"]
    assert (position["epoch"], position["step"]) in ((1, 2), (1, 3))
