"""pytorch-grad-cam (Gildenblat et al.) runs unchanged on what we make."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import timm
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torch.nn import functional as F

from recast.models.patchconvnet import PatchConvNet
from recast.surgery.apply import recast_
from recast.surgery.planning import plan
from recast.surgery.pooling.swap import attention_pool_, attention_pools

SIZE = (64, 96)
CLASSES = 5


def resnet() -> nn.Module:
    return timm.create_model("resnet10t", num_classes=CLASSES, stem_width=8, channels=(8, 8, 16, 16)).eval()


def pooled(per_class: bool) -> nn.Module:
    model = attention_pool_(resnet(), per_class)
    for pool in attention_pools(model).values():  # it looks, and differently for each class
        for weight in (pool.attn.q.weight, pool.attn.k.weight, pool.cls_token):
            nn.init.normal_(weight)
    return model


def recast_resnet() -> nn.Module:
    model = resnet()
    return recast_(model, plan(model, torch.randn(1, 3, *SIZE)))


def patchconvnet(per_class: bool) -> nn.Module:
    return PatchConvNet(16, 2, CLASSES, per_class=per_class, init_values=1.0).eval()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet, single token": (lambda: pooled(False), "layer4"),
    "resnet, token a class": (lambda: pooled(True), "layer4"),
    "patchconvnet": (lambda: patchconvnet(False), "blocks"),
    "patchconvnet, token a class": (lambda: patchconvnet(True), "blocks"),
    "recast resnet": (recast_resnet, "layer4"),
}


def grad_cam(model: nn.Module, layer: nn.Module, images: Tensor, target: int) -> np.ndarray:
    with GradCAM(model=model, target_layers=[layer]) as cam:
        return cam(input_tensor=images, targets=[ClassifierOutputTarget(target)] * len(images))


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_differ_between_images_and_classes(name: str, make_non_vacuous: Callable[..., nn.Module]) -> None:
    build, blocks = NETWORKS[name]
    model = make_non_vacuous(build())
    layer, images = model.get_submodule(blocks)[-1], torch.randn(2, 3, *SIZE)  # type: ignore[index]
    maps = np.stack([grad_cam(model, layer, images, target) for target in range(CLASSES)])
    assert maps.shape == (CLASSES, 2, *SIZE)
    assert np.isfinite(maps).all()
    assert max(np.abs(maps[a] - maps[b]).max() for a in range(CLASSES) for b in range(a)) > 0.1
    assert np.abs(maps[:, 0] - maps[:, 1]).max() > 0.1
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("per_class", [False, True])
def test_it_is_the_gradient_of_the_logit(per_class: bool, make_non_vacuous: Callable[..., nn.Module]) -> None:
    """max(0, Σ_c mean(∂logit/∂A_c)·A_c), computed by hand on the trunk's map, stretched to 0 … 1 and enlarged."""
    model, images = make_non_vacuous(patchconvnet(per_class)), torch.randn(1, 3, *SIZE)
    features = model.forward_features(images).detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.forward_head(features)[0, 3], features)
    by_hand = (gradient.mean((2, 3), keepdim=True) * features).sum(1).relu().detach()
    enlarged = F.interpolate(by_hand[:, None] - by_hand.amin(), size=SIZE, mode="bilinear")[:, 0].numpy()
    found = grad_cam(model, model.blocks[-1], images, 3)
    np.testing.assert_allclose(found, enlarged / enlarged.max(), atol=1e-4)
