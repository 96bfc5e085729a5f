"""Small residual networks for 32×32 images: the CIFAR ResNets, and one for handwritten digits.

Shapes: images B×C×H×W. Three stages at H, H/2 and H/4 with 16, 32 and 64 channels; depth = 6n + 2 for n blocks a stage.
Paper: He et al. 2015, Deep Residual Learning for Image Recognition, section 4.2 (arXiv:1512.03385).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from timm.models import generate_default_cfgs
from timm.models.resnet import BasicBlock
from torch import Tensor, nn

from recast.models.register import CIFAR10, CIFAR100, IMAGENET, pretrained_cfg, register

__all__ = ["CifarResNet", "SubsampleShortcut"]

Shortcut = Literal["option_a", "conv"]


class SubsampleShortcut(nn.Module):
    """Shortcut without parameters (option A of the paper): y = pad(x[:, :, ::stride, ::stride]).

    It takes every stride-th pixel and adds `pad_channels` zero channels before and after.
    """

    def __init__(self, stride: int, pad_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.pad_channels = pad_channels

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.pad_channels, self.pad_channels))

    def extra_repr(self) -> str:
        return f"stride={self.stride}, pad_channels={self.pad_channels}"


def _shortcut(in_channels: int, channels: int, stride: int, kind: Shortcut) -> nn.Module | None:
    if stride == 1 and in_channels == channels:
        return None
    if kind == "option_a":
        return SubsampleShortcut(stride, (channels - in_channels) // 2)
    return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels))


class CifarResNet(nn.Module):
    """Network of a 3×3 stem, three stages, average pooling and a linear head.

    Args:
        blocks, widths: blocks and channels of each stage.
        num_classes: 0 for pooled features B×widths[-1] instead of logits.
        head_name: attribute of the head, so that published weights load as they are.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (3, 3, 3),
        widths: Sequence[int] = (16, 32, 64),
        num_classes: int = 10,
        in_chans: int = 3,
        shortcut: Shortcut = "conv",
        head_name: str = "fc",
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = widths[-1]
        self.head_name = head_name
        self.feature_info = [
            {"num_chs": width, "reduction": stem_stride * 2**i, "module": f"layer{i + 1}"}
            for i, width in enumerate(widths)
        ]
        self.conv1 = nn.Conv2d(in_chans, widths[0], 3, stride=stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.act1 = nn.ReLU(inplace=True)
        channels = widths[0]
        for i, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            stage = []
            for j in range(count):
                stride = 2 if i > 0 and j == 0 else 1
                stage.append(BasicBlock(channels, width, stride, _shortcut(channels, width, stride, shortcut)))
                channels = width
            self.add_module(f"layer{i + 1}", nn.Sequential(*stage))
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.reset_classifier(num_classes)

    def get_classifier(self) -> nn.Module:
        return getattr(self, self.head_name)

    def reset_classifier(self, num_classes: int) -> None:
        self.num_classes = num_classes
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        setattr(self, self.head_name, head.to(self.conv1.weight.device))

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last stage's map, B×widths[-1]×H/4×W/4, of images B×C×H×W."""
        x = self.act1(self.bn1(self.conv1(x)))
        for stage in self.feature_info:
            x = getattr(self, str(stage["module"]))(x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.global_pool(x).flatten(1)
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


# Name: blocks of each stage, kind of shortcut, attribute of the head, description. The names of parameters are those of
# chenyaofo/pytorch-cifar-models and, with _a, of akamaster/pytorch_resnet_cifar10.
VARIANTS: dict[str, tuple[tuple[int, ...], Shortcut, str, str]] = {
    "cifar_resnet20": ((3, 3, 3), "conv", "fc", "ResNet-20 with 1×1 shortcuts"),
    "cifar_resnet56": ((9, 9, 9), "conv", "fc", "ResNet-56 with 1×1 shortcuts"),
    "cifar_resnet20_a": ((3, 3, 3), "option_a", "linear", "ResNet-20 with parameter-free shortcuts"),
    "cifar_resnet56_a": ((9, 9, 9), "option_a", "linear", "ResNet-56 with parameter-free shortcuts"),
    "digits_resnet": ((1, 1, 2), "conv", "fc", "One block a stage, two in the last: 64 channels at 8×8"),
}
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
# The first tag of a name is its default. No tag has weights to fetch: pass a checkpoint.
TAGS = {
    "cifar_resnet20.cifar100": (100, CIFAR100),
    "cifar_resnet20.cifar10": (10, CIFAR10),
    "cifar_resnet56.cifar100": (100, CIFAR100),
    "cifar_resnet56.cifar10": (10, CIFAR10),
    "cifar_resnet20_a": (10, IMAGENET),  # akamaster normalises as for ImageNet
    "cifar_resnet56_a": (10, IMAGENET),
    "digits_resnet": (10, HALF),
}
default_cfgs = generate_default_cfgs(
    {
        name: pretrained_cfg(
            32,
            *data,
            pool_size=(8, 8),
            interpolation="bilinear",
            first_conv="conv1",
            classifier=VARIANTS[name.partition(".")[0]][2],
        )
        for name, data in TAGS.items()
    }
)
for _name, (_blocks, _kind, _head, _doc) in VARIANTS.items():
    register(
        _name,
        CifarResNet,
        f"{_doc}.",
        {"blocks": _blocks, "shortcut": _kind, "head_name": _head},
        feature_cfg={"out_indices": (0, 1, 2), "flatten_sequential": False},
    )
