"""ResNet-50 with an MLP as classifier (thesis, Table 2.16): its layers, and that weights of plain ResNets fit."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from recast.models.build import build
from recast.models.config import ModelConfig
from recast.papers.grafit.config import Neighbors
from recast.papers.grafit.head import add_embedding_

TRUNK = 23_508_032
SMALL = {"layers": [1, 1, 1, 1], "hidden": 8}


def test_layers() -> None:
    with torch.device("meta"):
        model = timm.create_model("resnet50_mlp", num_classes=102)
    assert [type(layer) for layer in model.fc] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    counts = 2048 * 4096 + 4096 + 2 * 4096 + 4096 * 102 + 102
    assert sum(parameter.numel() for parameter in model.parameters()) == TRUNK + counts
    model.reset_classifier(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == TRUNK


@pytest.mark.parametrize("is_grafit", [False, True])
def test_it_goes_on_from_a_plain_resnet_and_from_grafit_s(is_grafit: bool, tmp_path: Path) -> None:
    plain = timm.create_model("resnet50", layers=SMALL["layers"])
    if is_grafit:
        add_embedding_(plain, Neighbors(dim=4, hidden=4), 1000)
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    config = ModelConfig("resnet50_mlp", tmp_path / "weights.safetensors", new_head=True, kwargs=SMALL)
    model = build(config, num_classes=5).eval()
    images = torch.randn(2, 3, 64, 64)
    assert model(images).shape == (2, 5)
    assert model.forward_features(images).equal(plain.eval().forward_features(images))
