"""docs/recipes.md says what the recipes are: its tables are compared with them row by row."""

import re
from pathlib import Path

from recast.lab.recipes import RECIPES, make_recipe, recipes_by_paper

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))


def rows(section: str) -> dict[str, dict[str, str]]:
    """Recipe → column → cell."""
    lines = [line.strip("| ").split(" | ") for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    head, *body = lines
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in body}


def section_of(paper: str) -> str:
    return "To start from" if paper == "to start from" else paper


def line(name: str, what: str) -> str:
    found = re.search(rf"^{what}: (.*)$", RECIPES[name].text, flags=re.MULTILINE)
    assert found is not None, name
    return found[1]


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
            assert recipe.optim.weight_decay == float(cells.get("decay", recipe.optim.weight_decay)), name
            assert (recipe.regularization.drop_path or 0) == float(cells.get("drop-path", 0)), name
            assert sizes == [size for size in (recipe.data.img_size, recipe.data.test_size) if size], name
            assert float(cells["decay"]) == optim.weight_decay, name
            assert float(cells["drop-path"]) == recipe.regularization.drop_path, name
            assert (cells["expected"], cells["cost"]) == (line(name, "Expected"), line(name, "Cost")), name
            assert cells["trains"] == RECIPES[name].title, name
