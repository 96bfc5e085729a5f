"""Networks that give every pixel a class: what they return, and a small one for the embedded scenes.

Shapes: images (B, 3, H, W), logits (B, classes, H, W).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models import generate_default_cfgs
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import Conv2dNormActivation as ConvNormReLU

from recast.errors import RecastError
from recast.models.cifar import HALF, CifarResNet
from recast.models.register import pretrained_cfg, register
from recast.models.sources import ON_TIMM_BUILDERS
from recast.papers.dense.neck import Stages

__all__ = ["SceneFCN", "UperHead", "UperNet", "pixel_logits"]


def pixel_logits(outputs: Any, classes: int, size: tuple[int, int], of: str = "the model") -> dict[str, Tensor]:
    """Return the logits (B, classes, H, W) of a segmenter, `out` and, if it has an auxiliary head, `aux`.

    `outputs` is a tensor, or torchvision's {"out": ..., "aux": ...}; smaller maps are enlarged to `size` (bilinear, as
    in torchvision's own networks). Raises RecastError for anything else.
    """
    maps = outputs if isinstance(outputs, Mapping) else {"out": outputs}
    result: dict[str, Tensor] = {}
    for name in ("out", "aux") if "aux" in maps else ("out",):
        logits = maps.get(name)
        if not isinstance(logits, Tensor) or logits.dim() != 4 or logits.shape[1] != classes:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(outputs).__name__
            raise RecastError(
                f"{of} must give logits for every pixel, (images, {classes} classes, height, width), got {got}: "
                "segmentation takes networks such as scenes_fcn and torchvision:deeplabv3_resnet50"
            )
        same = logits.shape[2:] == size
        result[name] = logits if same else F.interpolate(logits, size, mode="bilinear", align_corners=False)
    return result


class SceneFCN(nn.Module):
    """A small ResNet whose three maps, of strides 2, 4 and 8, are each scored by a 1×1 convolution.

    The scores are added up from coarse to fine, skips as in Long et al. 2015 (arXiv:1411.4038). A pixel's scores depend
    on 37 rows and columns around it at most, less than what decides the class of a ring in the scenes.
    """

    def __init__(self, num_classes: int = 9, widths: tuple[int, ...] = (24, 48, 96), in_chans: int = 3) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.trunk = CifarResNet((1,) * len(widths), widths, num_classes=0, in_chans=in_chans, stem_stride=2)
        self.feature_info = [info | {"module": f"trunk.{info['module']}"} for info in self.trunk.feature_info]
        self.reset_classifier(num_classes)

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """Return the three of them."""
        return tuple(self.scores)

    def reset_classifier(self, num_classes: int) -> None:
        self.scores = nn.ModuleList(nn.Conv2d(int(info["num_chs"]), num_classes, 1) for info in self.feature_info)

    def forward(self, x: Tensor) -> Tensor:
        size, maps = x.shape[2:], []
        x = self.trunk.act1(self.trunk.bn1(self.trunk.conv1(x)))
        for info in self.trunk.feature_info:
            x = getattr(self.trunk, str(info["module"]))(x)
            maps.append(x)
        total = self.scores[-1](maps[-1])
        for score, finer in zip(list(self.scores)[-2::-1], maps[-2::-1], strict=True):
            total = score(finer) + F.interpolate(total, finer.shape[2:], mode="bilinear", align_corners=False)
        return F.interpolate(total, size, mode="bilinear", align_corners=False)


class UperHead(nn.Module):
    """Maps of several strides, finest first, to logits (B, classes, h, w) of the finest (Xiao et al. 2018).

    A pyramid of pooled maps on the coarsest, a feature pyramid over all, everything fused (arXiv:1807.10221).
    """

    def __init__(self, channels: Sequence[int], num_classes: int, hidden: int = 512) -> None:
        super().__init__()
        *finer, coarsest = channels
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), ConvNormReLU(coarsest, hidden, 1)) for size in (1, 2, 3, 6)
        )
        self.bottleneck = ConvNormReLU(coarsest + 4 * hidden, hidden, 3)
        self.lateral = nn.ModuleList(ConvNormReLU(width, hidden, 1) for width in finer)
        self.smooth = nn.ModuleList(ConvNormReLU(hidden, hidden, 3) for _ in finer)
        self.fuse = ConvNormReLU(len(channels) * hidden, hidden, 3)
        self.dropout = nn.Dropout2d(0.1)
        self.classify = nn.Conv2d(hidden, num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        def to(x: Tensor, like: Tensor) -> Tensor:
            return F.interpolate(x, size=like.shape[2:], mode="bilinear")

        *finer, coarsest = maps
        pyramid = [self.bottleneck(torch.cat([coarsest, *(to(pool(coarsest), coarsest) for pool in self.pooled)], 1))]
        for lateral, x in zip(list(self.lateral)[::-1], finer[::-1], strict=True):
            pyramid.insert(0, lateral(x) + to(pyramid[0], x))
        smooth = [layer(x) for layer, x in zip(self.smooth, pyramid[:-1], strict=True)]
        fused = self.fuse(torch.cat([to(x, pyramid[0]) for x in (*smooth, pyramid[-1])], 1))
        logits: Tensor = self.classify(self.dropout(fused))
        return logits


class UperNet(Stages):
    """`upernet:NAME`: `UperHead` on the maps of timm's NAME; in training, an auxiliary FCN head on the last but one."""

    def __init__(
        self, name: str, num_classes: int = 150, hidden: int = 512, pretrained: bool = False, **options: Any
    ) -> None:
        super().__init__(name, pretrained, **options)
        self.head = UperHead(self.channels, num_classes, hidden)
        self.auxiliary = fcn_head(self.channels[-2], num_classes, hidden // 2)
        cfg: Any = self.body.pretrained_cfg
        self.pretrained_cfg = {key: value for key, value in cfg.items() if key not in ("num_classes", "classifier")}

    def get_classifier(self) -> tuple[nn.Module, ...]:
        """Return those of the head and of the auxiliary one."""
        return self.head.classify, self.auxiliary[-1]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.maps(x)
        return {"out": self.head(maps)} | ({"aux": self.auxiliary(maps[-2])} if self.training else {})


def fcn_head(channels: int, num_classes: int, hidden: int = 256) -> nn.Sequential:
    """Return the auxiliary head on the map of stride 16."""
    return nn.Sequential(ConvNormReLU(channels, hidden, 3), nn.Dropout2d(0.1), nn.Conv2d(hidden, num_classes, 1))


HEADS = tuple(f"scores.{stage}" for stage in range(3))
default_cfgs = generate_default_cfgs(
    {"scenes_fcn": pretrained_cfg(96, 9, HALF, first_conv="trunk.conv1", classifier=HEADS)}
)
ON_TIMM_BUILDERS["upernet"] = UperNet
register("scenes_fcn", SceneFCN, "A small ResNet with skips, for the embedded scenes.", {})
