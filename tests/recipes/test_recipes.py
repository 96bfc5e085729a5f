"""Every recipe is found, readable and complete, says where it comes from, and has its row in docs/recipes.md."""

import re
import shlex
from pathlib import Path

from recast.config import read
from recast.lab.config import Recipe
from recast.lab.recipes import RECIPES, make_recipe, recipes_by_paper

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))


def rows(section: str) -> dict[str, dict[str, str]]:
    lines = [line.strip("| ").split(" | ") for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    head, *body = lines
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in body}


def section_of(paper: str) -> str:
    return "To start from" if paper == "to start from" else paper


def line(name: str, what: str) -> str:
    match = re.search(rf"^{what}: (.*)$", RECIPES[name].text, flags=re.MULTILINE)
    assert match is not None, name
    return match[1]


def test_every_recipe_is_complete_and_made_afresh() -> None:
    for name in RECIPES:
        recipe = make_recipe(name)
        assert isinstance(recipe, Recipe), name
        assert read(Recipe, recipe.model_dump(mode="json")) == recipe, name
        recipe.where.append("changed")
        assert "changed" not in make_recipe(name).where, name


def test_every_command_names_its_recipe_its_data_and_the_weights_it_needs() -> None:
    for name, entry in RECIPES.items():
        words = shlex.split(line(name, "Command"))
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


def test_every_recipe_has_its_row_below_its_paper() -> None:
    assert sorted(SECTIONS) == sorted(section_of(paper) for paper in recipes_by_paper())
    for paper, names in recipes_by_paper().items():
        assert list(rows(section_of(paper))) == names


def test_every_row_agrees_with_its_recipe() -> None:
    for paper, names in recipes_by_paper().items():
        for name, cells in rows(section_of(paper)).items():
            recipe = make_recipe(name)
            optim, batch = recipe.optim, recipe.data.batch_size
            opt, rate = (cells.get("optimiser, peak rate") or cells["rate"]).split()
            assert (opt, int(cells["epochs"]), int(cells["batch"])) == (optim.opt, recipe.epochs, batch), name
            scaled = optim.lr * (batch / optim.base_batch if optim.base_batch else 1)
            assert abs(float(rate) - scaled) < 1e-12, name
            if paper == "to start from":
                continue
            assert name in names
            sizes = [int(size) for size in re.findall(r"\d+", cells["size"])]
            assert sizes == [size for size in (recipe.data.img_size, recipe.data.test_size) if size], name
            assert float(cells["decay"]) == optim.weight_decay, name
            assert float(cells["drop-path"]) == recipe.regularization.drop_path, name
            assert (cells["expected"], cells["cost"]) == (line(name, "Expected"), line(name, "Cost")), name
            assert cells["trains"] == RECIPES[name].title, name
