"""The ranges of a recipe's numbers, what its fields ask of one another, and what a value of another type is told."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from recast.errors import RecastError
from recast.fields import Count, read_value
from recast.lab.config import DataConfig, DistillConfig, OptimConfig, Recipe, check_recipe
from recast.layers.config import PoolConfig, RecastConfig, ScheduleConfig


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (OptimConfig, {"lr": float("nan")}, "optim.lr must be 0 or a positive number, got nan"),
        (OptimConfig, {"lr": "fast"}, "optim.lr must be a number, got 'fast'"),
        (OptimConfig, {"lr": 1e300}, "optim.lr must be at most 1,000,000,000, got 1e.300"),
        (RecastConfig, {"head_dim": 2.5}, "head_dim must be a whole number or null, got 2.5"),
        (RecastConfig, {"head_dim": 10**5000}, "head_dim must be at most 4,096, got a number of about 5,000 digits"),
        (RecastConfig, {"attend_padding": "false"}, "attend_padding must be true or false, got 'false'"),
        (RecastConfig, {"gate_range": (0.0,)}, "gate_range must be a list of 2 numbers"),
        (PoolConfig, {"mlp_ratio": 1e6}, "pool.mlp_ratio must be at most 64"),
        (DataConfig, {"img_size": 10**6}, "data.img_size must be at most 16,384"),
        (Recipe, {"recast": None}, "recast must be a RecastConfig, got None"),
        (OptimConfig, {"betas": (0.9, 1.0)}, r"optim.betas must each be at least 0 and below 1, got .*1.0"),
        (RecastConfig, {"alpha": float("inf")}, "alpha must be a positive number"),
        (RecastConfig, {"gate": "sigmoids"}, "gate must be one of linear, sigmoid, bias, .*Did you mean sigmoid"),
        (RecastConfig, {"gate": None}, "gate must be one of linear, sigmoid, bias, got None"),
        (Recipe, {"trackers": ["mlflow"]}, "trackers must be one of tensorboard, wandb"),
    ],
)
def test_what_a_field_does_not_take_is_named(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecastError, match=message) as error:
        kind(**values)
    assert "\n" not in str(error.value)


def test_a_recipe_that_was_changed_is_checked_again() -> None:
    recipe = Recipe()
    recipe.optim.lr = -1.0
    with pytest.raises(RecastError, match=r"optim\.lr must be"):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"calibrate": 8}, "calibrate is for gate='sigmoid'"),
        ({"optim": OptimConfig(gate_l1=0.1), "recast": RecastConfig(gate="sigmoid")}, "got gate='sigmoid'"),
        ({"schedule": ScheduleConfig("listed", dates=["0:*"])}, "epochs 1 to 5, got 0"),
        ({"schedule": ScheduleConfig("at_once"), "epochs": 0}, "no epoch of attention is left"),
        ({"schedule": ScheduleConfig("learned", order="first_first")}, "order belongs to schedule=progressive"),
        (
            {"schedule": ScheduleConfig("progressive"), "distill": DistillConfig("parent", feature_epochs=1.0)},
            "feature_epochs prepares",
        ),
    ],
)
def test_fields_that_clash(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecastError, match=message):
        check_recipe(Recipe(**fields))


@pytest.mark.parametrize(
    ("hint", "value", "read"),
    [
        (float, "1e-4", 1e-4),
        (Count | None, None, None),
        (list[str], "all", ["all"]),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (Literal["off", "bf16"], False, "off"),
    ],
)
def test_plain_data_become_what_the_type_says(hint: Any, value: object, read: object) -> None:
    assert read_value(hint, value, "x") == read


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (Count | None, "x", "a whole number or null"),
        (int, True, "a whole number"),
        (float, False, "a number"),
        (bool, 1, "true or false"),
        (tuple[float, float], [1.0], "a list of 2 numbers"),
        (tuple[float, float] | None, 0.9, "a list of 2 numbers, or null"),
        (list[Literal["a", "b"]], ["c"], "a list, each item one of a, b"),
    ],
)
def test_a_value_of_another_type_is_told_what_is_wanted(hint: Any, value: object, wanted: str) -> None:
    with pytest.raises(RecastError) as error:
        read_value(hint, value, "x.y")
    assert str(error.value) == f"x.y must be {wanted}, got {value!r}"
