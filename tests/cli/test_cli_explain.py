import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from on_pages import data_of
from PIL import Image
from safetensors.torch import save_file

import recast

Cli = Callable[..., Any]
Refused = Callable[..., str]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for label, name in (("3", "b.png"), ("7", "a.png")):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30), dtype=np.uint8)).save(folder / name)
    return tmp_path / "photos"


@pytest.fixture
def page(cli: Cli, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Call `recast explain` with these words, which must succeed, and give the data of its page."""

    def call(*words: str | Path) -> dict[str, Any]:
        assert cli("explain", *words, "--out", tmp_path / "page.html").code == 0
        return data_of(tmp_path / "page.html")

    return call


def test_folders_validation_images_and_json(cli: Cli, shared: Path, photos: Path, tmp_path: Path) -> None:
    run = shutil.copytree(shared / "run", tmp_path / "run", ignore=shutil.ignore_patterns("rows.csv"))
    summary = json.loads(cli("explain", run, photos, "val:1", "--json").out)
    assert summary["page"] == str(run / "explain" / "images.html")
    assert [(image["name"], image["label"]) for image in summary["images"]][:2] == [("b.png", "3"), ("a.png", "7")]
    assert list(summary["images"][0]["predictions"]) == ["parent", "finetuned", "recast"]
    data = data_of(run / "explain" / "images.html")
    assert data["pictures"][0]["size"] == [16, 16]
    for name in data["order"][:-1]:  # Grad-CAM has no gates
        assert any(dict(map(tuple, data["layers"][name]["gates"]))["max |γ|"])
    images = json.loads(cli("explain", run, "--json").out)["images"]
    assert len({image["label"] for image in images if image["name"].startswith("val:")}) == 4
    guess = "run,model,suite,dataset,metric,value,n,low,high\nrun,parent,clean,digits,top1,12,20,5,30\n"
    (run / "rows.csv").write_text(guess, encoding="utf-8")
    apart = json.loads(cli("explain", run, photos, "--num-images", "1", "--json").out)
    assert list(apart["images"][0]["predictions"]) == ["finetuned", "recast"]
    assert "is not shown to be above a guess" in str(data_of(run / "explain" / "photos.html")["notes"])


def test_outputs_that_are_not_exclusive(cli: Cli, shared: Path, photos: Path) -> None:
    words = ("explain", shared / "run", photos / "3" / "b.png", "--out", photos / "page.html", "--json", "--outputs")
    softmax, logits = (json.loads(cli(*words, name).out) for name in ("softmax", "logits"))
    best, rest = (summary["images"][0]["predictions"]["recast"] for summary in (softmax, logits))
    assert [row["class"] for row in rest] == [row["class"] for row in best]
    expected = [row["probability"] / best[0]["probability"] for row in best]
    assert [np.exp(row["logit"] - rest[0]["logit"]) for row in rest] == pytest.approx(expected, rel=1e-4)
    assert data_of(photos / "page.html")["scale"] == "logits"


VIT = """import timm, torch

def net(num_classes=3):
    torch.manual_seed(0)
    small = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    return timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **small)

def conv():
    pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 4), torch.nn.ReLU(), pool, torch.nn.Linear(8, 3))
"""


@pytest.fixture
def vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A transformer of the user's, in a module of the current folder."""
    (tmp_path / "own_vit.py").write_text(VIT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_vit", raising=False)
    return "own_vit:net"


def test_a_model_by_name(cli: Cli, vit: str, photos: Path, tmp_path: Path) -> None:
    image = photos / "3" / "b.png"
    done = cli("explain", vit, image, "--img-size", "32")
    assert (done.code, done.out) == (0, "page: own_vit-net-b.html\n")  # in the current folder
    assert done.err.startswith("note: ")
    assert "--checkpoint" in done.err
    data = data_of(tmp_path / "own_vit-net-b.html")
    assert data["first"] == data["order"][-1]
    assert data["layers"][data["first"]]["kind"] == "classes"
    assert "maps" in {layer["kind"] for layer in data["layers"].values()}
    assert sorted(name for name, _ in data["pictures"][0]["predictions"]["recast"]) == ["0", "1", "2"]
    assert data["title"] == "own_vit:net (weights as returned)"


def test_weights_class_names_and_the_first_layer_can_be_given(cli: Cli, vit: str, photos: Path, tmp_path: Path) -> None:
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    trained = timm.create_model("vit_tiny_patch16_224", num_classes=4, **small)
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "names.txt").write_text("cat\ndog\n3\ncow\n\n", encoding="utf-8")
    words = ["--checkpoint", "w.safetensors", "--num-classes", "4", "--classes", "names.txt", "--img-size", "32"]
    words += ["--layer", "blocks.0.attn", "--out", "page.html", "--json"]
    done = cli("explain", vit, photos / "3" / "b.png", *words)
    assert done.err == ""
    summary = json.loads(done.out)
    assert (summary["page"], summary["opens"], summary["layers"][0]) == ("page.html", *["blocks.0.attn"] * 2)
    assert summary["images"][0]["label"] == "3"
    assert {row["class"] for row in summary["images"][0]["predictions"]["recast"]} == {"cat", "dog", "3", "cow"}
    data = data_of(tmp_path / "page.html")
    assert (data["first"], data["title"]) == (summary["opens"], "own_vit:net")
    assert ["Weights", "w.safetensors"] in data["facts"]


def test_what_a_network_takes_is_said_or_assumed(page: Cli, vit: str, photos: Path) -> None:
    words = ["own_vit:conv", photos / "3" / "b.png"]
    data = page(*words)
    assert [any(word in note for note in data["notes"]) for word in ("--img-size, --mean, --std", "--checkpoint")]
    assert data["pictures"][0]["size"] == [224, 224]
    words += ["--img-size", "64"]
    normalised = page(*words, "--mean", ".5", ".4", ".3", "--std", ".2", ".2", ".2")
    assert len(normalised["notes"]) == 1
    before, after = page(*words)["pictures"][0], normalised["pictures"][0]  # the weights are the same
    assert before["src"] == after["src"]
    assert before["predictions"] != after["predictions"]


def test_a_page_of_a_folder_with_a_file_that_is_no_image(cli: Cli, vit: str, photos: Path) -> None:
    (photos / "3" / "a.png").write_text("no image", encoding="utf-8")
    done = cli("explain", vit, photos, "--img-size", "32", "--out", "maps.html")
    assert (done.code, done.out) == (0, "page: maps.html\n")
    assert f"note: Skipped unreadable images: {photos / '3' / 'a.png'}.\n" in done.err


@pytest.mark.usefixtures("vit")
@pytest.mark.filterwarnings("ignore:digits_resnet gets the 3 classes")
def test_a_saved_network_says_what_it_is(cli: Cli, page: Cli, refused: Refused, photos: Path, tmp_path: Path) -> None:
    def recast_net(num_classes: int) -> torch.nn.Module:
        child = timm.create_model("digits_resnet", num_classes=num_classes)
        return recast.recast_(child, recast.plan(child, torch.zeros(1, 3, 16, 16)))

    image, child = photos / "3" / "b.png", recast_net(10)
    how = {"name": "timm:digits_resnet", "kwargs": {"num_classes": 10}}
    recast.save(child, tmp_path / "child.safetensors", how)
    assert cli("explain", "child.safetensors", image, "--img-size", "16").out == "page: child-b.html\n"
    data = data_of(tmp_path / "child-b.html")
    assert {layer["kind"] for layer in data["layers"].values()} == {"maps", "classes"}
    assert not any("Random" in note for note in data["notes"])
    # one that does not say it: the network's name, and the file as its weights
    recast.save(child, tmp_path / "bare.safetensors")
    assert "recast explain MODEL IMAGE --checkpoint bare.safetensors" in refused("explain", "bare.safetensors", image)
    words = ["digits_resnet", image, "--num-classes", "10", "--img-size", "16", "--checkpoint", "bare.safetensors"]
    bare = page(*words)
    assert bare["pictures"][0]["predictions"] == data["pictures"][0]["predictions"]
    assert bare["order"] == data["order"]
    # the file's number of classes, their names and the size of its images hold for a network by name
    names = ["cat", "dog", "owl"]
    recast.save(recast_net(3), tmp_path / "three.safetensors", classes=names, img_size=16)
    predictions = str(page("digits_resnet", image, "--checkpoint", "three.safetensors")["pictures"][0]["predictions"])
    assert all(name in predictions for name in names)
    # a file must not have code run that it names
    recast.save(child, tmp_path / "code.safetensors", {"name": "own_vit:net", "kwargs": {}})
    message = refused("explain", "code.safetensors", image)
    assert "names code to run, own_vit:net" in message
    assert "add --trust" in message
    assert "own_vit" not in sys.modules
    assert "drop --checkpoint" in refused("explain", "child.safetensors", image, "--num-classes", "10")


def test_mistakes_with_models_are_one_line(
    refused: Refused, shared: Path, vit: str, photos: Path, tmp_path: Path
) -> None:
    image, weights = photos / "3" / "b.png", shared / "weights.safetensors"
    (tmp_path / "w.pth").write_bytes(b"weights")
    (tmp_path / "gap.txt").write_text("cat\n\ndog\n", encoding="utf-8")
    size = ["--img-size", "32"]
    for words, message in (
        (["runs/nothing"], "not a run folder: there is no such folder"),
        ([image, image], "is an image; give the network first"),
        (["w.pth", image], "w.pth was not written by recast.save: save the network with recast.save"),
        ([weights, image], f"recast explain MODEL IMAGE --checkpoint {weights}"),
        (["gone.safetensors", image], "no such file: gone.safetensors"),
        ([vit, image, *size, "--checkpoint", weights], "does not fit VisionTransformer"),
        ([vit, image, *size, "--mean", "120", "110", "100"], "--mean must be <= 1"),
        ([vit, image, *size, "--classes", "gap.txt"], "but line 2 is empty"),
        ([vit, image, "--img-size", "48"], "on an image of 48×48 pixels failed"),
        ([vit, image, "--img-size", "32x64", "--crop-pct", "1"], "--crop-pct requires a square --img-size, got 32x64"),
    ):
        assert message in refused("explain", *words)
    assert not [*tmp_path.glob("*.html")]
