from __future__ import annotations

from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, get_type_hints

import pytest

from recast.errors import RecastError
from recast.run.config import AugmentConfig, DataConfig, DistillConfig, OptimConfig, Recipe, RegularizationConfig
from recast.training.ranges import RANGES, check_ranges


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"optim": OptimConfig(lr=-1.0)}, "optim.lr must be 0 or a positive number, got -1.0"),
        ({"optim": OptimConfig(lr=float("nan"))}, "optim.lr must be 0 or a positive number, got nan"),
        ({"optim": OptimConfig(clip_grad=0.0)}, "optim.clip_grad must be a positive number"),
        ({"optim": OptimConfig(base_batch=0)}, "optim.base_batch must be 1 or more"),
        ({"optim": OptimConfig(layer_decay=0.0)}, "optim.layer_decay must be above 0 and at most 1"),
        ({"optim": OptimConfig(layer_decay=1.1)}, "optim.layer_decay"),
        ({"optim": OptimConfig(momentum=1.0)}, "optim.momentum"),
        (
            {"optim": OptimConfig(betas=(0.9, 1.0))},
            r"optim.betas must each be at least 0 and below 1, got .*1.0",
        ),
        ({"optim": OptimConfig(eps=0.0)}, "optim.eps"),
        ({"regularization": RegularizationConfig(label_smoothing=1.0)}, "regularization.label_smoothing"),
        ({"regularization": RegularizationConfig(ema_decay=1.5)}, "regularization.ema_decay"),
        ({"regularization": RegularizationConfig(drop_path=1.0)}, "regularization.drop_path"),
        ({"regularization": RegularizationConfig(layer_scale=-1.0)}, "regularization.layer_scale"),
        ({"augment": AugmentConfig(scale=(0.5, 0.2))}, r"augment.scale must be \(smallest, largest\)"),
        ({"augment": AugmentConfig(scale=(0.0, 1.0))}, "augment.scale must each be above 0"),
        ({"augment": AugmentConfig(erasing=1.5)}, "augment.erasing must be between 0 and 1"),
        ({"augment": AugmentConfig(repeats=0)}, "augment.repeats"),
        ({"data": DataConfig(batch_size=0)}, "data.batch_size must be 1 or more, got 0"),
        ({"data": DataConfig(std=(0.2, 0.0, 0.2))}, "data.std must each be a positive number"),
        ({"data": DataConfig(val_fraction=1.0)}, "data.val_fraction must be above 0 and below 1"),
        ({"distill": DistillConfig(temperature=0.0)}, "distill.temperature"),
        ({"distill": DistillConfig(teacher_weight=2.0)}, "distill.teacher_weight"),
        ({"distill": DistillConfig(feature_epochs=6.0), "epochs": 5}, r"feature_epochs must be at most epochs \(5\)"),
        ({"accumulate": 0}, "accumulate must be 1 or more"),
        ({"save_steps": 0}, "save_steps must be 1 or more"),
        ({"keep": 0}, "keep must be 1 or more"),
        ({"recalibrate_bn": -1}, "recalibrate_bn must be 0 or more"),
    ],
)
def test_numbers_that_cannot_train_are_named(recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(RecastError, match=message) as error:
        check_ranges(Recipe(**recipe))
    assert "\n" not in str(error.value)


def test_the_ends_of_ranges_are_allowed() -> None:
    check_ranges(Recipe())
    check_ranges(
        Recipe(
            optim=OptimConfig(lr=0.0, layer_decay=1.0, momentum=0.0, betas=(0.0, 0.0), base_batch=1),
            regularization=RegularizationConfig(drop_path=0.0, bce_threshold=0.0, layer_scale=0.0),
            augment=AugmentConfig(scale=(1.0, 1.0), erasing=1.0),
            distill=DistillConfig(feature_epochs=5.0, teacher_weight=1.0),
            epochs=5,
            save_steps=1,
            keep=1,
        )
    )


def test_every_number_of_a_recipe_has_a_range() -> None:
    """But the seed and mean, which may be any, and what RecastConfig and PoolConfig check by themselves."""

    def numbers(kind: type, prefix: str) -> set[str]:
        hints, found = get_type_hints(kind), set()
        for field in fields(kind):
            hint = hints[field.name]
            if is_dataclass(hint):
                found |= numbers(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            elif "float" in str(hint) or hint is int or "int |" in str(hint):
                found.add(prefix + field.name)
        return found

    ranged = {name for allowed in RANGES for name in allowed.fields}
    assert all(attrgetter(name)(Recipe()) is not ... for name in ranged)
    assert {n for n in numbers(Recipe, "") if not n.startswith(("recast.", "pool."))} - ranged == {"seed", "data.mean"}
