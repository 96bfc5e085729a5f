from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from recast.data import Data
from recast.errors import RecastError
from recast.evaluation import evaluate
from recast.evaluation.suites import EVALUATORS
from recast.run.config.evaluation import Options
from recast.run.suites import METRICS, SUITES


def test_every_suite_is_told_of_and_can_be_measured() -> None:
    assert list(EVALUATORS) == list(SUITES)
    assert {metric for suite in SUITES.values() for metric in suite.metrics} == set(METRICS)


class Spy(nn.Module):
    """Remembers what it saw."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.fail = fail
        self.inner = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 16 * 16, 10))

    def forward(self, x: Tensor) -> Tensor:
        assert not self.inner.training
        if self.fail:
            raise KeyboardInterrupt
        self.seen.append(x.detach().clone())
        return self.inner(x)


def test_all_models_see_the_same_pixels(digits: Data) -> None:
    first, second = Spy(), Spy()
    evaluate({"a": first, "b": second}, ["clean", "basic"], digits, batch_size=20, progress=False)
    assert len(first.seen) == 3 * 26
    assert all(mine.equal(theirs) for mine, theirs in zip(first.seen, second.seen, strict=True))


def test_rows_do_not_depend_on_the_batch_size(trained: nn.Module, digits: Data) -> None:
    def rows(batch_size: int) -> list[tuple[object, ...]]:
        found = evaluate({"m": trained}, ["clean", "basic"], digits, batch_size=batch_size, progress=False)
        return [
            (row.model, row.metric, *(pytest.approx(x, abs=1e-5) for x in (row.value, row.low, row.high)))
            for row in found
        ]

    assert rows(7) == rows(50)


@pytest.mark.parametrize("fail", [False, True])
def test_training_flags_are_restored_each(digits: Data, fail: bool) -> None:
    spy = Spy(fail).train()
    spy.inner[1].eval()  # as a frozen part would be
    before = [module.training for module in spy.modules()]
    try:
        evaluate({"m": spy}, ["clean"], digits, progress=False)
    except KeyboardInterrupt:
        assert fail
    assert [module.training for module in spy.modules()] == before
    assert before == [True, True, True, False, True]
    assert all(parameter.grad is None for parameter in spy.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"suites": ["clean", "pdg"]}, r"unknown suite 'pdg': .*\. Did you mean pgd"),
        ({"suites": []}, "nothing to evaluate"),
        ({"models": {}}, "nothing to evaluate"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_requests_stop_before_anything_is_measured(digits: Data, change: dict[str, object], message: str) -> None:
    spy = Spy()
    request: dict = {"models": {"m": spy}, "suites": ["clean"], "progress": False} | change
    with pytest.raises(RecastError, match=message):
        evaluate(data=digits, **request)
    assert spy.seen == []


@pytest.mark.parametrize("option", ["eps", "neighbours"])
def test_lists_of_options_are_not_empty(option: str) -> None:
    with pytest.raises(RecastError, match=f"{option} must be numbers, got none"):
        Options(**{option: ()})  # type: ignore[arg-type]


def test_no_validation_images(digits: Data) -> None:
    empty = replace(digits, val=digits.val.subset(torch.empty(0, dtype=torch.long)))
    with pytest.raises(RecastError, match="digits has no validation images"):
        evaluate({"m": Spy()}, ["clean"], empty, progress=False)
