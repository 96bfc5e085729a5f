"""The sentence at the top says what was measured, and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recast.report.read.run import read_run
from recast.report.text.verdict import joint_verdict, verdict

MakeRun = Callable[..., Path]


def said(path: Path) -> str:
    return verdict(read_run(path)).replace("\u00a0", " ")


def rewrite(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(found | changes), encoding="utf-8")


def test_exact_and_better(make_run: MakeRun) -> None:
    assert said(make_run(gain=5 / 3.6, epochs=5)) == (
        "The recast model starts with the parent’s exact predictions (1,797 of 1,797, bit for bit) and after 5 epochs "
        "reaches 98.2 %, 1.4 points above the parent fine-tuned the same way "
        "(5 of 360 images; one seed: a first look, not evidence)."
    )


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (-0.8, "reaches 96.0 %, 0.8 points below the parent fine-tuned the same way (3 of 360 images; one seed"),
        (0.0, "reaches 96.8 %, the same as the parent fine-tuned the same way (one seed: a first look"),
        (0.04, "0.04 points above the parent"),
    ],
)
def test_not_better(make_run: MakeRun, gain: float, words: str) -> None:
    assert words in said(make_run(gain=gain))


def test_rounding_errors_are_still_exact(make_run: MakeRun) -> None:
    path = make_run()
    rewrite(path / "verify.json", bitwise=False, max_relative_error=3.2e-7)
    assert "starts with the parent’s exact predictions (1,797 of 1,797, max relative error 3e−7)" in said(path)


@pytest.mark.parametrize("error", [2e-3, float("nan")])
def test_equal_predictions_are_not_equal_outputs(make_run: MakeRun, error: float) -> None:
    path = make_run()
    rewrite(path / "verify.json", bitwise=False, max_relative_error=error)
    assert "(1,797 of 1,797), though not with its exact outputs (max relative error" in said(path)


def test_one_changed_prediction_is_not_exact(make_run: MakeRun) -> None:
    path = make_run()
    rewrite(path / "verify.json", bitwise=False, max_relative_error=1e-7, argmax_agreement=1796 / 1797)
    assert said(path).startswith("The recast model does not start as its parent: 1,796 of 1,797 predictions agree")


def test_sigmoid_without_control(make_run: MakeRun) -> None:
    assert said(make_run(gate="sigmoid", control=False, gain=-0.6)) == (
        "The recast model does not start as its parent: 719 of 1,797 predictions agree (max relative error 0.79); "
        "after 10 epochs it reaches 96.2 %, 0.6 points above its parent; "
        "no parent was fine-tuned the same way, so more training alone may explain it."
    )


def test_below_its_parent_without_control(make_run: MakeRun) -> None:
    words = said(make_run(control=False, gain=-3))
    assert "1.8 points below its parent; no parent was fine-tuned the same way, so there is no fair" in words


def test_untrained_and_unverified(make_run: MakeRun) -> None:
    assert said(make_run(epochs=0, verify=False)) == (
        "How the recast model started was not measured (no verify.json); "
        "it has not been trained; as it stands it reaches 95.6 %."
    )


def test_interrupted(make_run: MakeRun) -> None:
    path = make_run(rows=False)
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    (path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert "after 3 of 10 epochs" in said(path)


def test_without_rows_the_training_log_speaks(make_run: MakeRun) -> None:
    assert "reaches 97.2 %, 0.4 points above the parent fine-tuned the same way (one seed" in said(make_run(rows=False))


def test_seeds_give_a_mean(make_run: MakeRun) -> None:
    runs = [read_run(make_run(f"s{seed}", seed=seed, gain=gain)) for seed, gain in enumerate((0.4, 0.8, -0.3))]
    assert joint_verdict(runs).replace("\u00a0", " ") == (
        "All 3 recast models start with their parent’s exact predictions; over 3 seeds they are on average 0.3 points "
        "above the parent fine-tuned the same way (95 % interval −1.1 to 1.7)."
    )


def test_different_recipes_give_no_mean(make_run: MakeRun) -> None:
    runs = [read_run(make_run("a", gain=0.4)), read_run(make_run("b", gate="sigmoid", gain=-0.5, seed=1))]
    assert joint_verdict(runs).replace("\u00a0", " ") == (
        "1 of 2 recast models start with their parent’s exact predictions; of 2 runs with a parent fine-tuned the same "
        "way, the recast model ends above it in 1, below it in 1 and level in 0."
    )
