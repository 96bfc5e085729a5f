"""Recipes by name: `make_recipe("finetune")`. A recipe is a function that returns a `Recipe`; no torch in here."""

from __future__ import annotations

from collections.abc import Callable

from recast.config import Recipe
from recast.errors import RecastError, suggest
from recast.recipe import load_recipe, save_recipe
from recast.recipes.digits import digits as _digits
from recast.recipes.finetune import finetune as _finetune
from recast.recipes.tcnn import tcnn as _tcnn

__all__ = ["RECIPES", "load_recipe", "make_recipe", "save_recipe"]

RECIPES: dict[str, Callable[[], Recipe]] = {"finetune": _finetune, "tcnn": _tcnn, "digits": _digits}


def make_recipe(name: str) -> Recipe:
    """A fresh recipe. Raises RecastError for an unknown name."""
    if name not in RECIPES:
        raise RecastError(
            f"unknown recipe {name!r}: expected {', '.join(RECIPES)} or a .yaml file.{suggest(name, RECIPES)}"
        )
    return RECIPES[name]()
