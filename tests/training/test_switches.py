import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import assert_same, small_fit, small_parent, small_plan, without_clocks
from torch import nn

from recast import CMHSA, Plan, RecastError, load
from recast.lab.config import RegularizationConfig, ScheduleConfig
from recast.lab.folder.run import RunFolder
from recast.lab.training.distributed import Interrupted
from recast.layers.cmhsa import gated_layers
from recast.models.weights import read_header

CtrlC = Callable[[str, int], AbstractContextManager[None]]


def planned(**config: Any) -> Plan:
    return small_plan(small_parent(), "0", "4", **config)


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "everything": {
        "optim": {"opt": "sgd", "gate_l1": 0.3, "clip_grad": 1.0},
        "regularization": RegularizationConfig(ema_decay=0.9),
        "accumulate": 2,
        "save_steps": 2,
    },
    "lamb": {"optim": {"opt": "lamb"}},
    "woken": {
        "plan": planned(query_key="images"),
        "regularization": RegularizationConfig(ema_decay=0.9),
        "optim": {"qk_lr": 0.1},
    },
}
STOPS = {"before": ("update", 3), "edge": ("measure", 2), "switch": ("measure", 3), "after": ("update", 11)}
CASES = [*(("everything", stop) for stop in STOPS), ("adamw", "switch"), ("lamb", "after"), ("woken", "switch")]


def scheduled(folder: Path, model: nn.Module | None = None, plan: Plan | None = None, **fields: Any) -> Any:
    """Three epochs; the second convolution becomes attention before epoch 2, the first before epoch 3."""
    fields = {"schedule": ScheduleConfig("progressive"), **fields}
    return small_fit(folder, model or small_parent(), plan=plan or planned(), **fields)


def schedule_of(folder: Path) -> Any:
    return json.loads((folder / "schedule.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("settings", "stop"), CASES)
def test_a_resumed_run_is_the_run(goes_on: Callable[..., nn.Module], tmp_path: Path, settings: str, stop: str) -> None:
    straight = goes_on(scheduled, small_parent, *STOPS[stop], **SETTINGS[settings])
    assert schedule_of(tmp_path / "run") == schedule_of(tmp_path / "straight")
    assert len(gated_layers(straight)) == 2


def test_what_happened_is_in_schedule_json_and_until_then_it_is_the_plain_training(tmp_path: Path) -> None:
    rows = scheduled(tmp_path)
    schedule = schedule_of(tmp_path)
    assert (schedule["name"], schedule["layers"], schedule["dates"]) == ("progressive", ["0", "4"], {"0": 3, "4": 2})
    assert [(switch["epoch"], switch["layers"]) for switch in schedule["switches"]] == [(2, ["4"]), (3, ["0"])]
    for switch, row in zip(schedule["switches"], rows[1:], strict=False):
        before, after = switch["before"], switch["after"]
        assert before == {"val_loss": row["val_loss"], "val_top1": row["val_top1"]}
        assert after["val_loss"] == pytest.approx(before["val_loss"], rel=1e-6), "attention starts exactly"
        assert after["val_top1"] == before["val_top1"]
    assert [sorted(row["layers"]) for row in rows] == [[], [], ["4"], ["0", "4"]]
    plain = small_fit(tmp_path / "plain", small_parent())
    assert without_clocks(rows[:2]) == without_clocks(plain[:2])
    assert rows[2]["train_loss"] != plain[2]["train_loss"]


def test_a_saved_run_is_loaded_as_it_ended(tmp_path: Path) -> None:
    parent, resumed = small_parent(), small_parent()
    fields = {"plan": planned(gate="bias"), "regularization": RegularizationConfig(ema_decay=0.5)}
    scheduled(tmp_path, parent, **fields)
    assert sum(isinstance(layer, CMHSA) for layer in parent.modules()) == 2
    assert_same(parent, load(tmp_path / "weights.safetensors", parent=small_parent()))
    scheduled(tmp_path, resumed, resume=True, **fields)  # it is finished: left alone
    assert_same(parent, resumed)
    weights = tmp_path / "weights.safetensors"
    header = {**read_header(weights), "plan": '{"version": 1, "steps": []}'}
    save_file(load_file(weights), weights, metadata={"recast": json.dumps(header)})
    with pytest.raises(RecastError, match=r"weights\.safetensors's plan is a plan of version 1"):
        scheduled(tmp_path, small_parent(), resume=True, **fields)


def test_a_state_holds_the_network_as_it_is_and_belongs_to_its_plan(ctrl_c: CtrlC, tmp_path: Path) -> None:
    with ctrl_c("update", 3), pytest.raises(Interrupted):
        scheduled(tmp_path)
    content = torch.load(RunFolder(tmp_path).saved_states()[-1], weights_only=True)
    assert "4.gamma" not in content["model"]
    assert content["switches"]["switches"] == []
    assert content["switches"]["dates"] == {"4": 2, "0": 3}
    with pytest.raises(RecastError, match="another plan: its layers are 0, 4"):
        scheduled(tmp_path, plan=planned().only(["4"]), resume=True)


def test_a_plan_and_a_schedule_need_one_another(tmp_path: Path) -> None:
    with pytest.raises(RecastError, match=r"pass fit\(plan="):
        small_fit(tmp_path, small_parent(), schedule=ScheduleConfig("progressive"))
    with pytest.raises(RecastError, match=r"set recipe\.schedule"):
        small_fit(tmp_path, small_parent(), plan=planned())
    assert not list(tmp_path.iterdir())
