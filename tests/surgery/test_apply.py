"""The verbs that change a model: all or nothing, once, and replayable."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_helpers import PAD_1, PAPERS, recast_copy, unchanged
from torch import nn

from recast import Geometry, RecastError, fold_, param_groups, plan, recast_, record, verify, wake_
from recast.layers.attention_pool import attention_pools
from recast.layers.cmhsa import gated_layers, recast_layers
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.gpsa import GPSA
from recast.layers.pool_config import PoolConfig
from recast.models.cifar import CifarResNet
from recast.surgery.plan import Plan, applied_plan
from recast.surgery.pooling.swap import attention_pool_

X = torch.zeros(2, 3, 16, 16)


def small() -> CifarResNet:
    return CifarResNet((1, 1, 1), (8, 8, 16), shortcut="option_a")


def spoiled(spoil: Callable[[Any], Any]) -> CifarResNet:
    """A network whose last block was changed."""
    model = small()
    spoil(model.layer3[0])
    return model


@pytest.mark.parametrize(
    ("config", "names"), [(None, ["layer3.0.conv2"]), (PAPERS, ["layer3.0.conv1", "layer3.0.conv2"])]
)
@pytest.mark.parametrize("training", [True, False])
def test_the_swap(training: bool, config: RecastConfig | None, names: list[str]) -> None:
    parent = small().train(training)
    planned, child = plan(parent, X, config), copy.deepcopy(parent)
    assert recast_(child, planned) is child
    assert list(recast_layers(child)) == [step.name for step in planned.steps] == names
    assert child.recast_plan == planned == applied_plan(child)
    assert all(module.training == training for module in child.modules())
    x = torch.randn(X.shape)
    if training:  # the form that is cheapest to train agrees to rounding; `split` gives the parent's bits
        torch.testing.assert_close(copy.deepcopy(child)(x), copy.deepcopy(parent)(x), rtol=1e-5, atol=1e-5)
        for layer in recast_layers(child).values():
            layer.backend = "split"
    assert torch.equal(child(x), parent(x))
    kept = {n: v for n, v in parent.state_dict().items() if not n.startswith("layer3.0.conv")}
    assert all(torch.equal(child.state_dict()[name], value) for name, value in kept.items())
    assert torch.equal(child.layer3[0].conv2.weight, parent.layer3[0].conv2.weight)
    child.load_state_dict(parent.state_dict(), strict=False)  # checkpoints of the parent load


@pytest.mark.parametrize("config", [None, PAPERS])
def test_steps_now_and_the_rest_later(config: RecastConfig | None) -> None:
    parent = small().eval()
    child = copy.deepcopy(parent)
    planned = plan(child, X, config, where="all")
    names = [step.name for step in planned.steps]
    recast_(child, planned, steps=names[2:4])
    assert list(recast_layers(child)) == names[2:4]
    assert [step.name for step in applied_plan(child).steps] == names[2:4]
    with pytest.raises(RecastError, match=f"{names[3]} is already recast: a plan is applied once"):
        recast_(child, planned, steps=names[3:])
    with pytest.raises(RecastError, match="the plan has no step 'fc'"):
        recast_(child, planned, steps=["fc"])
    assert recast_(child, planned, steps=[]) is child
    assert list(recast_layers(child)) == names[2:4]
    recast_(child, planned, steps=names[:2])
    recast_(child, plan(parent, X, config, where=names[4:]))
    assert list(recast_layers(child)) == names
    x = torch.randn(X.shape)
    assert torch.equal(child(x), parent(x))
    assert torch.equal(replayed(parent, child)(x), parent(x))


SPOILS: dict[str, Callable[[Any], Any]] = {
    "conv2 is already recast": lambda block: setattr(block, "conv2", GPSA(16, 16, Geometry((3, 3)))),
    r"conv2\.weight holds NaN": lambda block: nn.init.constant_(block.conv2.weight, torch.nan),
    "Conv2d carries hooks": lambda block: block.conv2.register_forward_hook(print),
    "no rule for Identity": lambda block: setattr(block, "conv2", nn.Identity()),
    "for another model: .* 3×3 stride 2": lambda block: setattr(block.conv2, "stride", (2, 2)),
    "for another model: .* 16 → 12": lambda block: setattr(block, "conv2", nn.Conv2d(16, 12, 3, padding=1)),
    "Did you mean layer3": lambda block: block.add_module("convolution2", block._modules.pop("conv2")),
}


@pytest.mark.parametrize("stride", ["keep", "remove"])
@pytest.mark.parametrize("message", SPOILS)
def test_an_error_leaves_nothing_half_done(message: str, stride: Any) -> None:
    """The second of two layers does not fit: the first is not swapped, no shortcut is edited."""
    planned, model = (
        plan(small(), X, RecastConfig("linear", stride=stride, **PAPERS_LAYER)),
        spoiled(SPOILS[message]),
    )
    with unchanged(model), pytest.raises(RecastError, match=message):
        recast_(model, planned)


def opened() -> nn.Module:
    """A recast network, the first layer's heads closed, the second's open."""
    model = recast_copy(small(), X)
    nn.init.constant_(list(gated_layers(model).values())[1].gamma, 0.5)
    return model


def pruned() -> nn.Module:
    model = opened()
    first = next(iter(gated_layers(model).values()))
    first.prune_(range(9), ())
    return model


def failing() -> Any:
    yield BATCH[0]
    raise KeyError("shard")


NAN = float("nan")
POOLS = [PoolConfig("single"), PoolConfig("per_class", num_heads=2)]
BATCH = (torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3]))
REFUSED: dict[str, tuple[str, Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "an edit": ("another model: it changes 'layer3.0.downsample",
        lambda: spoiled(lambda block: block.add_module("shortcut", block._modules.pop("downsample"))),
        lambda m: recast_(m, plan(small(), X, RecastConfig("linear", stride="remove", **PAPERS_LAYER)))),
    "another config": ("recast with another plan", opened, lambda m: recast_(
        m, plan(small(), X, RecastConfig("sigmoid"), where="layer2.0.conv2"))),
    "a place": ("without a place", small, lambda m: recast_(m, replace(plan(m, X), pool=POOLS[0]))),
    "a pool twice": ("already", lambda: attention_pool_(sized(), config=POOLS[1]), lambda m: recast_(
        m, plan(sized(), X.double(), pool=POOLS[0]))),
    "the root": ("the model is already", lambda: recast_(c := nn.Conv2d(3, 4, 3), plan(c, X)), lambda m: recast_(
        m, applied_plan(m))),
    "no step": ("another model, ResNet and not", small, lambda m: recast_(
        m, replace(plan(m, X).without_steps(), model="ResNet"))),
    "batches": ("batches must be .*Tensor or .*Iterable, got Plan", opened, lambda m: wake_(m, plan(small(), X))),
    "a name": ("a list of names", small, lambda m: recast_(m, plan(m, X), steps="layer3.0.conv1")),
    "no images": ("holds no image", opened, lambda m: fold_(m, data=X[:0])),
    "data": ("cannot run on the example", opened, lambda m: fold_(m, data=X[:, :2])),
    "NaN data": ("NaN or infinity", opened, lambda m: fold_(m, data=BATCH[0] * NAN)),
    "tol": ("0 or more, got nan", opened, lambda m: fold_(m, tol=NAN)),
    "pool example": ("cannot run on the example", small, lambda m: attention_pool_(m, example=X[:, :2])),
    "no pool": ("kind is none", small, lambda m: attention_pool_(m, config=PoolConfig())),
    "logit_std": ("logit_std must be > 0, got 0", opened, lambda m: wake_(m, BATCH[0], 0)),
    "nothing to wake": ("no recast layer", small, lambda m: wake_(m, BATCH[0])),
    "nothing to record": ("has no attention to record", small, lambda m: record(m).__enter__()),
    "pruned": ("conv1 has no content map", pruned, lambda m: wake_(m, BATCH[0])),
    "NaN": ("conv1 got NaN", opened, lambda m: wake_(m, BATCH[0] * NAN)),
    "no image": ("conv1 got no images", opened, lambda m: wake_(m, [])),
    "backend": ("backend must be one of auto, .*got 'fast'", opened, lambda m: verify(small(), m, X, backend="fast")),
    "meta images": ("without values", opened, lambda m: verify(small(), m, X.to("meta"))),
    "layers": ("no layer '5'", opened, lambda m: wake_(m, BATCH[0], layers=[5])),
    "failing batches": ("batches.*KeyError", opened, lambda m: wake_(m, failing())),
    "no images in a batch": ("cannot run on the example 7", opened, lambda m: wake_(m, iter([BATCH[0], 7]))),
    "recast already": ("plan its parent instead", opened, lambda m: plan(m, X)),
    "rate": ("lr must be .*got nan", opened, lambda m: param_groups(m, lr=NAN)),
    "pool heads": ("num_heads=7", small, lambda m: attention_pool_(
        m, config=PoolConfig("single", num_heads=7), example=X)),
    "channels": ("in_channels must be >= 1, got 0", small, lambda _: GPSA(0, 3, Geometry((3, 3)))),
    "plan": ("holds no image", small, lambda m: plan(m, X[:0])),
    "buffer": ("has a 'mask' of its own",
        lambda: spoiled(lambda block: block.conv2.register_buffer("mask", torch.ones(1))),
        lambda m: plan(m, X, PAPERS, where=["layer3.0.conv2"])),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_one_line_and_changes_nothing(case: str) -> None:
    message, make, change = REFUSED[case]
    model = make()
    with unchanged(model), pytest.raises(RecastError, match=message) as refused:
        change(model)
    assert "\n" not in str(refused.value)


def test_fold_replaces_a_shared_layer_everywhere_and_never_the_root() -> None:
    shared = GPSA(3, 3, PAD_1)
    model = nn.Sequential(shared, nn.Sequential(shared))
    fold_(model)
    assert type(model[0]) is nn.Conv2d
    assert model[0] is model[1][0]
    (report,) = fold_(shared)
    assert (report.convolution, report.closed) == (False, 9)


def sized() -> nn.Module:
    """`small()` in double precision, which says what it takes: the pool is looked for at that size."""
    model = small().double().eval()
    model.pretrained_cfg = {"input_size": (3, 16, 16)}
    return model


def pooled_pair(pool: PoolConfig, where: str) -> tuple[nn.Module, nn.Module]:
    """A parent in double precision, and what a plan with `pool` makes of it."""
    parent = sized()
    return parent, recast_copy(parent, X.double(), where=where, pool=pool)


@pytest.mark.parametrize("where", ["none", "last_stage"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_plan_with_a_pool_starts_as_the_parent_and_replays(pool: PoolConfig, where: str) -> None:
    parent, child = pooled_pair(pool, where)
    done = applied_plan(child)
    assert (done.pool, len(attention_pools(child))) == (pool, 1)
    assert len(done.steps) == len(gated_layers(child)) == (0 if where == "none" else 2)
    x = torch.randn(4, 3, 16, 16).double()
    torch.testing.assert_close(child(x), parent(x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for parameter in child.parameters():  # nothing is left at its start
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert not torch.allclose(child(x), parent(x))
    twin = replayed(parent, child)
    assert twin.recast_plan == done
    torch.testing.assert_close(twin(x), child(x), rtol=1e-12, atol=1e-12)
    for planned in (done, plan(parent, X.double(), where="none", pool=PoolConfig("single"))):
        with pytest.raises(RecastError, match="already"):
            recast_(child, planned)


def replayed(parent: nn.Module, child: nn.Module) -> nn.Module:
    """A copy of the parent that went through the child's plan, as JSON, and has its weights."""
    twin = recast_(copy.deepcopy(parent), Plan.from_json(applied_plan(child).to_json()))
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in child.named_parameters()]
    twin.load_state_dict(child.state_dict())
    return twin


def test_steps_alone_leave_the_pool_for_later() -> None:
    parent = sized()
    child, pool = copy.deepcopy(parent), PoolConfig("single")
    planned = plan(parent, X.double(), PAPERS, pool=pool)
    first, second = ([step.name] for step in planned.steps)
    done = applied_plan(recast_(child, planned, steps=first))
    assert (done.pool, done.pool_cost, attention_pools(child)) == (None, None, {})
    attention_pool_(child, config=pool)
    done = applied_plan(recast_(child, planned, steps=second))
    assert (done.pool, done.pool_cost, done.after) == (pool, planned.pool_cost, planned.after)
    assert planned.without_steps().after == planned.before + planned.pool_cost
    assert planned.without_pool().after == plan(parent, X.double(), PAPERS).after
    last = recast_(copy.deepcopy(parent), plan(parent, X.double(), PAPERS))
    recast_(last, plan(parent, X.double(), where="none", pool=pool))
    done = applied_plan(last)
    assert (done.pool, len(done.steps)) == (pool, 2)
    recast_(last, plan(parent, X.double(), PAPERS).without_steps())  # nothing
    assert applied_plan(last) == done
    x = torch.randn(4, 3, 16, 16).double()
    torch.testing.assert_close(replayed(parent, last)(x), last(x), rtol=1e-12, atol=1e-12)


def test_a_plan_of_pooling_alone_counts_a_recast_convolution_once() -> None:
    child = recast_(small(), plan(small(), X))
    left = [layer.name for layer in plan(child, X, where="none", pool=PoolConfig("single")).left]
    assert sorted(left) == sorted(
        layer.name for layer in plan(small(), X, where="none", pool=PoolConfig("single")).left
    )


def test_a_pool_has_rates_of_its_own_and_its_tokens_never_decay() -> None:
    _, child = pooled_pair(POOLS[0], "last_stage")
    names = {id(p): name for name, p in child.named_parameters()}
    (prefix,) = attention_pools(child)
    assert {group["name"] for group in param_groups(child)} == {"decay", "no_decay", "gates"}
    groups = {group["name"]: group for group in param_groups(child, lr=1e-4, pool_lr=3e-3, weight_decay=0.1)}
    assert groups.keys() == {"decay", "no_decay", "gates", "pool_decay", "pool_no_decay"}
    names_of = {kind: {names[id(p)] for p in group["params"]} for kind, group in groups.items()}
    assert sorted(name for of in names_of.values() for name in of) == sorted(names.values())
    for kind, group in groups.items():
        assert group["lr"] == (3e-3 if kind.startswith("pool") else 5e-3 if kind == "gates" else 1e-4)
        assert group["weight_decay"] == (0.1 if kind in ("decay", "pool_decay") else 0.0)
        assert all(name.startswith(f"{prefix}.") == kind.startswith("pool") for name in names_of[kind])
    assert all(p.dim() == 2 for p in groups["pool_decay"]["params"])
    assert f"{prefix}.cls_token" in names_of["pool_no_decay"]
