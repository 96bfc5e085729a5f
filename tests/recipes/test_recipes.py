"""The registry: every recipe is found, readable, complete, and says where it comes from."""

import re
import shlex

from recast.lab.config import Recipe
from recast.lab.recipe import recipe_from_dict, recipe_to_dict
from recast.lab.recipes import RECIPES, make_recipe, recipes_by_paper

HEADS = ("Paper", "Command", "Expected", "Cost", "Inferred")


def said(name: str) -> dict[str, str]:
    """The docstring's sections."""
    parts = re.split(rf"^\s*({'|'.join(HEADS)}): ", RECIPES[name].text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_recipe_is_complete_and_made_afresh() -> None:
    for name in RECIPES:
        recipe = make_recipe(name)
        assert isinstance(recipe, Recipe), name
        assert recipe_from_dict(recipe_to_dict(recipe)) == recipe, name
        recipe.where.append("changed")
        assert "changed" not in make_recipe(name).where, name


def test_every_command_names_its_recipe_its_data_and_the_weights_it_needs() -> None:
    for name, entry in RECIPES.items():
        words = shlex.split(said(name)["Command"])
        if embedded := {"odd_digit": "recast quickstart", "digits": "recast train digits --out RUN"}.get(name):
            assert words == embedded.split()
            continue
        assert words[:3] == ["recast", "train", name]
        assert {"--data-dir", "--out"} <= set(words), name
        if name not in recipes_by_paper()["to start from"]:
            of = {"imagenet": "IMAGENET", "folder": "INAT18" if name.endswith("_inat") else "IMAGENET21K"}
            of["masks"] = "ADE20K"
            data = make_recipe(name).data.name
            assert words[words.index("--data-dir") + 1] == of.get(data, data.removeprefix("torch/").upper()), name
        assert ("--checkpoint" in words) == entry.needs_weights, name
        if entry.after:
            assert f"runs/{entry.after}/weights.safetensors" in words, name
