import os
import sys
from pathlib import Path

import pytest

from recast.lab.config import ClassifyConfig, DataConfig, OptimConfig, Recipe
from recast.lab.config.text import changes, load_recipe, save_recipe
from recast.lab.folder.run import follow_up
from recast.layers.config import RecastConfig
from recast.models.config import ModelConfig

UNUSUAL = Recipe(
    model=ModelConfig("torchvision:resnet50", pretrained=True, num_classes=7),
    data=DataConfig("cifar10", img_size=40, mean=(0.1, 0.2, 0.3), num_val=5),
    recast=RecastConfig("linear", gamma_init=0.1, head_dim=4, backend="dense"),
    where=["layer4.*", "layer3.0.conv1"],
    max_tokens=64,
    optim=OptimConfig(opt="lamb", lr=1e-5, betas=(0.9, 0.98), gate_lr=0.1, clip_grad=1.0, min_lr=0.0),
    amp="bf16",
    papers={"deit": {"drop_path_mode": "uniform"}},
    task=ClassifyConfig(mixup=0.2, teacher={"kind": "parent", "targets": "hard"}),
    control=False,
)


@pytest.mark.parametrize("recipe", [Recipe(), UNUSUAL], ids=["default", "unusual"])
def test_a_written_recipe_reads_back_the_same(recipe: Recipe, tmp_path: Path) -> None:
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_paths_below_the_recipe_move_with_it_and_others_are_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, images = tmp_path / "run", tmp_path / "images"
    for folder in (run, images):
        folder.mkdir()
    (run / "parent.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(
        model=ModelConfig(checkpoint="run/parent.safetensors"), data=DataConfig("folder", data_dir="images")
    )
    save_recipe(recipe, run / "recipe.yaml")
    run.rename(tmp_path / "moved")
    monkeypatch.chdir(images)
    loaded = load_recipe("../moved/recipe.yaml")
    assert loaded.model.checkpoint == str(tmp_path / "moved" / "parent.safetensors")
    assert loaded.data.data_dir == str(images)


def test_changes_are_dotted_names_with_both_values() -> None:
    changed = Recipe(seed=1, device="cpu", optim=OptimConfig(lr=1))
    assert changes(Recipe(), changed, ignore=("device",)) == ["seed (0, now 1)", "optim.lr (0.0001, now 1.0)"]


def test_a_command_to_type_next_says_what_a_function_needs() -> None:
    functions = Recipe(ModelConfig("mynet:build")).functions
    command = follow_up("evaluate", "my run", functions=functions)
    assert command == "PYTHONPATH=. recast evaluate 'my run' --trust"
    assert follow_up("evaluate", "runs/a", functions=Recipe().functions) == "recast evaluate runs/a"


def test_a_command_is_named_as_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    for script, printed in ((".venv/bin/recast", ".venv/bin/recast train"), ("lib/pytest/__main__.py", "recast train")):
        monkeypatch.setattr(sys, "argv", [script])
        assert follow_up("train") == printed
