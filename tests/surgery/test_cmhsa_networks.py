"""Whole networks with C-MHSA layers: plans, files, training, and everything else that meets a recast layer."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from layer_helpers import recast_copy
from torch import Tensor

import recast
from recast import CMHSA, RecastConfig, RecastError
from recast.layers.cmhsa import recast_layers
from recast.models.build import build, constructor
from recast.models.config import ModelConfig
from recast.papers.prs.network import CMHSAViT
from recast.surgery.controls import changed_layer
from recast.surgery.scales import randomize_scales_

BIAS = RecastConfig(gate="bias")
TINY = ModelConfig("cmhsa_vit_3_tiny", num_classes=5)


def images(height: int = 16, width: int = 20) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def vit(**options: Any) -> CMHSAViT:
    torch.manual_seed(0)
    return CMHSAViT(**{"patch_size": 4, "embed_dim": 16, "depth": 2, "num_classes": 5, **options}).eval()


@pytest.mark.parametrize("options", [{}, {"mixer": "pixel", "kernel": 5}])
def test_the_vision_transformer(options: dict[str, Any]) -> None:
    parent = vit(**options)
    child = recast_copy(parent, images(), BIAS)
    plan = child.recast_plan
    assert [step.name for step in plan.steps] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert all((step.input, step.output, step.exact) == ((16, 4, 5), (16, 4, 5), False) for step in plan.steps)
    reasons = {layer.name: layer.reason for layer in plan.left}
    assert reasons.keys() == {"patch_embed", *(f"blocks.{i}.mlp.fc{j}" for i in (0, 1) for j in (1, 2))}
    assert reasons["patch_embed"].startswith("a patch embedding")
    result = recast.verify(parent, child, images())
    assert 0 < result.max_relative_error < 1e-5
    assert result.ok()
    assert set(result.layers) == {"blocks.0.mixer", "blocks.1.mixer"}
    assert str(result).endswith("same prediction on 2 of 2 images (biased)")
    with changed_layer(child):
        assert recast.verify(parent, child, images()).max_relative_error > 1e-3
    closer = recast_copy(parent, images(), RecastConfig(gate="bias", bias_init=40.0))
    exact = recast.verify(parent.double(), closer.double(), images().double())
    assert exact.max_relative_error < 1e-10


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("digits_resnet", "last_stage"),
        ("tf_mobilenetv3_small_minimal_100", ["blocks.4.*"]),  # SAME padding, strided, depthwise
    ],
)
def test_any_convolution(name: str, where: Any) -> None:
    x = images(64, 64)
    parent = randomize_scales_(timm.create_model(name, num_classes=5).eval(), x)
    result = recast.verify(parent, recast_copy(parent, x, BIAS, where=where, max_tokens=None), x)
    assert max(result.layers.values()) < 2e-5
    assert result.ok()


@torch.no_grad()
def test_a_model_comes_back(tmp_path: Path) -> None:
    parent = build(TINY)
    x = images(24, 32)
    model = recast_copy(parent, x, RecastConfig(gate="bias", bias_init=7)).eval()
    for layer in recast_layers(model).values():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    path = recast.save(model, tmp_path / "child.safetensors", constructor(TINY))
    for loaded in (recast.load(path), recast.load(path, parent=parent)):
        layers, loaded = recast_layers(loaded), loaded.eval()
        assert {layer.size for layer in layers.values() if isinstance(layer, CMHSA)} == {(6, 8)}
        assert all(layer.config.bias_init == 7 for layer in layers.values())
        assert torch.equal(loaded(x), model(x))
        assert torch.equal(loaded(x[..., :16, :]), model(x[..., :16, :]))
    with pytest.raises(RecastError, match=r"inputs up to 6×8 pixels, got 8×8"):
        loaded(images(32, 32))
