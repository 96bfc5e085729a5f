"""pytorch-grad-cam (Gildenblat et al.) runs unchanged on what we make."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn

from recast.models.patchconvnet import PatchConvNet
from recast.surgery.apply import recast_
from recast.surgery.planning import plan
from recast.surgery.pooling.swap import attention_pool_

CLASSES = 3


def resnet() -> nn.Module:
    return timm.create_model("resnet10t", num_classes=CLASSES, stem_width=8, channels=(8, 8, 16, 16)).eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "single token": (lambda: attention_pool_(resnet(), False), "layer4"),
    "token a class": (lambda: attention_pool_(resnet(), True), "layer4"),
    "patchconvnet": (lambda: PatchConvNet(16, 2, CLASSES, per_class=True, init_values=1.0).eval(), "blocks"),
    "recast": (lambda: recast_(resnet(), plan(resnet(), torch.randn(1, 3, 64, 96))), "layer4"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_differ_between_images_and_classes(name: str, make_non_vacuous: Callable[..., nn.Module]) -> None:
    build, blocks = NETWORKS[name]
    model, images = make_non_vacuous(build()), torch.randn(2, 3, 64, 96)
    with GradCAM(model=model, target_layers=[model.get_submodule(blocks)[-1]]) as cam:  # type: ignore[index]
        maps = np.stack([cam(images, [ClassifierOutputTarget(target)] * 2) for target in range(CLASSES)])
    assert maps.shape == (CLASSES, 2, 64, 96)
    assert np.isfinite(maps).all()
    assert np.ptp(maps, axis=0).max() > 0.1
    assert np.ptp(maps, axis=1).max() > 0.1
    assert all(not module._forward_hooks for module in model.modules())
