from typing import Any

import numpy as np
import pytest
import timm
import torch
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn

from recast import attention_pool_, plan, recast_
from recast.lab.analysis.grad_cam import grad_cam

CLASSES = 3


def resnet() -> nn.Module:
    return timm.create_model("resnet10t", num_classes=CLASSES, stem_width=8, channels=(8, 8, 16, 16)).eval()


NETWORKS: dict[str, Any] = {
    "single token": lambda: attention_pool_(resnet(), False),
    "token a class": lambda: attention_pool_(resnet(), True),
    "recast": lambda: recast_(resnet(), plan(resnet(), torch.randn(1, 3, 64, 96))),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_ours_is_theirs(name: str, make_non_vacuous: Any) -> None:
    model, images = make_non_vacuous(NETWORKS[name]()).train(), torch.randn(2, 3, 64, 96)
    with torch.no_grad():  # as a page is made
        ours = grad_cam(model, images, torch.tensor([[2, 0], [1, 0]]))
    assert ours.shape == (2, 2, 2, 3)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    with GradCAM(model=model.eval(), target_layers=[model.layer4[-1]]) as cam:
        for column, targets in enumerate(((2, 1), (0, 0))):
            assert cam.forward(images, list(map(ClassifierOutputTarget, targets))).shape == (2, 64, 96)
            (activations,), (gradients,) = cam.activations_and_grads.activations, cam.activations_and_grads.gradients
            weights = cam.get_cam_weights(images, None, None, activations, gradients.numpy())
            theirs = (weights[:, :, None, None] * activations.numpy()).sum(1).clip(0)
            assert np.allclose(ours[:, column].numpy(), theirs, atol=1e-6)


def test_tokens_have_no_grad_cam() -> None:
    model, images = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1), torch.randn(1, 3, 32, 32)
    assert grad_cam(model, images, torch.tensor([[0]])) is None
    assert grad_cam(nn.Sequential(nn.Flatten(), nn.Linear(3072, 2)), images, torch.tensor([[0]])) is None


def test_what_writes_into_the_map_is_not_in_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(144, 2))
    images = torch.randn(2, 3, 8, 8)
    maps = grad_cam(model, images, torch.tensor([[0], [1]]))
    before = model[0](images)
    slopes = model[3].weight[:2].view(2, 4, 6, 6) * (before > 0)
    torch.testing.assert_close(maps[:, 0], (slopes.mean((2, 3), keepdim=True) * before).sum(1).relu().detach())
