"""Recipes against the numbers of their papers."""

import csv
from fractions import Fraction
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import recast
from recast import Plan
from recast.lab.recipes import make_recipe, recipes
from recast.lab.training.optim import WarmupDecay

DEIT = (
    "task.auto_augment=rand-m9-mstd0.5-inc1 task.mixup=0.8 task.cutmix=1.0 task.label_smoothing=0.1 task.erasing=0.25 "
    "augment.repeats=3 optim.warmup_epochs=5.0 optim.min_lr=1e-05 regularization.drop_path=0.1"
)
"""DeiT (Touvron et al. 2021), Table 9; T-CNN, PRS, CaiT and ResMLP refer to it."""
VALUES = {
    "deit_base": f"{DEIT} data.crop_pct=0.875 optim.base_batch=512 task.loss.kind=ce where=['none']",
    "deit_base_distilled": f"{DEIT} task.teacher.targets.kind=hard task.teacher.teacher_model=regnety_160.deit_in1k",
    "cait_s36": DEIT.replace("path=0.1", "path=0.2") + " data.crop_pct=1.0",
    "transfer_cait": "data.crop_pct=0.875 optim.weight_decay=0.05 regularization.drop_path=0.2 optim.base_batch=512",
    "transfer_deit3": "data.crop_pct=1.0 optim.lr=0.0003 optim.weight_decay=0.02 regularization.drop_path=0.0",
    "resmlp_24": f"{DEIT} data.crop_pct=0.9 optim.weight_decay=0.2 optim.clip_grad=1.0",
    "deit3_base": "task.auto_augment=3a augment.color_jitter=0.3 augment.repeats=3 task.mixup=0.8 task.cutmix=1.0 "
    "task.erasing=0.0 task.label_smoothing=0.0 task.loss.kind=bce task.loss.bce_threshold=0.0 optim.clip_grad=1.0",
    "rsb_a2": "task.auto_augment=rand-m7-mstd0.5-inc1 task.mixup=0.1 task.cutmix=1.0 task.loss.kind=bce "
    "augment.repeats=3 data.crop_pct=0.95",
    "patchconvnet_s60": "task.auto_augment=rand-m7-mstd0.5-inc1 task.mixup=0.8 task.cutmix=1.0 task.erasing=0.0 "
    "task.label_smoothing=0.1 augment.repeats=3 optim.clip_grad=None regularization.ema_decay=None",
    "tcnn": f"{DEIT} recast.gate=sigmoid recast.lambda_init=1.0 recast.alpha=1.0 recast.stride=remove "
    "optim.gate_lr=0.1 recast.content_heads=all recast.project_values=True",
    "prs_cmhsa3": f"{DEIT} recast.gate=bias schedule.kind=progressive schedule.order=last_first data.name=cifar100",
    "grafit": "task.kind=embed task.projector.dim=256 task.projector.hidden=4096 task.projector.sigma=0.05 "
    "task.projector.target_decay=0.996 task.projector.views=4 optim.weight_decay=0.0001",
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_of_the_paper_s_table(name: str) -> None:
    recipe: Any = make_recipe(name)
    values = dict(word.split("=") for word in VALUES[name].split())
    assert {key: str(attrgetter(key)(recipe)) for key in values} == values


@pytest.mark.parametrize(("size", "boxes", "masks"), [("s60", 46.4, 41.3), ("s120", 47.0, 41.9)])
def test_mask_rcnn_has_cocos_long_schedule(size: str, boxes: float, masks: float) -> None:
    """A tenth of the rate after 27 of 36 epochs, and again after 33."""
    recipe = make_recipe(f"patchconvnet_{size}_coco")
    schedule = WarmupDecay(recipe.optim, recipe.epochs, 100, recipe.data.batch_size)
    rates = [schedule.factor(100 * epoch) for epoch in (1, 26, 27, 32, 33, 35)]
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])
    assert (recipe.epochs, recipe.optim.lr, recipe.optim.weight_decay) == (36, 1e-4, 0.05)
    assert recipes()[f"patchconvnet_{size}_coco"].expected.startswith(f"{boxes} box AP, {masks} mask AP")


def test_no_recipe_is_there_twice() -> None:
    first: dict[str, str] = {}
    for name in recipes():
        twin = first.setdefault(repr(make_recipe(name)), name)
        assert twin == name or recipes()[twin].after != recipes()[name].after, f"{name} = {twin}"


def test_the_quickstart_expects_what_was_measured() -> None:
    table = Path(__file__).parents[2] / "results" / "odd_digit.csv"
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    measured = {(row["arm"], row["metric"]): row for row in rows}
    for arm in ("finetuned", "recast"):
        assert f"{float(measured[arm, 'clean top1']['mean']):.1f} %" in recipes()["odd_digit"].expected


def test_the_small_recipes_expect_what_was_measured() -> None:
    table = Path(__file__).parents[2] / "results" / "small_recipes.csv"
    rows = [row for row in csv.DictReader(table.read_text(encoding="utf-8").splitlines()) if row["seed"] == "0"]
    measured = {row["recipe"]: row for row in rows if row["recipe"].endswith("_small")}
    assert len(measured) == 14
    for name, row in measured.items():
        assert recipes()[name].expected.startswith(f"{float(row['top1']):.1f} % top-1 with seed 0")
        assert not row["heads"] or f"{row['awake']} of {row['heads']} heads awake" in recipes()[name].expected


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
        ("tcnn_star_100", 4.089, 7.255),
        ("prs_cmhsa3", 11.907, 16.506),
        ("prs_cmhsa5", 5.732, 16.506),
    ):
        plan = planned(name)
        assert [round(cost.macs / 1e9, 3) for cost in (plan.before, plan.after)] == gmacs
    operations = 1_281_167 * 6e9 * (100 * 4.089 + 300 * 7.255)
    assert f"\nCost: {operations / 1e18:.3g} EFLOP" in recipes()["tcnn_star_100"].text
