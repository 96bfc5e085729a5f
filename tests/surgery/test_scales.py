"""LayerScale in every way that networks write it, and random weights that leave no layer silent."""

from __future__ import annotations

import timm
import torch

from recast.surgery.scales import layer_scales, randomize_scales_


def test_every_layer_scale_of_a_network_is_woken() -> None:
    """EdgeNeXt's cross-covariance branch has a LayerScale of its own, `gamma_xca`: at 1e-6 the branch is silent."""
    model = randomize_scales_(timm.create_model("edgenext_xx_small", num_classes=3))
    scales = {name: scale.detach() for name, scale in layer_scales(model).items()}
    assert any(name.endswith("gamma_xca") for name in scales)
    assert all(0.5 <= float(scale.min()) < float(scale.max()) <= 1 for scale in scales.values())


def test_running_statistics_become_those_of_the_example() -> None:
    x = torch.randn(8, 3, 6, 6)
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3, momentum=0.3)).eval()
    randomize_scales_(model, x)
    torch.testing.assert_close(model[0].running_mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(model[0].running_var, x.var((0, 2, 3)))
    assert (model[0].momentum, model.training) == (0.3, False)
