"""Back again: every class folds into a convolution of the same function, whatever its gates were in between."""

import copy
from typing import Any

import pytest
import timm.layers
import torch
from timm.utils import reparameterize_model
from torch import nn
from torch.nn.utils import parametrizations

import recast
from recast import GPSA, RecastConfig

KINDS = (
    "Conv2d", "Conv2dSame", "ConvTranspose2d", "ScaledStdConv2d", "ScaledStdConv2dSame", "StdConv2d", "StdConv2dSame"
)  # fmt: skip


def kind_of_fold(module: Any) -> type[nn.Module]:
    if isinstance(module, nn.ConvTranspose2d):
        return nn.ConvTranspose2d
    follows_input = isinstance(module, timm.layers.Conv2dSame) or getattr(module, "same_pad", False)
    return timm.layers.Conv2dSame if follows_input else nn.Conv2d


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_a_layer_folds_untouched_and_with_its_values_when_its_gates_closed_again(
    kind: str, dtype: Any, tolerance: float, case_of: Any, layer_of: Any, open_gates: Any
) -> None:
    """Untouched: the same bits. Random W_val and kernel, gates opened, then closed: the layer, to be recast again."""
    for seed in range(20):
        module, x, text = case_of(kind, seed, dtype)
        folded = layer_of(module, RecastConfig()).fold()
        assert torch.equal(folded(x), module(x)), text
        if isinstance(folded, nn.Sequential):  # a padding layer for other padding at the end than at the start
            folded = folded[1]
        assert type(folded) is kind_of_fold(module), text
        for name in ("stride", "dilation", "groups", "in_channels", "out_channels", "kernel_size"):
            assert getattr(folded, name) == getattr(module, name), f"{name}, {text}"
        if kind == "ConvTranspose2d":
            assert (folded.padding, folded.output_padding) == (module.padding, module.output_padding), text
            assert torch.equal(folded.weight, module.weight), text
        layer = open_gates(layer_of(module), seed)
        with torch.no_grad():
            layer.weight.normal_()
            assert layer.fold() is layer, text
            opened = layer(x)
            layer.gamma.zero_()
            layer.spread.zero_()
            expected = layer(x)
            folded = layer.fold()
            scale = max(1.0, float(expected.abs().max()))
            assert float((folded(x) - expected).abs().max()) <= tolerance * scale, text
            if not isinstance(folded, nn.Sequential):
                assert torch.equal(layer_of(folded.eval())(x), folded(x)), text
        if layer.num_heads > 1:
            assert float((opened - expected).abs().max()) > 1e-3 * scale, text


@pytest.mark.parametrize("fold", [recast.fold_, lambda model: reparameterize_model(model, inplace=True)])
def test_a_network_of_every_class_folds_and_is_loaded_folded(fold: Any, tmp_path: Any) -> None:
    parent = nn.Sequential(
        timm.layers.Conv2dSame(3, 4, 3, 2), nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, groups=2),
        timm.layers.ScaledStdConv2d(4, 4, 3), timm.layers.StdConv2dSame(4, 4, 2, 2),
        parametrizations.weight_norm(nn.Conv2d(4, 5, 3)),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 14, 11)
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, x, where="all"))
    assert all(isinstance(module, GPSA) for module in child)
    fold(child)
    names = [type(module).__name__ for module in child]
    assert names == ["Conv2dSame", "ConvTranspose2d", "Conv2d", "Conv2dSame", "Conv2d"]
    assert torch.equal(child(x), parent(x))
    if fold is recast.fold_:  # the plan says so
        loaded = recast.load(recast.save(child, tmp_path / "folded.safetensors"), parent=parent)
        assert [type(module).__name__ for module in loaded] == names
        assert torch.equal(loaded(x), child(x))
