"""Layers that leave the convolution while `fit` trains."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from small import digits_recipe, small_parent, small_recipe
from test_resume import assert_same, without_seconds
from torch import nn

from recast import CMHSA, GPSA, Plan, RecastConfig, Schedule, load, recast_
from recast.data import Data
from recast.errors import RecastError
from recast.evaluation.run_folder import open_run
from recast.run.config import Recipe, RegularizationConfig, ScheduleConfig
from recast.surgery.planning import plan
from recast.training import switches
from recast.training.checkpoint import states
from recast.training.distributed import Interrupted
from recast.training.loop import fit
from recast.training.run import train

CtrlC = Callable[[str, int], AbstractContextManager[None]]
PROGRESSIVE = ScheduleConfig("progressive")

SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "everything": {
        "optim": {"opt": "sgd", "gate_l1": 0.3, "clip_grad": 1.0},
        "regularization": RegularizationConfig(ema_decay=0.9),
        "accumulate": 2,
        "save_steps": 2,
    },
    "lamb": {"optim": {"opt": "lamb"}},
    "learned": {"schedule": ScheduleConfig("learned", probe_images=16), "optim": {"lr": 1e-5, "gate_lr": 1.0}},
}


def planned(model: nn.Module, **config: Any) -> Plan:
    return plan(model, torch.zeros(1, 3, 8, 8), RecastConfig(**config), where=["0", "4"])


def scheduled(**fields: Any) -> Recipe:
    """Three epochs; the second convolution becomes attention before epoch 2, the first before epoch 3."""
    return small_recipe(fields.pop("optim", None), **{"schedule": PROGRESSIVE, **fields})


def schedule_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "schedule.json").read_text(encoding="utf-8"))
    return found


STOPS = {
    "before": ("update", 3),
    "edge": ("measure", 2),
    "in the switch": ("measure", 3),
    "first step after": ("update", 6),
    "after": ("update", 8),
    "in the second": ("measure", 5),
    "after both": ("update", 11),
}
CASES = [("adamw", stop) for stop in STOPS]
CASES += [("everything", stop) for stop in ("before", "in the switch", "after")]
CASES += [("lamb", "after both"), ("learned", "before"), ("learned", "after both")]


@pytest.mark.parametrize(("settings", "stop"), CASES)
def test_a_resumed_run_is_the_run(ctrl_c: CtrlC, data: Data, tmp_path: Path, settings: str, stop: str) -> None:
    recipe, parent = scheduled(**SETTINGS[settings]), small_parent()
    todo = planned(parent)
    straight, first, second = parent, copy.deepcopy(parent), copy.deepcopy(parent)
    expected = fit(straight, data, recipe, tmp_path / "straight", progress=False, plan=todo)
    with ctrl_c(*STOPS[stop]), pytest.raises(Interrupted, match="state saved"):
        fit(first, data, recipe, tmp_path / "run", progress=False, plan=todo)
    torch.rand(7)
    rows = fit(second, data, recipe, tmp_path / "run", resume=True, progress=False, plan=todo)
    assert_same(straight, second)
    assert without_seconds(rows) == without_seconds(expected)
    assert schedule_of(tmp_path / "run") == schedule_of(tmp_path / "straight")
    assert any(isinstance(layer, GPSA) for layer in straight.modules())


def test_what_happened_is_in_schedule_json(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    rows = fit(parent, data, scheduled(), tmp_path, progress=False, plan=planned(parent))
    found = schedule_of(tmp_path)
    assert (found["name"], found["layers"], found["dates"]) == ("progressive", ["0", "4"], {"0": 3, "4": 2})
    assert [(switch["epoch"], switch["layers"]) for switch in found["switches"]] == [(2, ["4"]), (3, ["0"])]
    for switch, row in zip(found["switches"], rows[1:], strict=False):
        before, after = switch["before"], switch["after"]
        assert before == {"val_loss": row["val_loss"], "val_top1": row["val_top1"]}
        assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6), "the linear gate starts exactly"
        assert after["val_top1"] == before["val_top1"]
    assert [sorted(row["layers"]) for row in rows] == [[], [], ["4"], ["0", "4"]]


def test_the_paper_s_start_is_seen_to_move_the_network(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    fit(parent, data, scheduled(), tmp_path, progress=False, plan=planned(parent, gate="sigmoid"))
    switch = schedule_of(tmp_path)["switches"][0]
    assert abs(switch["after"]["val_loss"] - switch["before"]["val_loss"]) > 1e-4


def test_until_the_first_switch_it_is_the_plain_training(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    other = copy.deepcopy(parent)
    rows = fit(parent, data, scheduled(), tmp_path / "a", progress=False, plan=planned(parent))
    plain = fit(other, data, scheduled(schedule=ScheduleConfig()), tmp_path / "b", progress=False)
    assert without_seconds(rows[:2]) == without_seconds(plain[:2])
    assert rows[2]["train_loss"] != plain[2]["train_loss"]


def test_a_saved_run_is_loaded_as_it_ended(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    recipe, todo = scheduled(regularization=RegularizationConfig(ema_decay=0.5)), planned(parent, gate="bias")
    original = copy.deepcopy(parent)
    fit(parent, data, recipe, tmp_path, progress=False, plan=todo)
    assert sum(isinstance(layer, CMHSA) for layer in parent.modules()) == 2
    assert_same(parent, load(tmp_path / "weights.safetensors", parent=original))
    again = copy.deepcopy(original)
    fit(again, data, recipe, tmp_path, resume=True, progress=False, plan=todo)  # it is finished: left alone
    assert_same(parent, again)


def test_a_learned_schedule_follows_its_measurements(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    recipe = scheduled(epochs=5, **SETTINGS["learned"])
    fit(parent, data, recipe, tmp_path, progress=False, plan=planned(parent))
    found = schedule_of(tmp_path)
    assert found["probes"][0]["delivered"] is None
    assert found["probes"][0]["chosen"] == []
    assert found["dates"]
    for probe in found["probes"]:
        for layer in probe["chosen"]:
            assert found["dates"][layer] == probe["epoch"] + 1
            assert probe["promised"][layer] > probe["delivered"]
    assert {name: date for switch in found["switches"] for name in switch["layers"] for date in [switch["epoch"]]} == (
        found["dates"]
    )
    idle = small_parent()
    fit(idle, data, scheduled(epochs=5, schedule=recipe.schedule, optim={"gate_lr": 0.0}), tmp_path / "idle",
        progress=False, plan=planned(idle))  # fmt: skip
    assert schedule_of(tmp_path / "idle")["dates"] == {}, "gates that do not move promise nothing"
    assert not any(isinstance(layer, GPSA) for layer in idle.modules())


def test_gate_slopes_are_the_gradients_of_the_recast_network() -> None:
    parent = small_parent().eval()
    images, labels = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(3)).double(), torch.arange(8) % 3
    todo, loss = planned(parent), nn.functional.cross_entropy
    parent.double()
    halves = list(zip(images.split(3), labels.split(3), strict=True))
    slopes = switches.gate_slopes(parent, todo, ["4"], halves, loss)
    assert list(slopes) == ["4"]
    step, base = 1e-6, float(loss(parent(images), labels).detach())
    for gate, head in (("gamma", 0), ("spread", 4)):
        child = copy.deepcopy(parent)
        recast_(child, todo, steps=["4"])
        layer = child.get_submodule("4")
        with torch.no_grad():
            getattr(layer, gate)[head] += step
            moved = float(loss(child.eval()(images), labels))
        found = slopes["4"][head + (0 if gate == "gamma" else 9)]
        assert (moved - base) / step == pytest.approx(float(found), rel=1e-4)
    assert not any(isinstance(layer, GPSA) for layer in parent.modules())


def test_what_a_layer_promises() -> None:
    one, other = torch.tensor([0.3, -0.2, 0.5]), torch.tensor([0.1, -0.4, -0.5])
    assert switches.agreement(one, other) == pytest.approx(0.3)
    promised, cost = {"small": 0.01, "dear": 0.3, "cheap": 0.2}, {"cheap": 10, "dear": 100, "small": 1}
    assert switches.ranked(promised, cost) == ["cheap", "small", "dear"]


def test_an_order_is_learned_at_the_dates_of_prs(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    recipe = scheduled(schedule=ScheduleConfig("progressive", order="learned", probe_images=16), epochs=2)
    todo = planned(parent)
    assert Schedule.progressive(todo, 2, "learned").slots == (1, 2)
    fit(parent, data, recipe, tmp_path, progress=False, plan=todo)
    found = schedule_of(tmp_path)
    assert (sorted(found["dates"].values()), found["slots"]) == ([1, 2], [])
    first, second = found["probes"]
    cost = {step.name: step.after.macs - step.before.macs for step in todo.steps}
    assert (first["epoch"], first["train_loss"], second["epoch"]) == (0, None, 1)
    assert found["dates"][switches.ranked(first["promised"], cost)[0]] == 1
    assert list(second["promised"]) == second["chosen"]


def test_a_state_of_before_the_switch_holds_the_convolution(ctrl_c: CtrlC, data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    todo = planned(parent)
    with ctrl_c("update", 3), pytest.raises(Interrupted):
        fit(parent, data, scheduled(), tmp_path, progress=False, plan=todo)
    content = torch.load(states(tmp_path)[-1], weights_only=True)
    assert "4.gamma" not in content["model"]
    assert content["switches"]["switches"] == []
    assert content["switches"]["dates"] == {"4": 2, "0": 3}


def test_a_state_of_another_plan_is_refused(ctrl_c: CtrlC, data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    with ctrl_c("update", 8), pytest.raises(Interrupted):
        fit(copy.deepcopy(parent), data, scheduled(), tmp_path, progress=False, plan=planned(parent))
    with pytest.raises(RecastError, match="another plan: its layers are 0, 4"):
        fit(parent, data, scheduled(), tmp_path, resume=True, progress=False, plan=planned(parent).only(["4"]))


def test_plan_and_schedule_need_each_other(data: Data, tmp_path: Path) -> None:
    parent = small_parent()
    with pytest.raises(RecastError, match=r"pass fit\(plan=plan"):
        fit(parent, data, scheduled(), tmp_path, progress=False)
    with pytest.raises(RecastError, match=r"set recipe\.schedule"):
        fit(parent, data, small_recipe(), tmp_path, progress=False, plan=planned(parent))
    assert not list(tmp_path.iterdir())


def test_a_run_folder_from_the_command_s_function(tmp_path: Path) -> None:
    """Random weights, two layers on their dates, the control arm without them; everything is read back."""
    recipe = digits_recipe(where=["layer3.1.*"], schedule=ScheduleConfig("at_once", conv_epochs=1))
    told: list[str] = []
    out = train(recipe, tmp_path / "run", progress=False, say=told.append)
    assert "layer3.1.conv2  attention from epoch 2" in told[0]
    assert "bitwise equal" in told[0]
    assert schedule_of(out)["dates"] == {"layer3.1.conv1": 2, "layer3.1.conv2": 2}
    assert not (out / "finetuned" / "schedule.json").exists()
    run = open_run(out)
    assert isinstance(run.models["recast"].get_submodule("layer3.1.conv1"), GPSA)
    assert isinstance(run.models["finetuned"].get_submodule("layer3.1.conv1"), nn.Conv2d)
    train(recipe, out, resume=True, progress=False)  # finished: left alone
