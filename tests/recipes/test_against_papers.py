"""Where a recipe once differed from its paper, or where papers and published code differ: what is taken, and said."""

from __future__ import annotations

import csv
from operator import attrgetter
from pathlib import Path

import pytest
import timm
import torch

import recast.papers.patchconvnet.network  # noqa: F401  registers the networks with timm
from recast.lab.recipes import RECIPES, make_recipe
from recast.lab.training.distill import soft_loss
from recast.lab.training.optim import WarmupDecay


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_soft_distillation_is_the_paper_s_equation(size: str) -> None:
    """τ²·KL of each image, the mean over the batch: here one image, by hand."""
    config = make_recipe(f"deit_{size}_soft").distill
    student, teacher = torch.tensor([[0.0, 3.0]]), torch.tensor([[3.0, 0.0]])
    p = torch.tensor([1.0, 2.718281828459045])  # softmax of (0, 3)/3 and, turned round, of (3, 0)/3
    p = p / p.sum()
    kl = (p * (p / p.flip(0)).log()).sum()
    assert (config.teacher_weight, config.temperature) == (0.1, 3.0)
    assert torch.allclose(soft_loss(student, teacher, config.temperature, config.reduction), 9 * kl)
    assert "--reduction numel" in RECIPES[f"deit_{size}_soft"].inferred


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("deit_base_384", "epochs", 25, "the code's command: 30"),
        ("deit_base_distilled_384", "epochs", 25, "the code's command: 30"),
        ("deit3_base_384", "augment.erasing", 0.0, "no erasing, as in the commands"),
        ("resmlp_24", "data.batch_size", 2048, "batches of 2048 (the author"),
        ("resmlp_big_24", "regularization.layer_scale", 1e-6, "by the paper's rule 1e-5"),
        ("cait_xxs36", "regularization.layer_scale", 1e-5, "the paper's table: 1e-6"),
        ("rsb_a2", "augment.mixup", 0.1, "the table of DeiT III prints 0.2"),
    ],
)
def test_where_sources_differ_the_recipe_says_which_it_follows(name: str, field: str, value: float, said: str) -> None:
    assert attrgetter(field)(make_recipe(name)) == value
    assert said in RECIPES[name].inferred


def test_patchconvnet_has_one_test_crop() -> None:
    """That of the registered networks, whether a released one is evaluated or a recipe trains one."""
    for name in RECIPES:
        if name.startswith("patchconvnet") and not name.endswith(("_ade20k", "_coco")):
            model = make_recipe(name).model.name
            assert make_recipe(name).data.crop_pct == timm.get_pretrained_cfg(model).crop_pct, name


@pytest.mark.parametrize(("size", "miou", "multi"), [("s60", 46.0, 46.9), ("b60", 48.1, 48.6), ("b120", 49.4, 50.3)])
def test_upernet_trains_as_xcit_s(size: str, miou: float, multi: float) -> None:
    """160,000 updates of 16 crops of 512 pixels, 1,500 of them warm-up, AdamW at 6e-5 falling to 0 in a line."""
    recipe = make_recipe(f"patchconvnet_{size}_ade20k")
    updates = 20_210 // recipe.data.batch_size
    assert recipe.epochs * updates == pytest.approx(160_000, rel=5e-3)
    assert recipe.optim.warmup_epochs * updates == pytest.approx(1500, rel=5e-3)
    assert (recipe.data.batch_size, recipe.data.img_size, recipe.augment.resize) == (16, 512, (0.5, 2.0))
    assert (recipe.optim.opt, recipe.optim.lr, recipe.optim.weight_decay) == ("adamw", 6e-5, 0.01)
    assert (recipe.optim.betas, recipe.optim.decay, recipe.optim.min_lr) == ((0.9, 0.999), "linear", 0.0)
    assert RECIPES[f"patchconvnet_{size}_ade20k"].expected.startswith(
        f"{miou} % mIoU, over scales and mirror images {multi}"
    )


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


def test_what_is_in_no_paper_is_not_trained_or_says_where_it_is_from() -> None:
    assert [name for name in RECIPES if "medium" in name] == [], "ViT-M: weights were published, no settings"
    assert "of the published weights; in no paper" in RECIPES["patchconvnet_s60_multi_finetune"].expected


def test_the_quickstart_expects_what_was_measured() -> None:
    table = Path(__file__).parents[2] / "results" / "odd_digit.csv"
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    measured = {(row["arm"], row["metric"]): row for row in rows}
    for arm in ("finetuned", "recast"):
        assert f"{float(measured[arm, 'clean top1']['mean']):.1f} %" in RECIPES["odd_digit"].expected


@pytest.mark.parametrize(
    ("name", "weights", "projector"),
    [  # of labels, neighbours and instances
        ("grafit", (0.0, 1.0, 1.0), ("mlp", 256)),
        ("grafit_fc", (0.0, 1.0, 1.0), ("linear", 128)),
        ("snca_plus", (0.0, 1.0, 0.0), ("mlp", 256)),
        ("coarse_ce_instance", (1.0, 0.0, 1.0), ("mlp", 256)),
    ],
)
def test_grafit_s_losses_and_settings(name: str, weights: tuple[float, ...], projector: tuple[str, int]) -> None:
    """The rows of Grafit's ablation; 0.1 × batch/256 for 600 epochs, 4 views on ImageNet, σ = 0.05."""
    recipe, baseline = make_recipe(name), make_recipe("coarse_ce")
    found = recipe.embedding
    assert (found.label_weight, found.knn_weight, found.instance_weight) == weights
    assert (found.projector, found.dim, found.sigma) == (*projector, 0.05)
    assert found.views == (4 if found.instance_weight else 1)
    assert (recipe.epochs, recipe.optim.lr, recipe.optim.base_batch, recipe.data.batch_size) == (600, 0.1, 256, 1024)
    assert (recipe.data.labels, recipe.optim.opt, recipe.optim.momentum) == ("coarse", "sgd", 0.9)
    recipe.embedding = baseline.embedding
    assert recipe == baseline
    assert not baseline.embedding.is_on
