from functools import cache
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recast.models.build import input_defaults
from recast.papers.prs.network import CMHSAViT

# name: width, patch, side, classes, mixer's kernel parameters and bias
SIZES = {
    "3": (768, 16, 224, 1000, 9 * 768 * 768 + 768),
    "3_pixel": (768, 16, 224, 1000, 9 * 3 * 3 + 768),
    "5": (768, 16, 224, 1000, 25 * 3 * 3 + 768),
    "3_cifar": (192, 4, 32, 100, 9 * 192 * 192 + 192),
    "3_tiny": (48, 4, 32, 100, 9 * 48 * 48 + 48),
    "5_tiny": (48, 4, 32, 100, 25 * 3 * 3 + 48),
}


@cache
def on_meta(name: str) -> CMHSAViT:
    with torch.device("meta"):
        return timm.create_model(f"cmhsa_vit_{name}").eval()


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_macs(name: str) -> None:
    width, patch, side, classes, mixer = SIZES[name]
    model = on_meta(name)
    mlp = 2 * 4 * width * width + 5 * width
    block = 2 * 2 * width + mixer + mlp
    embedding = 3 * patch**2 * width + width
    assert sum(p.numel() for p in model.parameters()) == embedding + 6 * block + 2 * width + (width + 1) * classes
    with FlopCounterMode(display=False) as flops:
        model(torch.empty(1, 3, side, side, device="meta"))
    tokens = (side // patch) ** 2
    taps = mixer - width if isinstance(model.blocks[0].mixer, nn.Conv2d) else (mixer - width) * patch**2
    macs = tokens * (3 * patch**2 * width + 6 * (taps + 8 * width * width)) + width * classes
    assert flops.get_total_flops() == 2 * macs
    assert input_defaults(model).size == (side, side)


def norm(x: Tensor, layer: Any) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), layer.weight, layer.bias, 1e-6).permute(0, 3, 1, 2)


@pytest.mark.parametrize("final_norm", [True, False])
def test_it_is_the_formula(final_norm: bool) -> None:
    """PRS, Eq. 6-9, on maps; the last normalisation is ours."""
    model = CMHSAViT(4, 16, 2, 5, final_norm=final_norm).double().eval()
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    z = F.conv2d(x, model.patch_embed.weight, model.patch_embed.bias, stride=4)
    for block in model.blocks:
        z = z + F.conv2d(norm(z, block.norm1), block.mixer.weight, block.mixer.bias, padding=1)
        tokens = norm(z, block.norm2).flatten(2).mT
        w1, w2 = block.mlp.fc1, block.mlp.fc2
        hidden = F.gelu(F.linear(tokens, w1.weight.flatten(1), w1.bias))
        z = z + F.linear(hidden, w2.weight.flatten(1), w2.bias).mT.unflatten(2, z.shape[2:])
    z = norm(z, model.norm) if final_norm else z
    y = F.linear(z.flatten(2).mean(2), model.head.weight, model.head.bias)
    torch.testing.assert_close(model(x), y)
