"""Weights that are kept on the way: which epochs, what is in them, and that they change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import small_child, small_data, small_parent, small_recipe
from torch import nn

from recast.data import Data
from recast.io import load
from recast.run.config import Recipe, RegularizationConfig, ScheduleConfig
from recast.surgery.apply import gpsa_layers
from recast.surgery.planning import plan
from recast.training.distributed import Interrupted
from recast.training.loop import fit
from recast.training.metrics import measure

CPU = torch.device("cpu")
MakeRecipe = Callable[..., Recipe]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def same(one: Path, other: Path) -> bool:
    """Bit for bit the same tensors; the file's header is in no order."""
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_weights_are_kept_every_so_many_epochs_and_before_training(
    data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    rows = fit(small_child(), data, make_recipe(epochs=4, keep_every=2), tmp_path, progress=False)
    assert kept(tmp_path) == [f"epoch-{epoch:04d}.safetensors" for epoch in (0, 2, 4)]
    for epoch in (0, 2, 4):
        model = load(tmp_path / "checkpoints" / f"epoch-{epoch:04d}.safetensors", parent=small_parent())
        assert measure(model, data, small_recipe(), CPU)[0] == pytest.approx(rows[epoch]["val_loss"], rel=1e-6)
    first, last = (load(tmp_path / "checkpoints" / kept(tmp_path)[i], parent=small_parent()) for i in (0, -1))
    start = small_child().state_dict()
    assert all(torch.equal(value, start[name]) for name, value in first.state_dict().items())
    end = load(tmp_path / "weights.safetensors", parent=small_parent()).state_dict()
    assert all(torch.equal(value, end[name]) for name, value in last.state_dict().items())


def test_none_are_kept_unless_asked_for_and_training_is_the_same(
    data: Data, make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    fit(small_child(), data, make_recipe(), tmp_path / "plain", progress=False)
    fit(small_child(), data, make_recipe(keep_every=1), tmp_path / "kept", progress=False)
    assert not (tmp_path / "plain" / "checkpoints").exists()
    assert same(*(tmp_path / name / "weights.safetensors" for name in ("plain", "kept")))


def test_the_average_is_what_is_kept(data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe(keep_every=1, regularization=RegularizationConfig(ema_decay=0.9))
    rows = fit(small_child(), data, recipe, tmp_path, progress=False)
    model = load(tmp_path / "checkpoints" / "epoch-0002.safetensors", parent=small_parent())
    assert measure(model, data, small_recipe(), CPU)[0] == pytest.approx(rows[2]["val_loss"], rel=1e-6)


def test_a_scheduled_network_is_kept_as_it_was_then(data: Data, make_recipe: MakeRecipe, tmp_path: Path) -> None:
    parent = small_parent()
    planned = plan(parent, torch.zeros(1, 3, 8, 8), where=["4"])
    recipe = make_recipe(epochs=2, keep_every=1, schedule=ScheduleConfig("listed", dates=["2:4"]))
    fit(parent, data, recipe, tmp_path, progress=False, plan=planned)
    layers = [len(gpsa_layers(load(tmp_path / "checkpoints" / name, parent=small_parent()))) for name in kept(tmp_path)]
    assert layers == [0, 0, 1]


def test_a_resumed_run_keeps_what_one_that_was_never_stopped_does(
    ctrl_c: Callable[[str, int], AbstractContextManager[None]], tmp_path: Path
) -> None:
    child, recipe, data = small_child(), small_recipe(keep_every=1), small_data()
    fit(copy.deepcopy(child), data, recipe, tmp_path / "whole", progress=False)
    with ctrl_c("update", 7), pytest.raises(Interrupted):
        fit(copy.deepcopy(child), data, recipe, tmp_path / "stopped", progress=False)
    assert kept(tmp_path / "stopped") == ["epoch-0000.safetensors", "epoch-0001.safetensors"]
    again: nn.Module = copy.deepcopy(child)
    fit(again, data, recipe, tmp_path / "stopped", resume=True, progress=False)
    for name in kept(tmp_path / "whole"):
        assert same(*(tmp_path / run / "checkpoints" / name for run in ("whole", "stopped"))), name
