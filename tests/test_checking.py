"""`recast check`: what a file says of itself is verified again, and what is false is found."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from recast import GPSA, PoolConfig, RecastConfig, RecastError, check, export, fold_, load, plan, recast_, save, verify
from recast.checking import Checked
from recast.exporting import missing_packages
from recast.lab.cli import main
from recast.layers.config import PAPERS_LAYER
from recast.layers.gpsa import gpsa_layers
from recast.models.build import build, constructor
from recast.models.config import ModelConfig
from recast.models.weights import CHECKSUM, HEADER, read_header
from recast.surgery.proof import checksum, fingerprint, proof_of

PAPERS = RecastConfig(**PAPERS_LAYER)


CONFIG = ModelConfig("digits_resnet", num_classes=10)
MADE_BY = constructor(CONFIG)
X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(CONFIG).eval()


@pytest.fixture
def parent() -> nn.Module:
    return network()


@pytest.fixture
def child(parent: nn.Module) -> nn.Module:
    return recast_(copy.deepcopy(parent), plan(parent, X, PAPERS))


def held(found: Checked) -> dict[str, bool | None]:
    return {finding.claim: finding.holds for finding in found.findings}


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], **tensors: torch.Tensor) -> None:
    """As somebody who knows the format: with a checksum that fits."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[HEADER])
    change(header)
    content, text = load_file(path) | tensors, json.dumps(header)
    save_file(content, path, metadata={HEADER: text, CHECKSUM: checksum(text, content)})


def test_a_fresh_file_holds_in_all_it_says(tmp_path: Path, parent: nn.Module, child: nn.Module) -> None:
    before = fingerprint(parent)
    found = verify(parent, child, X)
    path = save(child, tmp_path / "child.safetensors", MADE_BY)
    proof = proof_of(load(path))
    assert (proof.parent, proof.verified) == (before, found)
    claims = ("weights", "network", "gates", "parent", "same function", "saved weights")
    assert held(check(path, parent)) == dict.fromkeys(claims, True)
    alone = held(check(path))
    assert alone == dict.fromkeys(claims[:3], True) | {"parent": None, "same function": None}
    assert held(check(save(child, tmp_path / "nameless.safetensors"))) == {"weights": True, "network": None}


def test_what_training_moved_is_told_and_another_parent_fails(
    tmp_path: Path, parent: nn.Module, child: nn.Module, open_gates: Callable[..., GPSA]
) -> None:
    for layer in gpsa_layers(child).values():
        open_gates(layer)
    found = check(save(child, tmp_path / "child.safetensors", MADE_BY), parent)
    assert held(found)["saved weights"] is None
    assert "training has moved" in str(found)
    assert "36 of 36 heads" in str(found)
    other = check(found.path, network(1))
    assert (other.ok, held(other)["parent"], held(other)["same function"]) == (False, False, True)
    foreign = check(found.path, nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert held(foreign)["same function"] is False


def test_a_forged_file_is_found(tmp_path: Path, parent: nn.Module, child: nn.Module) -> None:
    path = save(child, tmp_path / "child.safetensors", MADE_BY)
    whole = path.read_bytes()
    content = bytearray(whole)
    content[-9] ^= 1
    path.write_bytes(content)
    assert held(check(path, parent)) == {"weights": False}
    path.write_bytes(whole)
    name = "layer3.0.conv1.gamma"
    rewrite(path, lambda _: None, **{name: torch.full_like(load_file(path)[name], 0.5)})
    assert held(check(path, parent))["saved weights"] is None
    path.write_bytes(whole)
    rewrite(path, lambda header: header["proof"].update(parent="0" * 64))
    assert held(check(path, parent))["parent"] is False
    rewrite(path, lambda header: header["proof"].update(nothing=1))
    with pytest.raises(RecastError, match="proof: unknown name nothing"):
        check(path)


def test_folds_are_compared_with_the_report_of_fold(
    tmp_path: Path, parent: nn.Module, child: nn.Module, open_gates: Callable[..., GPSA]
) -> None:
    open_gates(gpsa_layers(child)["layer3.0.conv1"])
    report = fold_(child, data=X)
    path = save(child, tmp_path / "child.safetensors", MADE_BY)
    assert proof_of(load(path)).folded == report
    assert held(check(path, parent))["folds"] is True
    assert held(check(path, parent))["saved weights"] is None
    rewrite(path, lambda header: header["proof"]["folded"][0].update(content=1))
    assert held(check(path))["folds"] is False


@pytest.mark.skipif(bool(missing_packages()), reason="pip install -e '.[export]'")
def test_an_exported_file_is_the_one_that_was_compared(tmp_path: Path, child: nn.Module) -> None:
    fold_(child)
    file = tmp_path / "child.onnx"
    export(child, X[:1], file)
    path = save(child, tmp_path / "child.safetensors", MADE_BY)
    assert str(tmp_path) not in json.dumps(read_header(path))
    assert held(check(path))["export child.onnx"] is True
    file.write_bytes(file.read_bytes() + b"\0")
    assert held(check(path))["export child.onnx"] is False
    file.unlink()
    assert held(check(path))["export child.onnx"] is None


def test_attention_pooling_is_verified_again(tmp_path: Path, parent: nn.Module) -> None:
    child = recast_(copy.deepcopy(parent), plan(parent, X, PAPERS, where="none", pool=PoolConfig("per_class")))
    found = check(save(child, tmp_path / "child.safetensors", MADE_BY), parent)
    assert found.ok
    assert held(found)["same function"] is True


def test_the_command(tmp_path: Path, parent: nn.Module, child: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(child, tmp_path / "child.safetensors", MADE_BY)
    own = save(parent, tmp_path / "parent.safetensors", MADE_BY)
    weights = tmp_path / "weights.safetensors"
    save_file(network(1).state_dict(), weights)
    assert main(["check", str(path), "--parent", str(own), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert {finding["holds"] for finding in found["findings"]} == {True}
    assert main(["check", str(path), "--parent", "digits_resnet", "--checkpoint", str(weights)]) == 1
    assert "FAILS        parent" in capsys.readouterr().out
    torch.save({"state_dict": {f"model.{k}": v for k, v in parent.state_dict().items()}}, tmp_path / "parent.ckpt")
    of_parent = ["--checkpoint", str(tmp_path / "parent.ckpt")]
    assert main(["check", str(path), "--parent", "digits_resnet", *of_parent]) == 0
    assert main(["check", str(path), *of_parent]) == 2
    for wrong in (tmp_path / "none.safetensors", weights, tmp_path):
        assert main(["check", str(wrong)]) == 2


def test_code_that_a_file_names_is_not_run(tmp_path: Path, child: nn.Module) -> None:
    path = save(child, tmp_path / "child.safetensors", "mynet:build")
    with pytest.raises(RecastError, match="--trust"):
        check(path)
