"""`grafit_resnet50`: ResNet-50 with an MLP as its classifier, for transfer to fine classes.

Grafit, Touvron et al. 2021 (arXiv:2011.12982), section on transfer (thesis, 2.4.6 and Table 2.16): linear, BatchNorm,
ReLU, linear. The width between them is not given; 4096 is that of its projector.
"""

from __future__ import annotations

from typing import Any

from timm.models import generate_default_cfgs
from timm.models.resnet import Bottleneck, ResNet
from torch import nn

from recast.models.register import IMAGENET, pretrained_cfg, register


class MlpResNet(ResNet):
    """timm's network; `model.new_head` makes the whole MLP anew, so the weights of a plain ResNet fit."""

    def __init__(self, *, hidden: int = 4096, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = hidden
        self.reset_classifier(self.num_classes, kwargs.get("global_pool"))

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the MLP."""
        super().reset_classifier(num_classes, "avg" if global_pool is None else global_pool)
        if num_classes:
            first, last = nn.Linear(self.num_features, self.hidden), nn.Linear(self.hidden, num_classes)
            self.fc = nn.Sequential(first, nn.BatchNorm1d(self.hidden), nn.ReLU(), last)


default_cfgs = generate_default_cfgs(
    {"grafit_resnet50": pretrained_cfg(224, 1000, IMAGENET, first_conv="conv1", classifier="fc")}
)
register("grafit_resnet50", MlpResNet, "ResNet-50 with an MLP.", {"block": Bottleneck, "layers": (3, 4, 6, 3)})
