"""What is asked is checked; suites share passes and pixels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.evaluation import Options
from recast.lab.evaluation.context import NotMeasured
from recast.lab.evaluation.runner import evaluate, measure, open_context
from recast.lab.records import Row


def rows_of(models: Any, data: Data, suites: Any = "clean", size: int = 20, **options: Any) -> list[Row]:
    return evaluate(models, suites, data, options=Options(**options), batch_size=size, progress=False)


def test_a_refused_size_is_left_out(digits: Data, spy: Any) -> None:
    """In `resolution`; an error in the middle is no refusal."""

    class Moody(spy):
        fails_at = 0  # of the class: no setting of the model

        def forward(self, x: Tensor) -> Tensor:
            if self.seen >= Moody.fails_at:
                raise RuntimeError("not now")
            return super().forward(x)

    model = Moody()
    with pytest.warns(UserWarning, match="does not support images of 16x16"):
        assert rows_of(model, digits, "resolution", sizes=("16",)) == []
    Moody.fails_at = 20
    with pytest.raises(RuntimeError, match="not now"):
        rows_of(model, digits, "resolution", sizes=("16",))
    Moody.fails_at = 10**9
    (top1,) = rows_of(model, digits, "resolution", sizes=("16",))
    assert top1.value == rows_of(model, digits)[0].value


def test_suites_of_the_same_images_share_the_forward_pass(digits: Data, spy: Any) -> None:
    model = spy()
    rows_of(model, digits, ["clean", "fgsm", "pgd"], 50, eps=(0, 4), steps=2)
    # clean; gradient; attacked by FGSM; the second step of PGD (the first shares the gradient), attacked by PGD
    assert model.batches == [50] * 5


def test_missing_data_is_named_and_the_rest_is_measured(digits: Data, tmp_path: Path, spy: Any) -> None:
    context = open_context({"m": spy()}, digits, options=Options(sets=tmp_path))
    results = measure(context, ["imagenet-a", "clean"], progress=False)
    assert {row.suite for row in results.rows} == {"clean"}
    assert len(results.not_measured) == 1
    with pytest.raises(NotMeasured, match="imagenet-a"):
        rows_of(spy(), digits, ["imagenet-a", "clean"])


def test_differences_are_paired_and_between_arms(trained: nn.Module, digits: Data, spy: Any) -> None:
    arms = {"parent": trained, "recast": trained, "finetuned": spy()}
    results = measure(open_context(arms, digits), ["clean"], progress=False)
    pairs = {(d.model, d.against, d.metric): d for d in results.differences}
    same = pairs["recast", "parent", "top1"]
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    ahead = pairs["recast", "finetuned", "top1"]
    values = {row.model: row.value for row in results.rows if row.metric == "top1"}
    assert ahead.value == pytest.approx(values["recast"] - values["finetuned"])
    assert 0 < ahead.low < ahead.value < ahead.high
    assert len(pairs) == 3 * 3


def test_all_models_see_the_same_pixels_in_batches_of_any_size(digits: Data, spy: Any) -> None:
    first, second = spy(), spy()
    few = rows_of({"a": first, "b": second}, digits, ["clean", "basic"], 20)
    assert len(first.pixels) == 3 * 26
    assert all(mine.equal(theirs) for mine, theirs in zip(first.pixels, second.pixels, strict=True))
    for row, other in zip(few, rows_of({"a": first, "b": second}, digits, ["clean", "basic"], 50), strict=True):
        assert (row.metric, row.n) == (other.metric, other.n)
        assert (row.value, row.low, row.high) == pytest.approx((other.value, other.low, other.high), abs=1e-5)


def test_training_flags_are_restored_each(digits: Data, spy: Any) -> None:
    model = spy().train()
    model.limit[0] = 20
    model.layers[1].eval()  # as a frozen part would be
    with pytest.raises(KeyboardInterrupt):
        rows_of(model, digits, "fgsm")
    assert [module.training for module in model.modules()] == [True, True, True, False, True]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_requests_stop_before_anything_is_measured(digits: Data, spy: Any) -> None:
    model, empty = spy(), replace(digits, val=digits.val.subset(torch.empty(0, dtype=torch.long)))
    for change in ({"suites": ["clean", "pdg"]}, {"suites": []}, {"models": {}}, {"batch_size": 0}, {"data": empty}):
        request: Any = {"models": {"m": model}, "suites": ["clean"], "data": digits, "progress": False} | change
        with pytest.raises(RecastError):
            evaluate(**request)
    assert model.seen == 0
