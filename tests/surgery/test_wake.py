"""`wake_`: exact all the same, from the images alone, and content maps that depend on the image."""

import copy
from typing import Any

import pytest
import torch
from layer_helpers import InCode, recast_copy
from torch import Tensor, nn

import recast
from recast.errors import RecastError
from recast.layers.cmhsa import recast_layers
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.surgery.wake import _logits, relative_entropy, wake_

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {"padding": 1},
    "strided": {"padding": 1, "stride": 2},
    "dilated": {"padding": 2, "dilation": 2},
    "unpadded": {},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "grouped": {"padding": 1, "groups": 4},
    "depthwise": {"padding": 1, "groups": 16},
    "transposed": {"padding": 1, "stride": 2, "transposed": True},
}


def images(seed: int = 0) -> Tensor:
    """Smooth random images: the channels of a white noise would have no structure to find."""
    noise = torch.randn(24, 3, 5, 7, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(noise, (14, 18), mode="bilinear") + 0.5


def network(transposed: bool = False, **options: Any) -> nn.Module:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    return nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), kind(16, 16, 3, **options), nn.ReLU()).eval()


def recast_network(parent: nn.Module, **config: Any) -> Any:
    return recast_copy(
        parent, images()[:1], RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config), where="all", max_tokens=2000
    )


@pytest.mark.parametrize("content", ["softmax", "linear"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_woken_network_computes_what_it_did_bit_for_bit(kind: str, content: str) -> None:
    parent = network(**CONVOLUTIONS[kind])
    child = recast_network(parent, content=content, head_dim=4)
    (woken,) = wake_(child, images())
    assert woken.entropy_before == pytest.approx(1, abs=1e-6)
    assert 0.3 < woken.entropy_after < 0.97
    with torch.no_grad():
        assert torch.equal(child(images(1)), parent(images(1)))


def test_logits_have_the_stated_deviation_in_every_head_and_the_mean_is_projected_out() -> None:
    child = recast_network(network(padding=1))
    wake_(child, images(), logit_std=1.5)
    (layer,) = recast_layers(child).values()
    maps = child[1](child[0](images()))
    deviation = _logits(layer, maps[:16]).var(-1, correction=0).mean((0, 2)).sqrt()
    torch.testing.assert_close(deviation, torch.full_like(deviation, 1.5), rtol=1e-4, atol=0)
    mean = maps.mean((0, 2, 3))
    assert (layer.query @ mean).norm() < 1e-4 * layer.query.norm() * mean.norm()
    assert torch.equal(layer.query, layer.key)
    first, second = layer.query.unflatten(0, (layer.num_heads, -1))[:2]
    assert not torch.allclose(first, second, atol=1e-2)


@pytest.mark.parametrize("query_key", ["images", "random", "similar"])
def test_beside_a_convolution_queries_and_keys_have_a_rotation_each(query_key: Any) -> None:
    parent = network(padding=1)
    child = recast_copy(parent, images(), RecastConfig(query_key=query_key), where=["2"])
    woken = wake_(child, images())
    layer: Any = child.get_submodule("2")
    assert torch.equal(layer.query, layer.key) == (query_key == "similar")
    inputs = parent[:2](images())  # type: ignore[index]
    assert float(_logits(layer, inputs).detach().std(-1).pow(2).mean().sqrt()) == pytest.approx(1.5, rel=0.1)
    assert woken[0].entropy_after < 0.95
    assert recast.verify(parent, child, images()).bitwise


@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_the_size_of_the_inputs_decides_neither_maps_nor_how_far_an_update_moves_them(size: float) -> None:
    """Adam moves every weight by the rate: with W_qry as small as large inputs ask for, the maps would be gone."""
    child = recast_copy(network(padding=1), images(), RecastConfig(), where=["2"])
    layer: Any = child.get_submodule("2")
    x = child[:2](images()).detach() * size  # type: ignore[index]
    (woken,) = recast.wake_(layer, x)
    entropy = float(relative_entropy(layer.attention(x[:16])).detach().mean())
    assert woken.entropy_after == pytest.approx(entropy, rel=0.02)
    assert float(layer.query.detach().square().mean().sqrt()) >= 0.1249
    assert (float(layer.qk_scale) < 1) == (size == 100)
    before = layer.attention(x).detach()
    recast.wake_(layer, x)
    torch.testing.assert_close(layer.attention(x).detach(), before)
    nn.init.constant_(layer.gamma, 1 / size)
    optimizer = torch.optim.Adam([layer.query, layer.key], lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    after = layer.attention(x).detach()
    assert 1e-3 < float((after - before).abs().sum(-1).mean()) < 0.7


def test_inputs_that_are_too_large_for_queries_leave_the_layer_exact() -> None:
    parent = network(padding=1)
    child: Any = recast_copy(parent, images(), RecastConfig(), where=["2"])
    with pytest.warns(UserWarning, match="content maps stay uniform in 2:"):
        wake_(child[2:], 1e12 * torch.randn(4, 16, 5, 7))
    assert recast.verify(parent, child, images()).bitwise


def test_averages_are_woken_too() -> None:
    for config in (RecastConfig(), RecastConfig("linear", **PAPERS_LAYER)):
        model = recast_copy(network(padding=1), images(), config, where=["2"])
        average = torch.optim.swa_utils.AveragedModel(model)
        wake_(model, 100 * images(), averages=[average])
        assert all(map(torch.equal, model.state_dict().values(), average.module.state_dict().values()))


def test_what_cannot_be_woken_is_refused_before_any_change() -> None:
    child = recast_copy(network(padding=1), images(), RecastConfig(), where=["2"])
    narrow = recast_copy(network(padding=1), images(), RecastConfig(head_dim=2), where=["2"])
    low_rank = copy.deepcopy(child)
    nn.utils.parametrizations.weight_norm(low_rank.get_submodule("2"), "query")
    for model, averages, message in (
        (child, [network(padding=1)], "no layer '2' of Sequential was recast"),
        (child, [narrow], "^2 of an average is another layer than the network's"),
        (low_rank, [], "^2 cannot be woken: its queries or keys are computed by other code"),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(RecastError, match=message):
            wake_(model, images(), averages=averages)
        assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_woken_keys_learn_from_the_first_gate_on() -> None:
    """With a gate barely open, woken queries get a gradient; with W_key = 0 they get none."""
    gradients = {}
    for woken in (False, True):
        child = recast_network(network(padding=1), gamma_init=0.1)
        if woken:
            wake_(child, images())
        child(images(1)).square().sum().backward()
        (layer,) = recast_layers(child).values()
        gradients[woken] = float(layer.query.grad.norm())
    assert gradients[False] == 0 < gradients[True]


@pytest.mark.parametrize("content", ["softmax", "linear"])
def test_a_layer_that_sees_several_sizes_is_woken(content: str) -> None:
    """As a detector's head is: over the pyramid, and in batches of other sizes."""
    head = nn.Conv2d(3, 4, 3, padding=1)
    model = InCode(lambda m, x: m.head(x).mean() + m.head(x[..., ::2, ::2]).mean(), head=head).eval()
    recast.recast_(
        model, recast.plan(model, images(), RecastConfig("linear", content=content, **PAPERS_LAYER), where="head")
    )
    (woken,) = wake_(model, [images()[:3], images(1)[:2, :, :9], images(2)])
    assert 0.3 < woken.entropy_after < 0.99 < woken.entropy_before
    with pytest.raises(RecastError, match="no layer 'hed' of InCode was recast"):
        wake_(model, images(), layers=["head", "hed"])


def test_a_frozen_network_says_that_no_attention_is_trained() -> None:
    child = recast_network(network(padding=1)).requires_grad_(False)
    with pytest.warns(UserWarning, match="frozen"):
        wake_(child, images())
    with pytest.warns(UserWarning, match="frozen"):
        assert recast.param_groups(child) == []
    next(iter(recast_layers(child).values())).requires_grad_(True)
    wake_(child, images())
    assert recast.param_groups(child)


def test_trained_queries_and_keys_are_replaced_with_a_warning() -> None:
    child = recast_copy(nn.Sequential(network(padding=1), nn.Conv2d(16, 8, 3)), images()[:1], where="all")
    trained, new = recast_layers(child).items()
    wake_(child, images())
    nn.init.ones_(trained[1].gamma)
    query = trained[1].query.clone()
    wake_(child, images(), layers=[new[0]])
    assert torch.equal(trained[1].query, query)
    with pytest.warns(UserWarning, match=rf"wake_ replaces trained queries and keys \({trained[0]}\): .*layers="):
        wake_(child, images())
