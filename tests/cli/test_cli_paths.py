"""Typed paths are checked before torch is imported, and a run is used where its images moved to."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

import recast
from recast.errors import RecastError
from recast.lab.cli import _command, main
from recast.lab.cli.paths import check_paths
from recast.lab.config import DataConfig, Recipe
from recast.lab.config.text import save_recipe
from recast.lab.folder.run import RunFolder
from recast.lab.training.prepare import recipe_of_run

TYPOS = (
    (("train", "folder", "--data-dir", "gone"), "no such data folder: gone (--data-dir)"),
    (("train", "folder", "--model.checkpoint=gone.pth"), "no such file: gone.pth (--model.checkpoint)"),
    (("train", "folder", "--data", "csv", "--labels-file", "gone.csv"), "no such file: gone.csv (--labels-file)"),
    (("train", "digits", "--out", "file/run"), "--out: file is not a folder"),
    (("try", "--out", "file/try"), "--out: file is not a folder"),
    (("train", "digits", "--out", "used"), "used is not empty (file): choose another folder with --out"),
    (("evaluate", "used", "--sets", "gone"), "no such folder: gone (--sets)"),
    (("plan", "net", "--checkpoint", "--json"), "--checkpoint requires a value"),
    (("try", "--data-dir", "gone"), "no such data folder: gone (--data-dir)"),
    (("plan", "gone.safetensors"), "no such file: gone.safetensors"),
    (("explain", "gone/run"), "gone/run is not a run folder: there is no such folder"),
    (("explain", "resnet18", "file", "gone.jpg"), "no such image or folder: gone.jpg"),
    (("evaluate", "gone"), "gone is not a run folder: there is no such folder"),
    (("evaluate", "used", "--suite", "clean"), "used is not a run folder: it has no recipe.yaml"),
    (("report", "used"), "used is not a run folder: it has no recipe.yaml"),
    (("fold", "gone.safetensors"), "no such run folder or file: gone.safetensors"),
    (("export", "file", "--out", "used"), "--out must be a file, got the folder used"),
)
ALL_OF_THEM = """
import io, sys
from contextlib import redirect_stderr
from recast.__main__ import _add_papers
from recast.lab.cli import _command, main
from recast.lab.cli.paths import check_paths
for words in eval(sys.argv[1]):
    with redirect_stderr(io.StringIO()) as lines:
        code = main(words, _add_papers)
    print(code, "torch" in sys.modules, lines.getvalue(), end="")
"""


def test_typos_are_found_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    words = [sys.executable, "-c", ALL_OF_THEM, repr([words for words, _ in TYPOS])]
    env = os.environ | {"PYTHONPATH": str(Path(recast.__file__).parents[1])}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, (command, message) in zip(done.stdout.splitlines(), TYPOS, strict=True):
        assert line.startswith(f"2 False recast {command[0]}: error: {message}"), line


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "resnet18", "--data", "hfds/x/y", "--data-dir", "new"),
        ("train", "hub/recipe.yaml", "--data-dir", "new"),
        ("evaluate", "hub", "--data-dir", "new"),
        ("plan", "net", "--checkpoint", "null"),
        ("plan", "net", "--", "--checkpoint", "gone.pth"),
        ("plan", "beit3_base_patch16_224.pt"),
    ],
)
def test_paths_that_need_not_exist(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a hub is made, null is none, words after -- are no options, and names of timm may end in .pt."""
    monkeypatch.chdir(tmp_path)
    Path("hub").mkdir()
    Path("hub/recipe.yaml").write_text("data: {name: hfds/x/y}\n")
    check_paths(_command(words[0]), words[1:])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, the weights of a network, and a run that names both by their absolute paths."""
    folder = tmp_path_factory.mktemp("server")
    for number in range(24):
        path = folder / "photos" / ("train", "val")[number % 2] / "ab"[number // 2 % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 200 * (number // 2 % 2), 9)).save(path)
    torch.manual_seed(0)
    torch.save(timm.create_model("digits_resnet", num_classes=2).state_dict(), folder / "net.pth")
    model = ["--model", "digits_resnet", "--checkpoint", folder / "net.pth", "--img-size", "16", "--batch-size", "4"]
    words = ["train", "finetune", *model, "--data", "folder", "--data-dir", folder / "photos", "--epochs", "1"]
    assert main([*map(str, words), "--device", "cpu", "--out", str(folder / "run"), "--quiet"]) == 0
    return folder


@pytest.mark.filterwarnings("always:the data of")
def test_a_run_that_moved_with_its_images(
    server: Path, tmp_path: Path, cli: Callable[..., Any], refused: Callable[..., str]
) -> None:
    run, photos = tmp_path / "run", tmp_path / "photos"
    shutil.copytree(server / "run", run)
    (server / "photos").rename(photos)
    (server / "net.pth").rename(tmp_path / "net.pth")
    evaluate = ("evaluate", run, "--suite", "clean")
    assert "run: give the folder with --data-dir" in refused(*evaluate)
    assert "give the folder with --data-dir" in refused("explain", run, "val:0")
    assert f"copy it to {run / 'net.pth'}" in refused(*evaluate, "--data-dir", photos)
    shutil.copy(tmp_path / "net.pth", run)
    before = (run / "recipe.yaml").read_bytes()
    done = cli(*evaluate, "--data-dir", photos)
    assert (done.code, "changed" in done.err) == (0, False), done.err
    for command in (("explain", run, "val:0"), ("fold", run)):
        assert cli(*command, "--data-dir", photos).code == 0
    assert (run / "recipe.yaml").read_bytes() == before
    shutil.copytree(photos / "train", tmp_path / "other" / "train")
    shutil.copytree(photos / "train", tmp_path / "other" / "val")
    assert "changed since it began" in cli(*evaluate, "--data-dir", tmp_path / "other").err
    assert "one at a time" in refused("evaluate", run, run, "--data-dir", photos)
    assert "--data-dir requires a run folder" in refused("explain", "resnet18", photos, "--data-dir", photos)


@pytest.mark.parametrize(
    ("images", "table", "now"),
    [
        ("old", "old/labels.csv", "new/labels.csv"),
        (None, "old/labels.csv", "new/labels.csv"),
        ("old/images", "old/labels.csv", "labels.csv"),
        ("old", "tables/labels.csv", "new/labels.csv"),
        ("old", "tables/labels.csv", "run/labels.csv"),
    ],
)
def test_the_table_of_a_run_moves_with_its_images(images: str | None, table: str, now: str, tmp_path: Path) -> None:
    data = DataConfig("csv", data_dir=images and str(tmp_path / images), labels_file=str(tmp_path / table))
    for name in ("run", "new"):
        (tmp_path / name).mkdir()
    save_recipe(Recipe(data=data), tmp_path / "run" / "recipe.yaml")
    with pytest.raises(RecastError, match=r"give .* folder with --data-dir"):
        RunFolder(tmp_path / "run").recipe_here()
    with pytest.raises(RecastError, match=r"copy it to .*labels.csv"):
        RunFolder(tmp_path / "run").recipe_here(str(tmp_path / "new"))
    (tmp_path / now).touch()
    data = RunFolder(tmp_path / "run").recipe_here(str(tmp_path / "new")).data
    assert data.data_dir == str(tmp_path / "new")
    assert os.path.samefile(str(data.labels_file), tmp_path / now)


def test_a_training_goes_on_with_a_table_that_moved_with_its_images(tmp_path: Path) -> None:
    old, new, run = (tmp_path / name for name in ("old", "new", "run"))
    for folder in (new, run):
        folder.mkdir()
    save_recipe(
        Recipe(data=DataConfig("csv", data_dir=str(old), labels_file=str(old / "labels.csv"))), run / "recipe.yaml"
    )
    stored = RunFolder(run).recipe()
    with pytest.raises(RecastError, match=r"no such data folder.*of the run .*: give the folder with --data-dir"):
        recipe_of_run(stored, RunFolder(run))
    (new / "labels.csv").write_text("path,label\n1.png,a\n2.png,b\n", encoding="utf-8")
    data = recipe_of_run(stored.replace(data=stored.data.replace(data_dir=str(new))), RunFolder(run)).data
    assert (data.data_dir, data.labels_file) == (str(new), str(new / "labels.csv"))


def test_images_of_the_package_do_not_move(tmp_path: Path) -> None:
    save_recipe(Recipe(data=DataConfig("digits")), tmp_path / "recipe.yaml")
    with pytest.raises(RecastError, match="drop --data-dir"):
        RunFolder(tmp_path).recipe_here("photos")


@pytest.mark.parametrize(("name", "own"), [("digits", "folder"), ("scenes", "masks"), ("scene_objects", "coco")])
def test_images_of_the_package_take_no_folder(name: str, own: str) -> None:
    with pytest.raises(RecastError, match=f"data_dir is not for name {name}, .* name {own} reads your own"):
        DataConfig(name, data_dir="photos")
