import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small import changed_names, digits_recipe, small_fit, small_parent
from torch import nn

from recast import PoolConfig, attention_pool_
from recast.lab.config import OptimConfig, RegularizationConfig, ScheduleConfig
from recast.lab.open import open_run
from recast.lab.training.metrics import read_metrics
from recast.lab.training.optim import learning_rates, make_optimizer
from recast.lab.training.run import train
from recast.layers.attention_pool import attention_pools
from recast.layers.cmhsa import gated_layers
from recast.surgery.plan import applied_plan

FROZEN = {"where": ["none"], "regularization": RegularizationConfig(freeze="trunk")}


def pooled(kind: Any = "single") -> nn.Module:
    """`small_parent` with attention pooling that starts as the average, or its own."""
    model = small_parent()
    model.pretrained_cfg = {"input_size": (3, 8, 8)}  # type: ignore[assignment]
    return model if kind == "none" else attention_pool_(model, config=PoolConfig(kind))


@pytest.mark.parametrize("kind", ["none", "single", "per_class"])
def test_a_frozen_trunk_keeps_every_bit(kind: Any, tmp_path: Path) -> None:
    model = pooled(kind)
    before = copy.deepcopy(model.state_dict())
    rows = small_fit(tmp_path, model, **FROZEN, pool=PoolConfig(kind))
    trained = changed_names(before, tmp_path)
    heads = {f"{name}." for name in attention_pools(model)} | {"9."}
    assert {next(head for head in heads if name.startswith(head)) for name in trained} == heads
    assert {"1.running_mean", "1.weight", "4.weight", "5.num_batches_tracked"} <= before.keys() - trained
    assert rows[-1]["train_loss"] < rows[1]["train_loss"]


def test_pooling_has_a_rate_of_its_own() -> None:
    optimizer = make_optimizer(pooled(), OptimConfig(lr=1e-3, base_batch=16, pool_lr=0.5), 8)
    peaks = {group["name"]: group["peak_lr"] for group in optimizer.param_groups}
    assert peaks == {"decay": 5e-4, "no_decay": 5e-4, "pool_decay": 0.5, "pool_no_decay": 0.5}
    assert learning_rates(optimizer) == (5e-4, None), "the rate of the weights, not that of the pooling"


@pytest.mark.parametrize("fields", [{"optim": {"pool_lr": 3e-2}}, FROZEN], ids=["everything", "frozen"])
def test_a_stopped_training_goes_on_bit_for_bit(fields: dict[str, Any], goes_on: Callable[..., nn.Module]) -> None:
    model = goes_on(small_fit, pooled, "update", 7, **fields)
    (pool,) = attention_pools(model).values()
    assert bool(pool.attn.q.weight.any()), "the query has learnt"


SCHEDULED = {"schedule": ScheduleConfig("at_once", conv_epochs=1), "where": ["layer3.1.conv2"]}


@pytest.mark.parametrize(("kind", "fields"), [("per_class", FROZEN), ("single", SCHEDULED)])
def test_a_run_of_every_kind(kind: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    before = {} if "schedule" in fields else {"epochs": 1, "control": True}
    recipe = digits_recipe(pool=PoolConfig(kind), **before, **fields)
    run = train(recipe, tmp_path / "run", progress=False)
    verified = json.loads((run / "verify.json").read_text(encoding="utf-8"))
    assert verified["argmax_agreement"] == 1
    assert verified["max_relative_error"] < 1e-5
    plan_file = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    assert plan_file["pool"]["kind"] == kind
    assert plan_file["pool_cost"]["parameters"] > 0
    models = open_run(run).models
    child, control = models["recast"], models["finetuned"]
    assert applied_plan(child).pool == recipe.pool
    assert len(gated_layers(child)) == len(plan_file["steps"]) == recipe.has_layers
    assert not gated_layers(control)
    assert [path.name for path in run.rglob("schedule.json")] == ["schedule.json"] * ("schedule" in fields)
    assert (len(attention_pools(child)), len(attention_pools(control))) == (1, 0)
    first, *_, last = read_metrics(run / "metrics.jsonl")
    assert first["val_loss"] == pytest.approx(read_metrics(run / "finetuned" / "metrics.jsonl")[0]["val_loss"])
    assert first["val_loss"] != last["val_loss"]
    assert train(recipe, run, resume=True, progress=False) == run  # finished: left alone, and read back
    if recipe.regularization.freeze == "trunk":
        for arm in (child, control):
            assert changed_names(run / "parent.safetensors", arm) <= {"fc.weight", "fc.bias"}
