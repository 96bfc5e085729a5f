"""A sample of the zoo: one of every family, recast and verified as the walk does it; and rows that must fall short."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from zoo import examine as examining
from zoo.architectures import Instance, spatial_convolutions
from zoo.examine import examine

from recast.layers import functional
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.functional import maps
from recast.surgery.planning import plan

SAMPLE = """
    timm:skresnet18 timm:resnest14d timm:densenet121 timm:mobilenetv3_small_050 timm:regnety_002 timm:nf_regnet_b0
    timm:convnextv2_atto timm:inception_next_atto timm:lambda_resnet26t timm:edgenext_xx_small timm:pvt_v2_b0
    timm:levit_128s timm:visformer_tiny torchvision:shufflenet_v2_x0_5 torchvision:squeezenet1_1
    torchvision:lraspp_mobilenet_v3_large torchvision:ssdlite320_mobilenet_v3_large
""".split()
LARGER = """
    timm:resnet18 timm:seresnet33ts timm:resnetv2_50x1_bit timm:resnetblur50 timm:res2net50_26w_4s timm:dla34
    timm:hrnet_w18_small timm:inception_v3 timm:xception41 timm:mobilenetv4_conv_small timm:tf_efficientnet_b0
    timm:efficientnet_cc_b0_4e timm:tf_mixnet_s timm:ghostnetv2_100 timm:repvgg_a0 timm:mobileone_s0 timm:eca_nfnet_l0
    timm:dm_nfnet_f0 timm:lowformer_b0 timm:botnet26t_256 timm:fastvit_t8 timm:mobilevit_xxs timm:davit_tiny
    torchvision:keypointrcnn_resnet50_fpn
""".split()
SLOW = bool(os.environ.get("RECAST_SLOW"))


@pytest.mark.parametrize("name", [*SAMPLE, *(LARGER if SLOW else ())])
def test_a_sample_of_the_zoo_is_recast_exactly(name: str) -> None:
    row = examine(name)
    assert row.status in ("exact", "exact_fp64"), row
    assert row.last_recast > 0
    assert row.last_split_bitwise is True
    assert row.all_split_bitwise is not False
    assert row.open_error < 2e-5
    assert row.open_layers > 0


class Net(nn.Module):
    """Two stages and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.last = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.stem(x)).mean((2, 3)))


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`examine` with a network of the test's own."""

    def with_network(make: Any) -> Any:
        def instantiate(name: str, dtype: torch.dtype = torch.float32) -> Instance:
            torch.manual_seed(0)
            return Instance(make().eval().to(dtype), (torch.randn(2, 3, 12, 16).to(dtype),), (12, 16))

        monkeypatch.setattr(examining, "skeleton", lambda name: make())
        monkeypatch.setattr(examining, "instantiate", instantiate)
        return examine("mine")

    return with_network


def test_a_row_of_a_network_that_is_exact(walked: Any) -> None:
    row = walked(Net)
    assert (row.status, row.cause, row.last_recast, row.all_recast) == ("exact", "", 1, 2)
    assert row.last_left == ""
    assert row.control > 1e-3


def test_a_broken_layer_is_inexact(walked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is a thousandth off is found, in fp64 too."""
    right = functional.dense
    monkeypatch.setattr(functional, "dense", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    row = walked(Net)
    assert row.status == "inexact"
    assert row.error_fp64 > 1e-4
    monkeypatch.setattr(functional, "dense", lambda *args, **kwargs: right(*args, **kwargs).float().to(args[0].dtype))
    assert walked(Net).status == "exact"  # rounding to fp32 is within the tolerance


def test_open_heads_are_compared(walked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = maps.gaussian_factors
    shifted = lambda *args: tuple(f.roll(1, -1) for f in right(*args))  # noqa: E731
    monkeypatch.setattr(maps, "gaussian_factors", shifted)
    monkeypatch.setattr(examining, "plan", partial(plan, config=RecastConfig(**PAPERS_LAYER)))
    assert walked(Net).open_error > 1e-2  # `reference` writes its Gaussian out by itself


def refuse(outputs: torch.Tensor) -> torch.Tensor:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("end", "status", "cause"),
    [
        (lambda outputs: 1e-9 * outputs + 1, "vacuous", "two swapped heads move the outputs by"),
        (lambda outputs: outputs / 0, "failed", "the parent's outputs are not finite"),
        (refuse, "failed", "on purpose"),
    ],
)
def test_what_proves_nothing_falls_short(walked: Any, end: Any, status: str, cause: str) -> None:
    class Ending(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return end(super().forward(x))

    row = walked(Ending)
    assert row.status == status
    assert cause in row.cause


def test_patch_embeddings_are_no_spatial_convolution() -> None:
    others = [nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 1)]
    spatial = [nn.Conv2d(8, 8, 2, stride=2, padding=1), nn.Conv1d(1, 1, 3)]
    assert spatial_convolutions(nn.Sequential(*others, *spatial)) == spatial
