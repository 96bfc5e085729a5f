"""The Hub, without a network: uploads are copied into a folder, and downloads come from it."""

import copy
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn

from recast import RecastError, check, load, plan, push_to_hub, recast_, save, verify
from recast.models.build import build, constructor
from recast.models.config import ModelConfig

CONFIG = ModelConfig("digits_resnet", num_classes=10)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
REPO = "user/odd"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for the Hub."""
    root = tmp_path / "hub"

    def download(repo_id: str, filename: str, *, revision: str | None) -> str:
        assert revision in (None, "main")
        if not (root / repo_id / filename).is_file():
            raise LocalEntryNotFoundError("no such file")
        return str(root / repo_id / filename)

    def upload(_: Any, *, repo_id: str, folder_path: Path, ignore_patterns: list[str] | None, **__: Any) -> None:
        ignored = shutil.ignore_patterns(*ignore_patterns or ())
        shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True, ignore=ignored)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, repo, **__: f"https://hub/{repo}")
    monkeypatch.setattr(huggingface_hub.HfApi, "file_exists", lambda _, repo, name: (root / repo / name).is_file())
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    spec = create_autospec(huggingface_hub.hf_hub_download, side_effect=download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", spec)
    return root


@pytest.fixture
def child() -> nn.Module:
    torch.manual_seed(0)
    parent = build(CONFIG).eval()
    child = recast_(copy.deepcopy(parent), plan(parent, X))
    verify(parent, child, X)
    return child.eval()


def same(a: nn.Module, b: nn.Module) -> bool:
    with torch.no_grad():
        return torch.equal(a.eval()(X), b.eval()(X))


def test_a_model_goes_to_the_hub_and_comes_back(hub: Path, child: nn.Module) -> None:
    with pytest.raises(RecastError, match="requires a constructor"):
        push_to_hub(child, REPO)
    assert not hub.exists()
    address = push_to_hub(child, REPO, constructor=constructor(CONFIG))
    assert address.endswith(REPO)
    assert sorted(path.name for path in (hub / REPO).iterdir()) == ["README.md", "model.safetensors"]
    assert same(load(f"hf-hub:{REPO}"), child)
    assert same(load(f"hf-hub:{REPO}@main"), child)
    assert check(f"hf-hub:{REPO}").ok
    with pytest.raises(RecastError, match="could not fetch hf-hub:user/other"):
        load("hf-hub:user/other")


def test_the_card_says_what_is_known(hub: Path, child: nn.Module) -> None:
    push_to_hub(child, REPO, constructor=constructor(CONFIG))
    card = ModelCard.load(hub / REPO / "README.md")
    assert (card.data.license, card.data.library_name) == ("unknown", "recast")
    for part in ("`digits_resnet`", "`layer3.0.conv1`", 'recast.load("hf-hub:user/odd")', "2 of 2"):
        assert part in str(card)
    own = hub / REPO / "README.md"
    own.write_text("mine", encoding="utf-8")
    push_to_hub(child, REPO, constructor=constructor(CONFIG), license="mit")
    assert own.read_text(encoding="utf-8") == "mine"
    own.unlink()
    push_to_hub(child, REPO, constructor=constructor(CONFIG), license="mit")
    assert ModelCard.load(own).data.license == "mit"


def test_a_file_from_the_hub_runs_no_code(hub: Path, child: nn.Module, tmp_path: Path) -> None:
    path = save(child, tmp_path / "child.safetensors", "somebodys:network")
    (hub / REPO).mkdir(parents=True)
    shutil.copy(path, hub / REPO / "model.safetensors")
    for ask in (load, check):
        with pytest.raises(RecastError, match="the file names code to run, somebodys:network"):
            ask(f"hf-hub:{REPO}")


def test_a_run_folder_is_pushed_with_results(hub: Path, tmp_path: Path, child: nn.Module) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save(child, run / "weights.safetensors", constructor(CONFIG))
    push_to_hub(run, REPO, results="## Results on digits")
    assert "## Results on digits" in (hub / REPO / "README.md").read_text(encoding="utf-8")
    assert same(load(f"hf-hub:{REPO}"), child)
