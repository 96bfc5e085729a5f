"""Recipes by name: `make_recipe("finetune")`. Tables of values, one YAML file a paper; no torch in here.

A recipe's text gives what it trains, the paper's experiment, the command, the published number, the cost, and what the
paper leaves open and is inferred here.
"""

from __future__ import annotations

from recast.errors import RecastError, suggest
from recast.recipes.table import Entry, read_papers
from recast.run.config import Recipe
from recast.run.recipe import load_recipe, save_recipe

__all__ = ["AFTER", "NEEDS_WEIGHTS", "RECIPES", "load_recipe", "make_recipe", "recipes_by_paper", "save_recipe"]

_BY_PAPER = read_papers((
    "own", "transfer", "tcnn", "tcnn_star", "prs", "deit", "deit3", "cait", "resmlp", "patchconvnet", "rsb",
    "attention_pool", "grafit",
))  # fmt: skip

RECIPES: dict[str, Entry] = {entry.name: entry for entries in _BY_PAPER.values() for entry in entries}
"""Every recipe."""

AFTER: dict[str, str] = {name: entry.after for name, entry in RECIPES.items() if entry.after is not None}
"""A later stage of a training → the recipe whose weights it starts from (`--checkpoint`)."""

NEEDS_WEIGHTS = frozenset(name for name, entry in RECIPES.items() if entry.needs_weights)
"""Recipes that mean nothing from random weights: they are to be given `--checkpoint` (or `--pretrained`)."""


def make_recipe(name: str) -> Recipe:
    """A fresh recipe. Raises RecastError for an unknown name."""
    if name not in RECIPES:
        raise RecastError(
            f"unknown recipe {name!r}: expected a name that `recast train --help` lists, or a .yaml file."
            f"{suggest(name, RECIPES)}"
        )
    return RECIPES[name].make()


def recipes_by_paper() -> dict[str, list[str]]:
    """Names of the recipes below the paper that they come from, this library's own first."""
    return {paper: [entry.name for entry in entries] for paper, entries in _BY_PAPER.items()}
