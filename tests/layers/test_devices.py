"""Every tensor is made on the device of the layer: on the meta device, an operation with a tensor of the CPU fails."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

import recast
from recast.layers.attention_pool import AttentionPool
from recast.surgery.rules import convert

CONVOLUTIONS = {
    "3×3": nn.Conv2d(8, 8, 3, padding=1),
    "strided": nn.Conv2d(8, 12, (5, 3), 2, (2, 1), bias=False),
    "reflecting": nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
    "dilated": nn.Conv2d(8, 8, 3, padding=2, dilation=2),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "transposed": nn.ConvTranspose2d(8, 8, 3, 2, 1),
}
OPENED: dict[str, Any] = {"gamma_init": 0.3, "s_init": 0.3, "gaussian_heads": "all"}
CONFIGS: dict[str, dict[str, Any]] = {
    "opened": OPENED,
    "sigmoid": {"gate": "sigmoid"},
    "linear content": OPENED | {"content": "linear"},
    "padding seen": OPENED | {"attend_padding": True},
    "one head": {"gamma_init": 0.3, "head_dim": 8, "project_values": False},
}


def train(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> None:
    images = torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)
    model.to("meta", dtype).train()(images).square().mean().backward()
    assert images.grad is not None
    assert {p.grad.device.type for p in model.parameters() if p.grad is not None} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "reference", "dense", "split", "merged", "sdpa"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_form_of_a_layer(config: str, backend: str, dtype: torch.dtype) -> None:
    for convolution in CONVOLUTIONS.values():
        layer = convert(convolution, recast.RecastConfig(**{"gate": "linear", "backend": backend} | CONFIGS[config]))
        train(layer, 2, 8, 9, 7, dtype=dtype)


@torch.no_grad()
def test_inference_and_networks() -> None:
    layer = convert(CONVOLUTIONS["3×3"], recast.RecastConfig(gate="bias"))
    layer.set_size_(9, 7)
    for model, shape in (
        (layer, (2, 8, 9, 7)),
        (AttentionPool(8, 5, start="average"), (2, 8, 9, 7)),
        (timm.create_model("patchconvnet_s60", num_classes=5, depth=2), (2, 3, 64, 64)),
    ):
        model.to("meta").eval()(torch.empty(shape, device="meta"))
        with torch.enable_grad():
            train(model, *shape)
