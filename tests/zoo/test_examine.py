"""A few networks of the zoo (all families if slow), recast and verified as the walk does it; rows that fall short."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import PAPERS, InCode
from torch import Tensor, nn
from zoo import examine as examining
from zoo.architectures import Instance, spatial_convolutions
from zoo.examine import examine
from zoo.rows import ZooRow

from recast.layers import functional
from recast.layers.functional import maps

SAMPLE = """
    timm:skresnet18 timm:mobilenetv3_small_050 torchvision:squeezenet1_1 torchvision:lraspp_mobilenet_v3_large
""".split()
LARGER = """
    timm:resnest14d timm:densenet121 timm:regnety_002 timm:nf_regnet_b0 timm:convnextv2_atto timm:inception_next_atto
    timm:lambda_resnet26t
    timm:edgenext_xx_small timm:pvt_v2_b0 timm:levit_128s timm:visformer_tiny torchvision:shufflenet_v2_x0_5
    torchvision:ssdlite320_mobilenet_v3_large timm:resnet18 timm:seresnet33ts timm:resnetv2_50x1_bit timm:resnetblur50
    timm:res2net50_26w_4s timm:dla34 timm:hrnet_w18_small timm:inception_v3 timm:xception41
    timm:mobilenetv4_conv_small timm:tf_efficientnet_b0 timm:efficientnet_cc_b0_4e timm:tf_mixnet_s
    timm:ghostnetv2_100 timm:repvgg_a0 timm:mobileone_s0 timm:eca_nfnet_l0 timm:dm_nfnet_f0 timm:lowformer_b0
    timm:botnet26t_256 timm:fastvit_t8 timm:mobilevit_xxs timm:davit_tiny torchvision:keypointrcnn_resnet50_fpn
""".split()


@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)])
def test_a_sample_of_the_zoo_is_recast_exactly(name: str) -> None:
    row = examine(name)
    assert row.status in ("exact", "exact_fp64"), row
    assert row.last_recast > 0
    assert row.last_split_bitwise is True
    assert row.all_split_bitwise is not False
    assert row.open_error < 2e-5
    assert row.open_layers > 0


End = Callable[[Tensor], Tensor]


def network(end: End) -> InCode:
    return InCode(
        lambda m, x: end(m.head(m.last(m.stem(x)).mean((2, 3)))),
        stem=nn.Conv2d(3, 4, 3, stride=2, padding=1),
        last=nn.Conv2d(4, 4, 3, stride=2, padding=1),
        head=nn.Linear(4, 10),
    )


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ZooRow]:
    def row(end: End = lambda outputs: outputs) -> ZooRow:
        def instantiate(name: str, dtype: torch.dtype = torch.float32) -> Instance:
            torch.manual_seed(0)
            return Instance(network(end).eval().to(dtype), (torch.randn(2, 3, 12, 16).to(dtype),), (12, 16))

        monkeypatch.setattr(examining, "skeleton", lambda name: network(end))
        monkeypatch.setattr(examining, "instantiate", instantiate)
        return examine("mine")

    return row


def test_a_row_of_a_network_that_is_exact(walked: Any) -> None:
    row = walked()
    assert (row.status, row.cause, row.last_recast, row.all_recast, row.last_left) == ("exact", "", 1, 2, "")
    assert row.control > 1e-3


def test_a_broken_layer_is_inexact(walked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = functional.dense
    monkeypatch.setattr(functional, "dense", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    row = walked()
    assert row.status == "inexact"
    assert row.error_fp64 > 1e-4
    monkeypatch.setattr(functional, "dense", lambda *args, **kwargs: right(*args, **kwargs).float().to(args[0].dtype))
    assert walked().status == "exact"  # rounding to fp32 is within the tolerance


def test_open_heads_are_compared(walked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = maps.gaussian_factors
    shifted = lambda *args: tuple(f.roll(1, -1) for f in right(*args))  # noqa: E731
    monkeypatch.setattr(maps, "gaussian_factors", shifted)
    monkeypatch.setattr(maps, "constant", lambda make, *sizes: make(*sizes))  # keep nothing that was shifted
    monkeypatch.setattr(examining, "HEADS", PAPERS)
    assert walked().open_error > 1e-2  # `reference` writes its Gaussian out by itself


def refuse(outputs: Tensor) -> Tensor:
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
    row = walked(end)
    assert row.status == status
    assert cause in row.cause


def test_patch_embeddings_are_no_spatial_convolution() -> None:
    spatial = [nn.Conv2d(8, 8, 2, stride=2, padding=1), nn.Conv1d(1, 1, 3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 1), *spatial)
    assert spatial_convolutions(model) == spatial
