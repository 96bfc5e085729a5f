from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recast.data import Data
from recast.errors import RecastError
from recast.evaluation import evaluate
from recast.evaluation.suites import EVALUATORS
from recast.run.config.evaluation import Options
from recast.run.suites import METRICS, SUITES


def test_every_suite_is_told_of_and_can_be_measured() -> None:
    assert list(EVALUATORS) == list(SUITES)
    assert {metric for suite in SUITES.values() for metric in suite.metrics} == set(METRICS)


def test_all_models_see_the_same_pixels(digits: Data, spy: Any) -> None:
    first, second = spy(), spy()
    evaluate({"a": first, "b": second}, ["clean", "basic"], digits, batch_size=20, progress=False)
    assert len(first.pixels) == 3 * 26
    assert all(mine.equal(theirs) for mine, theirs in zip(first.pixels, second.pixels, strict=True))


def test_rows_do_not_depend_on_the_batch_size(trained: nn.Module, digits: Data) -> None:
    def rows(batch_size: int) -> list[tuple[object, ...]]:
        found = evaluate({"m": trained}, ["clean", "basic"], digits, batch_size=batch_size, progress=False)
        return [
            (row.model, row.metric, *(pytest.approx(x, abs=1e-5) for x in (row.value, row.low, row.high)))
            for row in found
        ]

    assert rows(7) == rows(50)


@pytest.mark.parametrize("fail", [False, True])
def test_training_flags_are_restored_each(digits: Data, spy: Any, fail: bool) -> None:
    model = spy().train()
    model.limit[0] = 20 if fail else 50
    model.layers[1].eval()  # as a frozen part would be
    before = [module.training for module in model.modules()]
    try:
        evaluate(model, "clean", digits, batch_size=20, progress=False)
    except KeyboardInterrupt:
        assert fail
    assert [module.training for module in model.modules()] == before == [True, True, True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suites": ["clean", "pdg"]}, r"unknown suite 'pdg': .*\. Did you mean pgd"),
        ({"suites": []}, "nothing to evaluate"),
        ({"models": {}}, "nothing to evaluate"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_requests_stop_before_anything_is_measured(
    digits: Data, change: dict[str, object], message: str, spy: Any
) -> None:
    model = spy()
    request: dict = {"models": {"m": model}, "suites": ["clean"], "progress": False} | change
    with pytest.raises(RecastError, match=message):
        evaluate(data=digits, **request)
    assert model.seen == 0


@pytest.mark.parametrize("option", ["eps", "neighbours"])
def test_lists_of_options_are_not_empty(option: str) -> None:
    with pytest.raises(RecastError, match=f"{option} must be numbers, got none"):
        Options(**{option: ()})  # type: ignore[arg-type]


def test_no_validation_images(digits: Data, spy: Any) -> None:
    empty = replace(digits, val=digits.val.subset(torch.empty(0, dtype=torch.long)))
    with pytest.raises(RecastError, match="digits has no validation images"):
        evaluate({"m": spy()}, ["clean"], empty, progress=False)
