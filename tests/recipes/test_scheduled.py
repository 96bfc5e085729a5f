"""The recipes that recast during training against the papers: PRS, C-MHSA and T-CNN*, written down here once more."""

from fractions import Fraction
from functools import cache

import pytest
import timm
import torch

import recast
from recast import Plan
from recast.lab.recipes import RECIPES, make_recipe


@cache
def planned(name: str) -> Plan:
    recipe = make_recipe(name)
    classes, side = 1000 if recipe.data.name == "imagenet" else 100, recipe.data.img_size or 32
    with torch.device("meta"):
        network = timm.create_model(recipe.model.name, num_classes=classes)
        where = recipe.where[0] if len(recipe.where) == 1 else recipe.where
        return recast.plan(network, torch.zeros(1, 3, side, side), recipe.recast, where=where)


def dates(name: str) -> list[int]:
    """Of the layers in the network's order."""
    recipe = make_recipe(name)
    schedule = recipe.schedule.dated(planned(name), recipe.epochs)
    assert schedule is not None
    return [schedule.dates[layer] for layer in schedule.layers]


@pytest.mark.parametrize(("name", "t1"), [("tcnn_hybrid", 0), ("tcnn_star_100", 100), ("tcnn_star_300", 300)])
def test_t_cnn_star(name: str, t1: int) -> None:
    """T-CNN, section 5: the last stage at once, "we keep the same optimizer and learning rate"."""
    assert dates(name) == [t1 + 1] * 3
    optim = make_recipe(name).optim
    assert (optim.opt, optim.gate_lr) == ("sgd", optim.lr)


@pytest.mark.parametrize("name", ["prs_cmhsa3", "prs_cmhsa5", "cmhsa3", "cmhsa5"])
def test_prs_and_two_stages_on_cifar_100(name: str) -> None:
    """Table 3: six layers of 9 heads, width 768; Eq. 7: layer l is a convolution while t <= 400 (1 - l/7)."""
    plan = planned(name)
    assert [(step.geometry.kernel, step.input) for step in plan.steps] == [((3, 3), (768, 14, 14))] * 6
    thresholds = [400 * (1 - Fraction(layer, 7)) for layer in range(1, 7)]
    first = [next(t for t in range(1, 401) if t > threshold) for threshold in thresholds]
    assert first == [343, 286, 229, 172, 115, 58]
    assert dates(name) == (first if name.startswith("prs") else [201] * 6)


def test_multiply_adds_that_the_costs_are_counted_from() -> None:
    """T-CNN*: 100 epochs of 4.089 and 300 of 7.255 GMACs, 1,281,167 images, three passes of two operations."""
    for name, *gmacs in (
        ("tcnn_star_100", 4.089, 7.255), ("prs_cmhsa3", 11.907, 16.506), ("prs_cmhsa5", 5.732, 16.506),
    ):  # fmt: skip
        plan = planned(name)
        assert [round(cost.macs / 1e9, 3) for cost in (plan.before, plan.after)] == gmacs
    operations = 1_281_167 * 6e9 * (100 * 4.089 + 300 * 7.255)
    assert f"\nCost: {operations / 1e18:.3g} EFLOP" in RECIPES["tcnn_star_100"].text
