import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.data import Data
from recast.lab.evaluation import Options, runner
from recast.lab.evaluation.context import NotMeasured
from recast.lab.evaluation.runner import evaluate, measure, open_context


def rows_of(models: Any, data: Data, suites: Any = "clean", size: int = 20, folder: Any = None, **options: Any) -> Any:
    return evaluate(models, suites, data, cache=folder, options=Options(**options), batch_size=size, progress=False)


def run(model: nn.Module, data: Data, folder: Path, suite: str = "clean", size: int = 20, **options: Any) -> Any:
    return [row.value for row in rows_of(model, data, suite, size, folder, **options)]


def test_other_weights_images_normalisation_or_options_are_measured(digits: Data, tmp_path: Path, spy: Any) -> None:
    expected = run(spy(), digits, tmp_path)
    turned = spy()
    turned.scale = -1.0  # in no tensor and in no repr
    for model, data in (
        (spy(seed=1), digits),
        (turned, digits),
        (spy(), replace(digits, val=digits.val.subset(torch.arange(49, -1, -1)))),
        (spy(), replace(digits, mean=(0.5, 0.5, 0.5))),
        (spy(), replace(digits, val=replace(digits.val, labels=digits.val.labels.flip(0)))),
    ):
        values = run(model, data, tmp_path)
        assert model.seen == 50
        assert values != expected or data.val is not digits.val
    flipped = replace(digits, train=replace(digits.train, labels=digits.train.labels.flip(0)))
    values = [run(spy(), data, tmp_path, "knn", neighbours=(1,)) for data in (digits, digits, flipped)]
    assert values[0] == values[1] != values[2]
    attacked = spy()
    for options, passes in (
        ({"eps": (1.0,)}, 2),
        ({"eps": (1.0,), "steps": 7}, 2),  # not an option of FGSM
        ({"eps": (2.0,)}, 4),
        ({"eps": (1.0,)}, 4),  # still stored
    ):
        run(attacked, digits, tmp_path, "fgsm", **options)
        assert attacked.seen == 50 * passes


def test_scores_of_older_code_are_measured_again(digits: Data, tmp_path: Path, spy: Any, monkeypatch: Any) -> None:
    model = spy()
    for version, images in ((1, 50), (2, 100), (2, 100)):
        monkeypatch.setattr("recast.lab.evaluation.cache.SCORES_VERSION", version)
        run(model, digits, tmp_path)
        assert model.seen == images


@pytest.mark.parametrize(("batch_size", "rest"), [(20, 30), (7, 36)])  # from the batch that holds image 20
def test_an_interrupted_pass_goes_on(digits: Data, tmp_path: Path, batch_size: int, rest: int, spy: Any) -> None:
    """A batch that the first of two models has scored, but not the second, does not count."""
    expected = [row.value for row in rows_of({"a": spy(), "b": spy(1)}, digits, folder=str(tmp_path / "at once"))]
    first, second = spy(), spy(1)
    second.limit[0] = 20
    with pytest.raises(KeyboardInterrupt):
        rows_of({"a": first, "b": second}, digits, folder=tmp_path / "cache")
    second.limit[0] = 10**9
    rows = rows_of({"a": first, "b": second}, digits, size=batch_size, folder=tmp_path / "cache")
    assert [row.value for row in rows] == pytest.approx(expected, rel=1e-6)
    assert (first.seen, second.seen) == (40 + rest, 20 + rest)


def test_a_damaged_file_is_measured_anew(digits: Data, tmp_path: Path, spy: Any) -> None:
    expected = run(spy(), digits, tmp_path)
    (path,) = tmp_path.rglob("*.npz")
    content = path.read_bytes()
    listed = bytearray(content)  # what zip's own checksums do not cover: the entry behind it is lost
    listed[content.rindex(b"PK\x01\x02", 0, content.rindex(b"PK\x01\x02")) + 33] ^= 1
    for damaged in (content[: len(content) // 2], b"not a zip", bytes(listed)):
        path.write_bytes(damaged)
        model = spy()
        with pytest.warns(UserWarning, match=rf"{path.name} is damaged .*: measuring again"):
            assert run(model, digits, tmp_path) == expected
        assert model.seen == 50


def test_a_model_that_a_suite_leaves_out_is_asked_again(digits: Data, tmp_path: Path, spy: Any) -> None:
    """Of `resolution`, a refused size is not kept as scored; an error in the middle is no refusal."""

    class Moody(spy):
        fails_at = 0  # of the class: no setting of the model

        def forward(self, x: Tensor) -> Tensor:
            if self.seen >= Moody.fails_at:
                raise RuntimeError("not now")
            return super().forward(x)

    model = Moody()
    with pytest.warns(UserWarning, match="does not support images of 16x16"):
        assert run(model, digits, tmp_path, "resolution", sizes=("16",)) == []
    Moody.fails_at = 20
    with pytest.raises(RuntimeError, match="not now"):
        run(model, digits, tmp_path, "resolution", sizes=("16",))
    Moody.fails_at = 10**9
    (top1,) = run(model, digits, tmp_path, "resolution", sizes=("16",))
    assert top1 == run(model, digits, tmp_path)[0]


def test_suites_of_the_same_images_share_the_forward_pass(digits: Data, spy: Any) -> None:
    model = spy()
    rows_of(model, digits, ["clean", "fgsm", "pgd"], 50, eps=(0, 4), steps=2)
    # both passes of six images; gradient and clean; attacked by FGSM; second step of PGD, attacked by PGD
    assert model.batches == [6] * 2 + [50] * 4


@pytest.mark.parametrize("order", [["clean", "fgsm"], ["fgsm", "clean"]])
def test_clean_logits_come_from_the_pass_of_the_gradient_where_both_are_equal(
    digits: Data, tmp_path: Path, spy: Any, order: list[str]
) -> None:
    model = spy()
    shared = rows_of(model, digits, order, eps=(4,))
    # 20 images twice and 10: gradient, attacked; of each shape two images to compare, with and without a gradient
    assert sorted(model.batches) == [2] * 4 + [10] * 2 + [20] * 4
    alone = [rows_of(spy(), digits, suite, eps=(4,)) for suite in order]
    assert shared == [row for rows in alone for row in rows]
    model = spy()
    rows_of(model, digits, "fgsm", eps=(4,), folder=tmp_path)
    rows_of(model, digits, order, eps=(4,), folder=tmp_path)
    assert model.batches[6:] == [20, 20, 10]  # no attack is left that needs a gradient


class Drawing(nn.Module):
    """Adds noise that is mostly too small to change a logit, from the generator of torch, NumPy or Python."""

    def __init__(self, base: nn.Module, draw: Any) -> None:
        super().__init__()
        self.base, self.draw = base, draw

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1e-30 * float(self.draw())


class Moded(nn.Module):
    """Computes otherwise where no gradient is needed, as fused kernels may."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * (1 if torch.is_grad_enabled() else 1 + 1e-6)


@pytest.mark.parametrize(
    "other",
    [
        lambda base: Drawing(base, lambda: torch.rand(())),
        lambda base: Drawing(base, np.random.rand),
        lambda base: Drawing(base, random.random),
        Moded,
    ],
)
def test_networks_that_draw_or_differ_without_a_gradient_keep_a_clean_pass(digits: Data, spy: Any, other: Any) -> None:
    model, same = spy(), spy()
    rows_of({"other": other(model), "same": same}, digits, ["clean", "fgsm"], eps=(4,))
    assert sorted(model.batches) == [2] * 4 + [10] * 3 + [20] * 6
    assert sorted(same.batches) == [2] * 4 + [10] * 2 + [20] * 4


def test_other_classes_are_refused_missing_data_is_named_and_the_rest_is_measured(
    digits: Data, tmp_path: Path, spy: Any
) -> None:
    with pytest.raises(RecastError, match="imagenet-a requires ImageNet's 1000 classes"):
        measure(open_context({"m": spy()}, digits), ["clean", "imagenet-a"], progress=False)
    digits = replace(digits, classes=[str(number) for number in range(1000)])
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 1000))
    context = open_context({"m": model}, digits, options=Options(sets=tmp_path))
    results = measure(context, ["imagenet-a", "clean"], progress=False)
    assert {row.suite for row in results.rows} == {"clean"}
    assert len(results.not_measured) == 1
    with pytest.raises(NotMeasured, match="imagenet-a"):
        rows_of(model, digits, ["imagenet-a", "clean"], sets=tmp_path)


def test_differences_are_paired_and_between_arms(trained: nn.Module, digits: Data, spy: Any) -> None:
    arms = {"parent": trained, "recast": trained, "finetuned": spy()}
    results = measure(open_context(arms, digits), ["clean"], progress=False)
    pairs = {(line.model, line.against, line.metric): line for line in results.differences}
    same, ahead = pairs["recast", "parent", "top1"], pairs["recast", "finetuned", "top1"]
    assert (same.value, same.low) == (0.0, -same.high)
    assert same.high == pytest.approx(100 * 1.96**2 / (50 + 1.96**2), rel=1e-3)  # 0 of 50 images
    assert pairs["recast", "parent", "loss"].high == math.inf  # the same losses determine no interval
    values = {row.model: row.value for row in results.rows if row.metric == "top1"}
    assert ahead.value == pytest.approx(values["recast"] - values["finetuned"])
    assert 0 < ahead.low < ahead.value < ahead.high
    assert len(pairs) == 3 * 3


def test_all_models_see_the_same_pixels_in_batches_of_any_size(digits: Data, spy: Any) -> None:
    first, second = spy(), spy()
    in_small_batches = rows_of({"a": first, "b": second}, digits, ["clean", "basic"], 20)
    assert len(first.pixels) == 3 * 26
    assert all(pixels.equal(same) for pixels, same in zip(first.pixels, second.pixels, strict=True))
    at_once = rows_of({"a": first, "b": second}, digits, ["clean", "basic"], 50)
    for row, expected in zip(in_small_batches, at_once, strict=True):
        assert (row.metric, row.n) == (expected.metric, expected.n)
        assert (row.value, row.low, row.high) == pytest.approx((expected.value, expected.low, expected.high), abs=1e-5)


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


def test_processes_take_turns_at_batches(
    digits: Data, tmp_path: Path, spy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads stand for two processes. The first has all scores and writes them, also where the second fails."""
    turn, barrier, parts = threading.local(), threading.Barrier(2), [None, None]

    def gathered(value: Any) -> Any:
        parts[turn.number] = value
        barrier.wait()
        everyone = list(parts)
        barrier.wait()
        return everyone

    lock = threading.Lock()  # weights are drawn from one generator

    def process(number: int, folder: str, fails: bool = False) -> Any:
        turn.number = number
        with lock:
            model = spy()
        if fails and number == 1:
            model.forward = lambda _images: torch.zeros(3, 3, 3)
        context = replace(open_context({"model": model}, digits, 20), process=number, processes=2)
        try:
            results = measure(context, ["clean"], cache=tmp_path / folder, progress=False)
        except RecastError as error:
            return type(error).__name__, model.seen
        return [row.value for row in results.rows], model.seen

    expected = run(spy(), digits, tmp_path / "alone")
    monkeypatch.setattr(runner, "gathered_objects", gathered)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(process, range(2), ("a", "a"))) == [(expected, 30), ([], 20)]
        failed = list(pool.map(process, range(2), ("b", "b"), (True, True)))
    assert failed == [("ReportedByFirst", 20), ("RecastError", 0)]
    (file,) = (tmp_path / "b" / "clean").iterdir()
    assert int(np.load(file)["done"]) == 20


def test_suites_that_finished_a_batch_are_not_measured_again(
    digits: Data, tmp_path: Path, spy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("recast.lab.evaluation.attacks.pgd", stop)
    with pytest.raises(KeyboardInterrupt):
        measure(open_context({"model": spy()}, digits, 50), ["clean", "fgsm"], cache=tmp_path, progress=False)
    (file,) = (tmp_path / "clean").iterdir()
    assert int(np.load(file)["done"]) == 50
