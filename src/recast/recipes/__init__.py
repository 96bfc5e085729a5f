"""Recipes by name: `make_recipe("finetune")`. A recipe is a function that returns a `Recipe`; no torch in here.

One file a paper. A recipe's docstring gives what it trains, the paper's experiment, the command, the published number,
the cost, and what the paper leaves open and is inferred here.
"""

from __future__ import annotations

from recast.errors import RecastError, suggest
from recast.recipes import attention_pool as pooling
from recast.recipes import cait, deit, deit3, patchconvnet, prs, resmlp, rsb, tcnn, tcnn_star
from recast.recipes.attention_pool import attention_pool as _attention_pool
from recast.recipes.attention_pool import attention_pool_quick as _attention_pool_quick
from recast.recipes.digits import digits as _digits
from recast.recipes.entry import Entry, RecipeFunction
from recast.recipes.finetune import finetune as _finetune
from recast.recipes.small import cifar10 as _cifar10
from recast.recipes.small import cifar100 as _cifar100
from recast.recipes.small import folder as _folder
from recast.run.config import Recipe
from recast.run.recipe import load_recipe, save_recipe

__all__ = ["AFTER", "NEEDS_WEIGHTS", "RECIPES", "load_recipe", "make_recipe", "recipes_by_paper", "save_recipe"]

OWN = "to start from"
_OWN: dict[str, RecipeFunction] = {
    "finetune": _finetune,
    "folder": _folder,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "attention_pool": _attention_pool,
    "attention_pool_quick": _attention_pool_quick,
    "digits": _digits,
}
_ENTRIES: dict[str, list[Entry]] = {
    paper.PAPER: paper.ENTRIES
    for paper in (tcnn, tcnn_star, prs, deit, deit3, cait, resmlp, patchconvnet, rsb, pooling)
}

RECIPES: dict[str, RecipeFunction] = _OWN | {
    entry.name: entry.function(paper) for paper, entries in _ENTRIES.items() for entry in entries
}
"""Every recipe."""

AFTER: dict[str, str] = {
    entry.name: entry.after for entries in _ENTRIES.values() for entry in entries if entry.after is not None
}
"""A later stage of a training → the recipe whose weights it starts from (`--checkpoint`)."""

NEEDS_WEIGHTS: frozenset[str] = frozenset(AFTER) | {"cifar10", "cifar100", "attention_pool", "attention_pool_quick"}
"""Recipes that mean nothing from random weights: they are to be given `--checkpoint` (or `--pretrained`)."""


def make_recipe(name: str) -> Recipe:
    """A fresh recipe. Raises RecastError for an unknown name."""
    if name not in RECIPES:
        raise RecastError(
            f"unknown recipe {name!r}: expected a name that `recast train --help` lists, or a .yaml file."
            f"{suggest(name, RECIPES)}"
        )
    return RECIPES[name]()


def recipes_by_paper() -> dict[str, list[str]]:
    """Names of the recipes below the paper that they come from, this library's own first."""
    return {OWN: list(_OWN)} | {paper: [entry.name for entry in entries] for paper, entries in _ENTRIES.items()}
