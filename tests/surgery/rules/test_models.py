"""Networks that must work: shared and wrapped layers, compiled parts, half precision, the meta device, blocks."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_helpers import PAPERS, InCode, unchanged
from timm.layers import BlurPool2d, Conv2dSame, ConvNormAct, MixedConv2d, ScaledStdConv2d, ScaledStdConv2dSame
from torch import nn

import recast
from recast import RecastConfig
from recast.errors import RecastError
from recast.layers.cmhsa import RecastLayer, gated_layers
from recast.surgery.wrappers import unwrapped

# said by torch when a plan counts the operations of a compiled model: bug 13
HOOKS_SEEN = "ignore:Using `torch.compile.module.` when there are global hooks:UserWarning"
X = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(0))


def block() -> nn.Module:
    """Two convolutions, one of them transposed."""
    down, up = nn.Conv2d(3, 4, 3, 2, 1), nn.ConvTranspose2d(4, 3, (3, 2), 2, 1)
    return nn.Sequential(OrderedDict(down=down, relu=nn.ReLU(), up=up))


def shared() -> nn.Module:
    """One transposed and one SAME layer, both called twice, the first under two names."""
    up, same = nn.ConvTranspose2d(3, 3, 2, 2), Conv2dSame(3, 3, 3, 2)
    return InCode(lambda m, x: m.same(m.alias(m.up(m.same(x)))), up=up, same=same, alias=nn.Sequential(up))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "MixedConv2d, SAME": (lambda: MixedConv2d(3, 6, [3, 4], stride=2, padding="same"), ["0", "1"]),
    "ConvNormAct, anti-aliased": (lambda: ConvNormAct(3, 5, 3, stride=2, aa_layer=BlurPool2d), ["conv"]),
    "blurred stride": (lambda: nn.Sequential(nn.Conv2d(3, 5, 3), BlurPool2d(5), nn.Conv2d(5, 5, 2)), ["0", "2"]),
    "DataParallel": (lambda: nn.DataParallel(block()), ["down", "up"]),
    "shared, called twice": (shared, ["up", "same"]),
    "a transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, 2), [""]),
    "a standardised convolution": (lambda: ScaledStdConv2dSame(3, 4, 3, 2), [""]),
}


@pytest.fixture(params=[RecastConfig(), PAPERS], ids=lambda config: config.gate)
def config(request: pytest.FixtureRequest) -> RecastConfig:
    return request.param


def recast_and_verify(model: nn.Module, config: RecastConfig) -> tuple[nn.Module, list[str], recast.Plan]:
    """Plan, recast in place, and check that no bit changed, layer by layer; return names and plan too."""
    plan = recast.plan(model, X, config, where="all")
    before = recast.trace(model, plan, X)
    assert set(before.layers) == {step.name for step in plan.steps}
    child = recast.recast_(model, plan)
    result = recast.verify(before, child, X)
    assert result.bitwise, str(result)
    assert set(result.layers.values()) == {0.0}
    return child, [step.name for step in plan.steps], plan


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_other_libraries(name: str, config: RecastConfig) -> None:
    build, expected = BLOCKS[name]
    child, names, plan = recast_and_verify(build(), config)
    assert sorted(names) == sorted(expected)
    assert plan.note == ""
    child(X).sum().backward()
    layers = [unwrapped(child).get_submodule(n) for n in names]
    assert all(bool(layer.gamma.grad.any()) for layer in layers if config.gate == "beside" or layer.num_heads > 1)


@pytest.mark.filterwarnings(HOOKS_SEEN)
@pytest.mark.parametrize("part", ["whole", "block", "in place"])
def test_compiled_models(part: str, config: RecastConfig) -> None:
    torch._dynamo.reset()
    model: Any = nn.Sequential(block(), nn.Conv2d(3, 3, 3))
    if part == "whole":
        model = torch.compile(model, backend="eager")
    elif part == "block":
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model.compile(backend="eager")
    model(X)
    child, names, _ = recast_and_verify(model, config)
    assert len(names) == 3
    before = child(X)
    for layer in gated_layers(child).values():
        nn.init.constant_(layer.gamma, 0.5)
    assert float((child(X) - before).detach().abs().max()) > 1e-3


def test_a_child_that_never_calls_its_layer_is_reported() -> None:
    """A forward bound before the recast (a closure, a compiled wrapper) keeps the old layer: `verify` says so."""
    conv = nn.Conv2d(3, 4, 3)
    model = InCode(lambda m, x: m.bound[0](x), conv=conv)
    model.bound = [conv]
    plan = recast.plan(model, X, where="all")
    before = recast.trace(model, plan, X)
    recast.recast_(model, plan)
    with pytest.raises(RecastError, match="conv"):
        recast.verify(before, model, X)


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 3, 3)))


@pytest.mark.parametrize("example", ["cpu", "meta"])
@pytest.mark.parametrize("build", [block, shared, normed, lambda: ScaledStdConv2d(3, 4, 3)])
def test_a_model_on_the_meta_device_is_planned_and_not_recast(
    build: Callable[[], nn.Module], example: str, config: RecastConfig
) -> None:
    model = build().to("meta")
    expected = recast.plan(build(), X, config, where="all")
    plan = recast.plan(model, X.to(example), config, where="all")
    assert replace(plan, note="") == expected
    message = r"is on the meta device, without values: .* load its weights first"
    with unchanged(model), pytest.raises(RecastError, match=message):
        recast.recast_(model, plan)
    if build is block:  # and with weights, by the same plan
        real = model.to_empty(device="cpu")
        real.load_state_dict(build().state_dict())
        assert isinstance(recast.recast_(real, plan).up, RecastLayer)
