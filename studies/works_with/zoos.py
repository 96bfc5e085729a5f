"""Networks of other packages, recast: is the start exact, and do the gates learn?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tools import LAYERS, Case, Cell, tool
from torch import Tensor, nn

import recast


def tensors(value: Any) -> list[Tensor]:
    """Return the floating point tensors of an output."""
    leaves = torch.utils._pytree.tree_leaves(dict(value) if hasattr(value, "items") else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def zoo(name: str, does: str, *packages: str, size: int = 64) -> Callable[[Any], object]:
    """Add a function that builds a network; returns it, with an image shape if that is not (2, 3, size, size)."""

    def add(build: Callable[[], Any]) -> object:
        def run(case: Case) -> Cell:
            torch.manual_seed(0)
            built = build()
            parent, shape = built if isinstance(built, tuple) else (built, (2, 3, size, size))
            images = torch.rand(shape)
            for norm in parent.modules():
                if isinstance(norm, nn.BatchNorm2d) and norm.affine and not norm.weight.any():
                    nn.init.ones_(norm.weight)  # as after training: behind a zero nothing learns
            parent.eval()
            gate = case.layer
            child = copy.deepcopy(parent)
            plan = recast.plan(parent, images, recast.RecastConfig(gate=gate), where=LAYERS[gate])
            if not plan.steps:
                reasons = dict.fromkeys(left.reason for left in plan.left)
                return Cell("refused", None, "; ".join(reasons)[:160])
            recast.recast_(child, plan)
            exact = recast.verify(parent, child, images)
            child.train()
            sum(t.square().mean() for t in tensors(child(images)) if t.requires_grad).backward()
            gates = [p.grad for n, p in child.named_parameters() if n.endswith(".gamma")]
            learn = sum(g is not None and bool(g.any()) for g in gates)
            note = f"layers: {len(plan.steps)}" + f"; gates with gradients: {learn}" * (learn < len(gates))
            return Cell("exact" if exact.ok() else "wrong", exact.max_relative_error, note)

        return tool(name, does, *packages, is_own=True)(run)

    return add


@zoo("segmentation-models-pytorch", "recast `Unet('resnet18')`", "segmentation-models-pytorch==0.6.0")
def smp() -> nn.Module:
    import segmentation_models_pytorch

    return segmentation_models_pytorch.Unet("resnet18", encoder_weights=None, classes=3)


@zoo("ultralytics", "recast YOLOv8n's network", "ultralytics==8.4.190")
def ultralytics() -> nn.Module:
    from ultralytics.nn.tasks import DetectionModel

    return DetectionModel("yolov8n.yaml", nc=5, verbose=False)


@zoo("torchvision, segmentation", "recast `deeplabv3_resnet50`", "torchvision")
def torchvision_segmentation() -> nn.Module:
    from torchvision.models.segmentation import deeplabv3_resnet50

    return deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=3)


class Detector(nn.Module):
    """Takes a batch, and gives a detector of torchvision the targets that it needs in training."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
        return self.network(list(images), [target] * len(images) if self.training else None)


@zoo("torchvision, detection", "recast `fasterrcnn_resnet50_fpn`", "torchvision", size=128)
def torchvision_detection() -> nn.Module:
    from torchvision.models.detection import fasterrcnn_resnet50_fpn

    return Detector(
        fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, min_size=128, max_size=128)
    )


@zoo("transformers, ResNet", "recast `ResNetForImageClassification`", "transformers==5.23.0")
def transformers_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=[1, 1, 1, 1], hidden_sizes=[32, 64, 96, 128]))


@zoo("transformers, ConvNeXt", "recast `ConvNextForImageClassification`", "transformers==5.23.0")
def transformers_convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64]))


@zoo("efficientnet-pytorch", "recast B0", "efficientnet-pytorch==0.7.1")
def efficientnet() -> nn.Module:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=5)


@zoo("pytorchcv", "recast `resnet20_cifar10`", "pytorchcv==0.0.74", size=32)
def pytorchcv() -> nn.Module:
    from pytorchcv.model_provider import get_model

    return get_model("resnet20_cifar10")


@zoo("monai, UNet", "recast a 2-d UNet", "monai==1.6.1")
def monai() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, 3, 4, (8, 16, 32), (2, 2), num_res_units=1)


@zoo("monai, 3-d UNet", "recast a 3-d UNet", "monai==1.6.1")
def monai_3d() -> Any:
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (4, 8), (2,)), (1, 1, 16, 16, 16)


@zoo("dynamic-network-architectures", "recast nnU-Net's `PlainConvUNet`, 2-d", "dynamic-network-architectures==0.4.4")
def nnunet() -> Any:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    how = {"norm_op": nn.InstanceNorm2d, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU}
    network = PlainConvUNet(1, 3, (8, 16, 32), nn.Conv2d, 3, (1, 2, 2), 1, 2, 1, conv_bias=True, **how)
    return network, (2, 1, 32, 32)


@zoo("open_clip", "recast the image tower of RN50", "open-clip-torch==3.3.0", size=224)
def open_clip() -> nn.Module:
    import open_clip

    return open_clip.create_model("RN50", pretrained=None).visual


@zoo("kornia", "recast `HardNet8`'s descriptor network", "kornia==0.9.0", "kornia_rs")
def kornia() -> Any:
    from kornia.feature import HardNet

    return HardNet(pretrained=False), (2, 1, 32, 32)


@zoo("rfdetr", "recast RF-DETR's projector", "rfdetr==1.11.2")
def rfdetr() -> Any:
    from rfdetr.models.backbone.projector import MultiScaleProjector

    network = MultiScaleProjector([16, 16], 32, [1.0])
    return nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), Twice(network)), (2, 3, 64, 64)


class Twice(nn.Sequential):
    """Gives a network of several feature maps the same map twice."""

    def forward(self, x: Tensor) -> Any:
        return super().forward([x, x])
