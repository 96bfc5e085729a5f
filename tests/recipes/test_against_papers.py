"""Where a recipe once differed from its paper, or where papers and published code differ: what is taken, and said."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

import recast.papers.patchconvnet.network  # noqa: F401  registers the networks with timm
from recast.lab.recipes import RECIPES, make_recipe
from recast.lab.training.optim import WarmupDecay


@pytest.mark.parametrize(("size", "boxes", "masks"), [("s60", 46.4, 41.3), ("s120", 47.0, 41.9)])
def test_mask_rcnn_has_cocos_long_schedule(size: str, boxes: float, masks: float) -> None:
    """A tenth of the rate after 27 of 36 epochs, and again after 33."""
    recipe = make_recipe(f"patchconvnet_{size}_coco")
    schedule = WarmupDecay(recipe.optim, recipe.epochs, 100, recipe.data.batch_size)
    rates = [schedule.factor(100 * epoch) for epoch in (1, 26, 27, 32, 33, 35)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert (recipe.epochs, recipe.optim.lr, recipe.optim.weight_decay) == (36, 1e-4, 0.05)
    assert RECIPES[f"patchconvnet_{size}_coco"].expected.startswith(f"{boxes} box AP, {masks} mask AP")


def test_no_recipe_is_there_twice() -> None:
    first: dict[str, str] = {}
    for name in RECIPES:
        twin = first.setdefault(repr(make_recipe(name)), name)
        assert twin == name or RECIPES[twin].after != RECIPES[name].after, f"{name} = {twin}"


def test_the_quickstart_expects_what_was_measured() -> None:
    table = Path(__file__).parents[2] / "results" / "odd_digit.csv"
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    measured = {(row["arm"], row["metric"]): row for row in rows}
    for arm in ("finetuned", "recast"):
        assert f"{float(measured[arm, 'clean top1']['mean']):.1f} %" in RECIPES["odd_digit"].expected
