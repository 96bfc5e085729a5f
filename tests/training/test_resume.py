"""A run that was interrupted and resumed ends with the weights of one that was not, bit for bit."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recast.config import Recipe
from recast.data import Data
from recast.errors import RecastError
from recast.training import fit as fit_module
from recast.training.checkpoint import Interrupted, save_state, shielded, state_path
from recast.training.fit import fit
from recast.training.metrics import MetricsLog

MakeChild = Callable[..., nn.Module]
MakeRecipe = Callable[..., Recipe]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"optim": {"gate_l1": 0.3, "clip_grad": 1.0}, "ema_decay": 0.9, "label_smoothing": 0.1},
    "lamb": {"optim": {"opt": "lamb"}},
}


def interrupt_after(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    """Press Ctrl-C during call number `calls` of a function of the loop."""
    function, seen = getattr(fit_module, name), []

    def pressed(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        if len(seen) == calls:
            signal.raise_signal(signal.SIGINT)
        return function(*args, **kwargs)

    monkeypatch.setattr(fit_module, name, pressed)


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("where", "calls"), [("_step", 1), ("_step", 8), ("measure", 1), ("measure", 3)])
def test_resumed_equals_uninterrupted(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path, where: str, calls: int, settings: str
) -> None:
    recipe, child = make_recipe(**SETTINGS[settings]), make_child()
    straight, first, second = child, copy.deepcopy(child), copy.deepcopy(child)
    expected = fit(straight, data, recipe, tmp_path / "straight", progress=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_after(monkeypatch, where, calls)
        with pytest.raises(Interrupted, match="state saved"):
            fit(first, data, recipe, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    torch.rand(7)
    rows = fit(second, data, recipe, tmp_path / "run", resume=True, progress=False)
    assert_same(straight, second)
    assert without_seconds(rows) == without_seconds(expected)
    assert without_seconds(MetricsLog(tmp_path / "run" / "metrics.jsonl").rows()) == without_seconds(expected)


def test_interrupted_twice_in_one_epoch(
    make_child: MakeChild, data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe, child = make_recipe(ema_decay=0.9), make_child()
    models = [copy.deepcopy(child) for _ in range(3)]
    fit(child, data, recipe, tmp_path / "straight", progress=False)
    for number in (0, 1):
        with pytest.MonkeyPatch.context() as monkeypatch:
            interrupt_after(monkeypatch, "_step", 2)
            with pytest.raises(Interrupted):
                fit(models[number], data, recipe, tmp_path / "run", resume=True, progress=False)
    position = torch.load(state_path(tmp_path / "run"), weights_only=True)["position"]
    assert (position["epoch"], position["step"], position["images"]) == (1, 4, 32)
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
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    assert [row["epoch"] for row in log.rows()] == [0, 1, 2]
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"epoch": 3, "train_')  # and a line that was cut off
    rows = fit(second, data, make_recipe(), tmp_path / "run", resume=True, progress=False)
    assert without_seconds(rows) == without_seconds(expected)
    assert_same(child, second)


def test_a_failed_save_leaves_the_state_before_it(
    parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(parent, data, make_recipe(epochs=0), tmp_path, progress=False)
    before = state_path(tmp_path).read_bytes()

    def crash(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="no space"):
        fit(parent, data, make_recipe(epochs=0), tmp_path / "other", progress=False)
    (tmp_path / "weights.safetensors").unlink()
    state = fit_module._new_state(parent, make_recipe(epochs=0), torch.device("cpu"))
    with pytest.raises(OSError, match="no space"):
        save_state(state, make_recipe(epochs=0), tmp_path)
    assert state_path(tmp_path).read_bytes() == before


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
def stopped(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> Path:
    """A folder with a training that was interrupted in its first epoch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_after(monkeypatch, "_step", 2)
        with pytest.raises(Interrupted):
            fit(copy.deepcopy(parent), data, make_recipe(), tmp_path / "run", progress=False)
    return tmp_path / "run"


def test_another_recipe_is_refused_and_named(
    stopped: Path, parent: nn.Module, data: Data, make_recipe: MakeRecipe
) -> None:
    with pytest.raises(RecastError, match=r"trained with another optim\.lr, epochs"):
        fit(parent, data, make_recipe({"lr": 0.5}, epochs=9), stopped, resume=True, progress=False)


def test_another_model_is_refused(stopped: Path, make_child: MakeChild, data: Data, make_recipe: MakeRecipe) -> None:
    with pytest.raises(RecastError, match="state of another model"):
        fit(make_child(), data, make_recipe(), stopped, resume=True, progress=False)


def test_truncated_foreign_and_pickled_states_are_refused(
    stopped: Path, parent: nn.Module, data: Data, make_recipe: MakeRecipe
) -> None:
    path = state_path(stopped)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecastError, match="truncated or no state"):
        fit(parent, data, make_recipe(), stopped, resume=True, progress=False)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(RecastError, match="truncated or no state"):
        fit(parent, data, make_recipe(), stopped, resume=True, progress=False)

    class Opens:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(stopped / "was run"),)

    torch.save({"version": 1, "model": Opens()}, path)
    with pytest.raises(RecastError, match="truncated or no state"):
        fit(parent, data, make_recipe(), stopped, resume=True, progress=False)
    assert not (stopped / "was run").exists()


def test_the_state_holds_no_pickled_objects(stopped: Path) -> None:
    assert torch.load(state_path(stopped), weights_only=True)["position"]["step"] == 2


def test_ctrl_c_waits_for_a_shielded_block() -> None:
    done = []

    def work() -> None:
        with shielded():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_a_shielded_block_gives_the_handler_back() -> None:
    def fail() -> None:
        with shielded():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fit_works_in_a_thread(parent: nn.Module, data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    thread = threading.Thread(
        target=fit, args=(parent, data, make_recipe(epochs=1), tmp_path), kwargs={"progress": False}
    )
    thread.start()
    thread.join()
    assert (tmp_path / "weights.safetensors").exists()
