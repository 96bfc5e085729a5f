"""The Hub, without a network: uploads are copied into a folder, which a local server gives back as the Hub does."""

import copy
import hashlib
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard, constants
from torch import nn

from recast import RecastError, check, load, plan, push_to_hub, recast_, save, verify
from recast.lab.report import results_of
from recast.models.build import build, constructor
from recast.models.config import ModelConfig

CONFIG = ModelConfig("digits_resnet", num_classes=10)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
REPO = "user/odd"
COMMIT = "1" * 40


class Hub(BaseHTTPRequestHandler):
    """The two requests of a download."""

    root: Path
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        repo, _, rest = self.path.lstrip("/").partition("/resolve/")
        path = self.root / repo / rest.partition("/")[2]
        self.asked.append(f"{self.command} {self.path}")
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RepositoryNotFound")
            self.end_headers()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that stands for the Hub."""
    root = tmp_path / "hub"
    handler = type("Served", (Hub,), {"root": root, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for module in (constants, huggingface_hub.file_download):
        if hasattr(module, "ENDPOINT"):
            monkeypatch.setattr(module, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    def upload(_: Any, *, repo_id: str, folder_path: Path, ignore_patterns: list[str] | None, **__: Any) -> None:
        ignored = shutil.ignore_patterns(*ignore_patterns or ())
        shutil.copytree(folder_path, root / repo_id, dirs_exist_ok=True, ignore=ignored)

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, repo, **__: f"{address}/{repo}")
    monkeypatch.setattr(huggingface_hub.HfApi, "file_exists", lambda _, repo, name: (root / repo / name).is_file())
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    yield root
    server.shutdown()
    server.server_close()


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


def test_a_model_goes_to_the_hub_and_comes_back(hub: Path, child: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecastError, match="requires a constructor"):
        push_to_hub(child, REPO)
    assert not hub.exists()
    address = push_to_hub(child, REPO, constructor=constructor(CONFIG))
    assert address.endswith(REPO)
    assert sorted(path.name for path in (hub / REPO).iterdir()) == ["README.md", "model.safetensors"]
    assert same(load(f"hf-hub:{REPO}"), child)
    assert same(load(f"hf-hub:{REPO}@main"), child)
    assert check(f"hf-hub:{REPO}").ok
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(load(f"hf-hub:{REPO}"), child)  # from the cache
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


def test_an_evaluated_run_brings_its_table(hub: Path, tmp_path: Path, monkeypatch: Any, child: nn.Module) -> None:
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parent / "report/runs/before", run)
    save(child, run / "weights.safetensors", constructor(CONFIG))
    push_to_hub(run, REPO, results=results_of(run))
    text = (hub / REPO / "README.md").read_text(encoding="utf-8")
    assert "## Results on digits" in text
    assert "95 % confidence intervals" in text
    assert "| Clean images | Top-1, % |" in text
    assert same(load(f"hf-hub:{REPO}"), child)
