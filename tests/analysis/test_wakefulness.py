import math

import pytest
import torch
from torch import nn

import recast
from recast.analysis.wakefulness import wakefulness
from recast.layers.cmhsa import CMHSA, recast_layers
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.surgery.wake import wake_

IMAGES = torch.randn(6, 3, 7, 9, generator=torch.Generator().manual_seed(0))


def network(groups: int = 1, **config: float | str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1, groups=groups)).eval()
    return recast.recast_(
        model, recast.plan(model, IMAGES[:1], RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config), where="all")
    )


@pytest.mark.parametrize("groups", [1, 4])
@torch.no_grad()
def test_the_numbers_are_those_of_the_maps_written_out(groups: int) -> None:
    model = network(groups, gamma_init=0.3)
    wake_(model, IMAGES)
    (layer,) = recast_layers(model).values()
    (measured,) = wakefulness(model, IMAGES, queries=1000).values()
    x = model[:2](IMAGES)
    content = layer.attention(x).content.unflatten(-1, (9, 11))[..., 1:8, 1:10].flatten(3)
    values = nn.functional.conv2d(x, layer.value[:, :, None, None], groups=groups).flatten(2).transpose(1, 2)
    output = (layer(x) - layer.bias[:, None, None]).square().mean()
    for head in range(layer.num_heads):
        C = content[:, head]
        assert measured["entropy"][head] == pytest.approx(float(-(C * C.log()).sum(-1).mean()) / math.log(63), rel=1e-5)
        assert measured["distance"][head] == pytest.approx(float((C - 1 / 63).abs().sum(-1).mean()) / 2, rel=1e-5)
        kernel = layer.weight.flatten(2)[..., head][..., None]
        for name, maps in (("content_share", C), ("attention_share", C - 1 / 63)):
            part = nn.functional.conv1d((0.3 * maps @ values).transpose(1, 2), kernel, groups=groups)
            share = float((part.square().mean() / output).sqrt())
            assert measured[name][head] == pytest.approx(share, rel=1e-4), name


def test_cmhsa_is_measured_by_what_content_changes() -> None:
    model = network(gate="bias", bias_init=3.0)
    (asleep,) = wakefulness(model, IMAGES).values()
    assert max(asleep["attention_share"]) < 1e-6
    wake_(model, IMAGES)
    (awake,) = wakefulness(model, IMAGES).values()
    assert isinstance(model[2], CMHSA)
    assert min(awake["attention_share"]) > 0.01


def test_pooling_that_no_optimizer_trains_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    images = torch.randn(4, 3, 9, 9)
    model = recast.recast_(model, recast.plan(model, images))
    before = torch.optim.AdamW(recast.param_groups(model))
    recast.attention_pool_(model, example=images)
    assert "1 is in no optimizer group: build the optimizer after attention_pool_" in repr(
        recast.awake(model, images, before)
    )
    after = torch.optim.AdamW(recast.param_groups(model))
    assert not recast.awake(model, images, after).pool_outside
