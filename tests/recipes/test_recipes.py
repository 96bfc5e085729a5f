"""Every recipe is complete and has its row in the pages of recipes; every network can be built on the meta device."""

import csv
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import timm
from layer_helpers import without_values
from torch import nn

from recast.config import read
from recast.lab.config import Recipe
from recast.lab.recipes import make_recipe, recipes, recipes_by_paper
from recast.models.names import split_name
from recast.models.sources import create

# Parameters from the specifications of the networks, 1000 classes.
PARAMETERS = {
    "deit_base_distilled_384": 87_630_032,
    "deit3_huge": 632_126_440,
    "cait_m48_distilled_448": 356_460_520,
    "resmlp_big_24": 129_138_280,
    "resmlp_big_24_p16": 115_736_776,
    "resmlp_12_p14": 15_607_912,
    "resmlp_12_p8": 22_051_624,
    "cait_xs36": 38_557_432,
    "cait_s48": 89_525_224,
    "cait_m24": 185_850_088,
    "patchconvnet_b120_ade20k": 229_834_548 - 5_908_992 - 768 * (1 + 2) - 1000 * 769,  # without pool, token, norm, head
    "tcnn_resnetrs350": 163_956_168,
}


@cache
def built(name: str, input_size: int | None) -> nn.Module:
    size = {} if input_size is None else {"img_size": input_size}
    with without_values():
        return create(*split_name(name), size, pretrained=False)


def model_of(recipe_name: str) -> nn.Module:
    config = make_recipe(recipe_name).model
    return built(config.name, config.input_size)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert sum(parameter.numel() for parameter in model_of(name).parameters()) == PARAMETERS[name]


def test_a_later_stage_differs_from_the_earlier_one_in_positions_only() -> None:
    for name, before in ((name, entry.after) for name, entry in recipes().items() if entry.after):
        network = make_recipe(name).model.name
        if network.endswith("_multi") or ":" in network:
            continue  # its weights are converted first, or become those of its body
        later, earlier = model_of(name).state_dict(), model_of(before).state_dict()
        assert later.keys() == earlier.keys(), name
        assert {key for key in later if later[key].shape != earlier[key].shape} <= {"pos_embed"}, name


def test_a_recipe_asks_for_what_its_network_has() -> None:
    """Images of its size, a distillation token, LayerScale, and weights of timm's for parents and teachers."""
    for name in recipes():
        recipe, model = make_recipe(name), model_of(name)
        # networks of one size keep it in their patch embedding; convolutional ones take any
        embedding = getattr(model, "patch_embed", None) or getattr(model, "stem", None)
        size = recipe.data.img_size
        assert getattr(embedding, "img_size", None) in (None, (size, size)), name
        has_token = hasattr(model, "set_distilled_training")
        assert has_token == name.startswith(("deit_tiny_distilled", "deit_small_distilled", "deit_base_distilled"))
        assert not has_token or recipe.teacher.targets.kind == "hard", name
        if (deit := recipe.papers.get("deit")) and deit.layer_scale is not None:
            assert any(key.endswith(("gamma", "gamma_1", ".ls1")) for key in model.state_dict()), name
        if recipe.model.pretrained:
            assert timm.models.is_model_pretrained(recipe.model.name), name
        if recipe.teacher.kind == "model":
            assert recipe.teacher.teacher_pretrained, name
            assert timm.models.is_model_pretrained(recipe.teacher.teacher_model), name


DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join(
    path.read_text(encoding="utf-8").partition("## From papers")[0]
    for path in (DOCS / "recipes.md", *sorted((DOCS / "recipes").glob("*.md")))
)
SECTIONS = dict(zip(*[iter(re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)[1:])] * 2, strict=True))


def rows(section: str) -> dict[str, dict[str, str]]:
    lines = [line.strip("| ").split(" | ") for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    head, *body = lines
    return {row[0].strip("`"): dict(zip(head, row, strict=True)) for row in body}


def section_of(paper: str) -> str:
    return "To start from" if paper == "to start from" else paper


def line(name: str, what: str) -> str:
    match = re.search(rf"^{what}: (.*)$", recipes()[name].text, flags=re.MULTILINE)
    assert match is not None, name
    return match[1]


def test_every_recipe_is_complete_and_made_afresh() -> None:
    for name in recipes():
        recipe = make_recipe(name)
        assert isinstance(recipe, Recipe), name
        assert read(Recipe, recipe.model_dump(mode="json")) == recipe, name
        recipe.papers["changed"] = None
        assert "changed" not in make_recipe(name).papers, name


def test_every_command_names_its_recipe_its_data_and_the_weights_it_needs() -> None:
    for name, entry in recipes().items():
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


def table(name: str) -> dict[str, dict[str, str]]:
    path = DOCS.parent / "results" / name
    with path.open(encoding="utf-8") as file:
        return {row["recipe"]: row for row in csv.DictReader(file)}


def test_the_memory_that_help_states_is_that_of_the_table() -> None:
    counted = table("memory.csv")
    assert {name for name, entry in recipes().items() if entry.memory} == set(counted)
    for name, row in counted.items():
        entry, recipe = recipes()[name], make_recipe(name)
        numbers = [float(row[key]) for key in ("weights_gib", "image_mib", "image_mib_checkpointed")]
        assert list(entry.memory or ()) == pytest.approx(numbers), name
        assert f"{numbers[1]:g} MiB an image ({numbers[2]:g} with" in line(name, "Memory")
        assert numbers[1] > numbers[2], name
        assert (int(row["side"]), row["precision"]) == (recipe.data.img_size, recipe.amp.replace("off", "fp32")), name


def test_every_paper_has_its_section_and_every_recipe_of_ours_its_row() -> None:
    """docs/hooks.py makes the tables of the papers' sections when the site is built."""
    assert sorted(SECTIONS) == sorted(section_of(paper) for paper in recipes_by_paper())
    assert list(rows("To start from")) == recipes_by_paper()["to start from"]


def test_every_row_agrees_with_its_recipe() -> None:
    for name, cells in rows("To start from").items():
        recipe = make_recipe(name)
        rate = f"{recipe.optim.opt} {recipe.optim.lr:.0e}".replace("e-0", "e-")
        numbers = (rate, str(recipe.epochs), str(recipe.data.batch_size))
        assert (cells["rate"], cells["epochs"], cells["batch"]) == numbers, name
