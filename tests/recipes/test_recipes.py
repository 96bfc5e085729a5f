from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import recast.recipes
from recast.config import Recipe
from recast.errors import RecastError
from recast.recipes import RECIPES, load_recipe, make_recipe, save_recipe
from recast.recipes.digits import digits_parent


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_complete_and_readable(name: str, tmp_path: Path) -> None:
    recipe = make_recipe(name)
    assert isinstance(recipe, Recipe)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert make_recipe(name) is not recipe


def test_every_recipe_file_is_registered_and_says_how_to_run_it() -> None:
    files = [module.name for module in pkgutil.iter_modules(recast.recipes.__path__)]
    assert sorted(files) == sorted(RECIPES)
    for name in files:
        module = importlib.import_module(f"recast.recipes.{name}")
        for word in ("    recast ", "Paper", "Time", "umber"):
            assert word.lower() in (module.__doc__ or "").lower(), f"{name}: {word}"


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(RecastError, match=r"unknown recipe 'tcn'.*Did you mean tcnn"):
        make_recipe("tcn")


def test_recipes_do_not_import_torch() -> None:
    code = (
        "import sys, recast.recipes, recast.recipe; print([m for m in ('torch', 'timm', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_papers_numbers() -> None:
    """Transformed CNNs, section 3: 50 epochs of AdamW at 1e-4, 0.1 for λ, α = λ = 1, batches of 1024, no stride."""
    recipe = make_recipe("tcnn")
    assert (recipe.epochs, recipe.data.batch_size, recipe.data.img_size) == (50, 1024, 224)
    assert (recipe.optim.opt, recipe.optim.lr, recipe.optim.gate_lr) == ("adamw", 1e-4, 0.1)
    assert recipe.optim.warmup_epochs == 5
    config = recipe.recast
    assert (config.gate, config.alpha, config.lambda_init, config.stride) == ("sigmoid", 1.0, 1.0, "remove")


def test_the_digits_parent_is_what_the_digits_recipe_takes() -> None:
    parent, recipe = digits_parent(), make_recipe("digits")
    assert parent.model.name == recipe.model.name
    assert parent.data == recipe.data
