"""The verbs that change a model: all or nothing, once, and replayable."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.geometry import Geometry
from recast.layers.gpsa import GPSA
from recast.models.small import CifarResNet
from recast.run.config import PoolConfig, RecastConfig
from recast.surgery.apply import gpsa_layers, param_groups, recast_, refresh_gates_
from recast.surgery.folding.model import fold_
from recast.surgery.plan import Fold, Plan, applied_plan
from recast.surgery.planning import plan
from recast.surgery.pooling.swap import attention_pool_, attention_pools
from recast.surgery.rules import registry

X = torch.zeros(2, 3, 16, 16)


def small(widths: tuple[int, int, int] = (8, 8, 16)) -> CifarResNet:
    return CifarResNet((1, 1, 1), widths, shortcut="option_a")


def open_(layer: GPSA, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


# --- recast_ --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_swap(training: bool) -> None:
    parent = small().train(training)
    child = copy.deepcopy(parent)
    p = plan(child, X)
    assert recast_(child, p) is child
    assert list(gpsa_layers(child)) == [step.name for step in p.steps] == ["layer3.0.conv1", "layer3.0.conv2"]
    assert child.recast_plan == p == applied_plan(child)
    assert all(module.training == training for module in child.modules())
    x = torch.randn(X.shape)
    if training:  # the form that is cheapest to train agrees to rounding; `split` gives the parent's bits
        torch.testing.assert_close(copy.deepcopy(child)(x), copy.deepcopy(parent)(x), rtol=1e-5, atol=1e-5)
        for layer in gpsa_layers(child).values():
            layer.backend = "split"
    assert torch.equal(child(x), parent(x))
    kept = {n: v for n, v in parent.state_dict().items() if not n.startswith("layer3.0.conv")}
    assert all(torch.equal(child.state_dict()[name], value) for name, value in kept.items())
    assert torch.equal(child.layer3[0].conv1.weight, parent.layer3[0].conv1.weight)  # checkpoints of the parent load


def test_a_model_that_is_a_convolution() -> None:
    conv = nn.Conv2d(3, 4, 3).eval()
    layer = recast_(conv, plan(conv, X))
    assert isinstance(layer, GPSA)
    assert [step.name for step in applied_plan(layer).steps] == [""]
    x = torch.randn(X.shape)
    assert torch.equal(layer(x), conv(x))
    with pytest.raises(RecastError, match="the model is already"):
        recast_(layer, applied_plan(layer))


def test_a_module_used_twice_stays_one_module() -> None:
    shared = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared)).eval()
    parent = copy.deepcopy(model)
    p = plan(model, X, where="all")
    assert [(step.name, step.calls) for step in p.steps] == [("0", 2)]
    recast_(model, p)
    assert isinstance(model[0], GPSA)
    assert model[0] is model[2][0]
    x = torch.randn(X.shape)
    assert torch.equal(model(x), parent(x))


def test_steps_now_and_the_rest_later() -> None:
    parent = small().eval()
    child = copy.deepcopy(parent)
    p = plan(child, X, where="all")
    names = [step.name for step in p.steps]
    recast_(child, p, steps=names[2:4])
    assert list(gpsa_layers(child)) == names[2:4]
    assert [step.name for step in applied_plan(child).steps] == names[2:4]
    with pytest.raises(RecastError, match=f"{names[3]} is already recast: a plan is applied once"):
        recast_(child, p, steps=names[3:])
    with pytest.raises(RecastError, match="the plan has no step 'fc'"):
        recast_(child, p, steps=["fc"])
    assert list(gpsa_layers(child)) == names[2:4]
    recast_(child, p, steps=names[:2])
    recast_(child, p, steps=names[4:])
    assert list(gpsa_layers(child)) == names
    x = torch.randn(X.shape)
    assert torch.equal(child(x), parent(x))
    replayed = recast_(copy.deepcopy(parent), Plan.from_json(applied_plan(child).to_json()))
    assert replayed.state_dict().keys() == child.state_dict().keys()


def test_another_plan_cannot_go_on() -> None:
    model = small()
    first = plan(model, X, where=["layer3.0.conv1"])
    second = plan(model, X, RecastConfig(gate="sigmoid"), where=["layer3.0.conv2"])
    same = plan(model, X, where=["layer3.0.conv2"])
    recast_(model, first)
    with pytest.raises(RecastError, match="begun with another plan"):
        recast_(model, second)
    recast_(model, same)
    assert len(gpsa_layers(model)) == 2


class Snapshot:
    """Everything about a model that an error must leave alone."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.text, self.plan = repr(model), getattr(model, "recast_plan", None)

    def check(self, model: nn.Module) -> None:
        assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in self.modules]
        assert repr(model) == self.text
        assert getattr(model, "recast_plan", None) is self.plan
        for name, value in model.state_dict().items():
            assert torch.equal(value.nan_to_num(7.5), self.state[name].nan_to_num(7.5))


def twice(model: CifarResNet) -> None:
    recast_(model, plan(model, X))


def poison(model: CifarResNet) -> None:
    with torch.no_grad():
        model.layer3[0].conv2.weight[0, 0, 0, 0] = float("nan")


def hook(model: CifarResNet) -> None:
    model.layer3[0].conv2.register_forward_hook(lambda *_: None)


def another_type(model: CifarResNet) -> None:
    model.layer3[0].conv2 = nn.Identity()


def another_stride(model: CifarResNet) -> None:
    model.layer3[0].conv2.stride = (2, 2)


def another_width(model: CifarResNet) -> None:
    model.layer3[0].conv2 = nn.Conv2d(16, 12, 3, padding=1)


def no_such_layer(model: CifarResNet) -> None:
    model.layer3[0].convolution2 = model.layer3[0].conv2
    del model.layer3[0].conv2


@pytest.mark.parametrize("stride", ["keep", "dilate"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (twice, r"layer3\.0\.conv1 is already recast: a plan is applied once"),
        (poison, r"layer3\.0\.conv2\.weight holds NaN"),
        (hook, r"layer3\.0\.conv2 cannot be recast: Conv2d carries hooks"),
        (another_type, r"layer3\.0\.conv2 cannot be recast: no rule for Identity"),
        (another_stride, r"the plan is for another model: layer3\.0\.conv2 is 16 → 16 3×3 stride 2"),
        (another_width, r"the plan is for another model: layer3\.0\.conv2 is 16 → 12"),
        (no_such_layer, r"has no layer 'layer3\.0\.conv2' \(planned for CifarResNet\)\. Did you mean layer3"),
    ],
)
def test_an_error_leaves_nothing_half_done(spoil: Callable[[CifarResNet], None], message: str, stride: Any) -> None:
    """The second of two layers does not fit: the first is not swapped, no shortcut is edited."""
    model = small()
    p = plan(model, X, RecastConfig(stride=stride))
    spoil(model)
    before = Snapshot(model)
    with pytest.raises(RecastError, match=message):
        recast_(model, p)
    before.check(model)


def test_a_rule_that_fails_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    p = plan(model, X, RecastConfig(stride="remove"))
    original, built = registry._RULES[nn.Conv2d], []

    def failing(conv: nn.Module, config: RecastConfig) -> GPSA:
        built.append(conv)
        if len(built) == 2:
            raise MemoryError
        return original(conv, config)

    monkeypatch.setitem(registry._RULES, nn.Conv2d, failing)
    before = Snapshot(model)
    with pytest.raises(MemoryError):
        recast_(model, p)
    before.check(model)
    monkeypatch.undo()
    recast_(model, p)
    assert len(gpsa_layers(model)) == 2


def test_a_plan_for_another_model() -> None:
    with pytest.raises(RecastError, match="the plan is for another model: Sequential has no layer"):
        recast_(nn.Sequential(nn.Conv2d(3, 3, 3)), plan(small(), X))
    with pytest.raises(RecastError, match=r"the plan is for another model: layer3\.0\.conv1 is 8 → 32"):
        recast_(small((8, 8, 32)), plan(small(), X))


def test_a_model_that_was_never_recast_has_no_plan() -> None:
    with pytest.raises(RecastError, match="CifarResNet was not recast by this library"):
        applied_plan(small())


def test_recast_survives_a_deep_copy() -> None:
    model = recast_(small(), plan(small(), X)).eval()
    clone = copy.deepcopy(model)
    assert applied_plan(clone) == applied_plan(model)
    x = torch.randn(X.shape)
    torch.testing.assert_close(clone(x), model(x), rtol=1e-5, atol=1e-5)  # nobody looked at the copy's gates yet
    assert torch.equal(refresh_gates_(clone)(x), model(x))


# --- gates and folding ----------------------------------------------------------------------------------------------


def test_refresh_looks_at_every_layer() -> None:
    model = small()
    recast_(model, plan(model, X))
    model.eval()
    with torch.no_grad():
        model.layer3[0].conv1.gamma[3] = 0.5
        model.layer3[0].conv2.spread[0] = 0.01
    assert refresh_gates_(model) is model
    assert [layer.open_heads for layer in gpsa_layers(model).values()] == [(3,), (0,)]


def test_fold_turns_closed_layers_into_convolutions(error_of: Callable[[Tensor, Tensor], float]) -> None:
    model = small()
    recast_(model, plan(model, X)).eval()
    closed, opened = model.layer3[0].conv1, model.layer3[0].conv2
    with torch.no_grad():
        closed.value.add_(0.1 * torch.randn(closed.value.shape))
        opened.gamma[2] = 0.3
        opened.key.normal_()
    x = torch.randn(X.shape)
    expected = model(x).detach()
    report = fold_(model)
    assert [(f.name, f.closed, f.heads, f.convolution, f.change) for f in report] == [
        ("layer3.0.conv1", 9, 9, True, 0.0),
        ("layer3.0.conv2", 8, 9, False, 0.0),
    ]
    assert type(model.layer3[0].conv1) is nn.Conv2d
    assert model.layer3[0].conv2 is opened
    with torch.no_grad():
        assert error_of(model(x), expected) < 1e-5
    steps = applied_plan(model).steps
    assert [step.fold is not None and step.fold.convolution for step in steps] == [True, False]
    assert steps[1].fold == Fold(False, (3, 3), (), (2,), False)
    replayed = recast_(small(), Plan.from_json(applied_plan(model).to_json())).eval()
    replayed.load_state_dict(model.state_dict())
    assert error_of(replayed(x).detach(), expected) < 1e-5
    with pytest.raises(RecastError, match="applied once"):
        recast_(model, applied_plan(model))


def test_fold_with_a_tolerance_says_what_it_drops() -> None:
    model = small()
    recast_(model, plan(model, X)).eval()
    with torch.no_grad():
        model.layer3[0].conv1.gamma[3], model.layer3[0].conv1.spread[4] = -0.02, 0.05
        model.layer3[0].conv2.gamma[0] = 0.5
    first, second = fold_(model, tol=0.1)
    assert (first.convolution, first.closed) == (True, 9)
    assert first.change == pytest.approx(0.05)
    assert (second.convolution, second.closed, second.change) == (False, 8, 0.0)
    assert fold_(small()) == []


def test_heads_that_a_fold_closes_are_closed_for_good() -> None:
    """What eval computes after a fold with a tolerance is what the file holds."""
    model = small()
    recast_(model, plan(model, X)).eval()
    layer = model.layer3[0].conv1
    with torch.no_grad():
        layer.gamma.copy_(torch.linspace(-0.1, 0.7, 9))
        layer.key.normal_()
    (first, _) = fold_(model, tol=0.15)
    assert (first.convolution, first.closed) == (False, 3)
    assert first.change == pytest.approx(0.1)
    assert layer.gates()["gamma"][:3].tolist() == [0.0, 0.0, 0.0]
    assert layer.open_heads == (3, 4, 5, 6, 7, 8)
    with torch.no_grad():
        skipped = model(X)
        layer.train().eval()  # forgets what was closed
        assert torch.allclose(model(X), skipped, atol=1e-6)


def test_fold_replaces_a_shared_layer_everywhere_and_never_the_root() -> None:
    shared = GPSA(3, 3, Geometry((3, 3), padding=(1, 1, 1, 1)))
    model = nn.Sequential(shared, nn.Sequential(shared))
    fold_(model)
    assert type(model[0]) is nn.Conv2d
    assert model[0] is model[1][0]
    (report,) = fold_(shared)
    assert (report.convolution, report.closed) == (False, 9)


# --- parameter groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
def test_every_trained_parameter_is_in_exactly_one_group(gate: Any) -> None:
    model = small()
    recast_(model, plan(model, X, RecastConfig(gate=gate)))
    model.conv1.requires_grad_(False)
    groups = param_groups(model, lr=1e-3, weight_decay=0.1)
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters() if p.requires_grad}
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)].rpartition(".")[2] for g in groups if g["weight_decay"] for p in g["params"]}
    assert decayed == {"weight", "query", "key"}
    never = {names[id(p)].rpartition(".")[2] for g in groups if not g["weight_decay"] for p in g["params"]}
    assert never >= {"value", "center", "raw_alpha", "bias"}
    gates = next(g for g in groups if "gates" in g["name"])
    assert {names[id(p)].rpartition(".")[2] for p in gates["params"]} == (
        {"gamma", "spread"} if gate == "linear" else {"lam"}
    )
    assert gates["lr"] == pytest.approx(1e-2 if gate == "linear" else 0.1)
    assert {g["lr"] for g in groups if g is not gates} == {1e-3}
    asked = next(g for g in param_groups(model, lr=1e-3, gate_lr=0.5) if "gates" in g["name"])
    assert asked["lr"] == 0.5


def test_groups_work_for_the_control_arm_and_for_any_optimiser() -> None:
    parent = small()
    assert {g["name"] for g in param_groups(parent)} == {"decay", "no_decay"}
    recast_(parent, plan(parent, X))
    for optimizer in (torch.optim.SGD(param_groups(parent)), create_optimizer_v2(param_groups(parent), opt="lamb")):
        parent(torch.randn(X.shape)).sum().backward()
        before = parent.layer3[0].conv1.gamma.detach().clone()
        optimizer.step()
        assert not torch.equal(parent.layer3[0].conv1.gamma, before)


def test_frozen_models_have_no_groups() -> None:
    assert all(not group["params"] for group in param_groups(small().requires_grad_(False)))


# --- attention pooling ----------------------------------------------------------------------------------------------

POOLS = [PoolConfig("single"), PoolConfig("per_class", num_heads=2)]


def sized() -> nn.Module:
    """`small()` in double precision, which says what it takes: the pool is looked for at that size."""
    model = small().double().eval()
    model.pretrained_cfg = {"input_size": (3, 16, 16)}
    return model


def pooled_pair(pool: PoolConfig, where: str, **config: Any) -> tuple[nn.Module, nn.Module]:
    """A parent in double precision, and what a plan with `pool` makes of it."""
    parent = sized()
    return parent, recast_(
        copy.deepcopy(parent), plan(parent, X.double(), RecastConfig(**config), where=where, pool=pool)
    )


@pytest.mark.parametrize("where", ["none", "last_stage"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_plan_with_a_pool_starts_as_the_parent_and_replays(pool: PoolConfig, where: str) -> None:
    parent, child = pooled_pair(pool, where)
    done = applied_plan(child)
    assert (done.pool, len(done.steps)) == (pool, len(gpsa_layers(child)))
    assert len(attention_pools(child)) == 1
    assert len(done.steps) == (0 if where == "none" else 2)
    x = torch.randn(4, 3, 16, 16).double()
    torch.testing.assert_close(child(x), parent(x), rtol=1e-12, atol=1e-12)
    again = recast_(copy.deepcopy(parent), Plan.from_json(done.to_json()))
    assert again.recast_plan == done
    with torch.no_grad():
        for parameter in child.parameters():  # nothing is left at its start
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert not torch.allclose(child(x), parent(x))
    again.load_state_dict(child.state_dict())
    torch.testing.assert_close(again(x), child(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(RecastError, match="already"):
        recast_(child, done)
    with pytest.raises(RecastError, match="already"):
        recast_(child, plan(parent, X.double(), where="none", pool=PoolConfig("single")))


@pytest.mark.parametrize("stride", ["keep", "dilate"])
@pytest.mark.parametrize("pool", POOLS)
def test_pooled_first_or_recast_first_is_the_same_network(pool: PoolConfig, stride: Any) -> None:
    parent = sized()
    config = RecastConfig(stride=stride)
    first, second = copy.deepcopy(parent), copy.deepcopy(parent)
    attention_pool_(first, config=pool)
    planned = plan(first, X.double(), config)  # of a network that pools already
    assert planned.pool is None
    recast_(first, planned, steps=[planned.steps[1].name])
    recast_(first, planned, steps=[planned.steps[0].name])
    recast_(second, plan(second, X.double(), config))
    attention_pool_(second, config=pool)
    x = torch.randn(4, 3, 16, 16).double()
    for model in (first, second):
        assert (applied_plan(model).pool, len(applied_plan(model).steps)) == (pool, 2)
        if stride == "keep":
            torch.testing.assert_close(model(x), parent(x), rtol=1e-12, atol=1e-12)
        replayed = recast_(copy.deepcopy(parent), Plan.from_json(applied_plan(model).to_json()))
        assert [name for name, _ in replayed.named_parameters()] == [name for name, _ in model.named_parameters()]
        replayed.load_state_dict(model.state_dict())
        torch.testing.assert_close(replayed(x), model(x), rtol=1e-12, atol=1e-12)


def test_steps_alone_leave_the_pool_for_later() -> None:
    parent = sized()
    child, pool = copy.deepcopy(parent), PoolConfig("single")
    planned = plan(parent, X.double(), pool=pool)
    names = [step.name for step in planned.steps]
    recast_(child, planned, steps=names[:1])
    done = applied_plan(child)
    assert (done.pool, done.pool_cost, attention_pools(child)) == (None, None, {})
    attention_pool_(child, config=pool)
    recast_(child, planned, steps=names[1:])
    done = applied_plan(child)
    assert (done.pool, done.pool_cost) == (pool, planned.pool_cost)
    assert done.after == planned.after
    assert planned.without_steps().after == planned.before + planned.pool_cost
    assert planned.without_pool().after == plan(parent, X.double()).after


def test_a_pool_that_cannot_be_put_in_leaves_the_convolutions_alone() -> None:
    model = sized()
    planned = plan(model, X.double(), pool=PoolConfig("single"))
    attention_pool_(model, config=PoolConfig("per_class"))
    before = Snapshot(model)
    with pytest.raises(RecastError, match="already"):
        recast_(model, planned)
    before.check(model)


def test_folding_goes_on_with_a_pool() -> None:
    parent, child = pooled_pair(POOLS[0], "last_stage")
    assert all(done.convolution for done in fold_(child))
    assert (applied_plan(child).pool, gpsa_layers(child)) == (POOLS[0], {})
    x = torch.randn(4, 3, 16, 16).double()
    torch.testing.assert_close(child(x), parent(x), rtol=1e-12, atol=1e-12)
    replayed = recast_(copy.deepcopy(parent), Plan.from_json(applied_plan(child).to_json()))
    replayed.load_state_dict(child.state_dict())
    assert torch.equal(replayed(x), child(x))


def test_a_pool_has_rates_of_its_own_and_its_tokens_never_decay() -> None:
    _, child = pooled_pair(POOLS[0], "last_stage")
    names = {id(p): name for name, p in child.named_parameters()}
    plain = {group["name"] for group in param_groups(child)}
    assert plain == {"decay", "no_decay", "gates"}
    groups = {group["name"]: group for group in param_groups(child, lr=1e-4, pool_lr=3e-3, weight_decay=0.1)}
    assert groups.keys() == plain | {"pool_decay", "pool_no_decay"}
    (prefix,) = attention_pools(child)
    held = [names[id(p)] for group in groups.values() for p in group["params"]]
    assert sorted(held) == sorted(names.values())
    for name, group in groups.items():
        assert group["lr"] == (3e-3 if name.startswith("pool") else 1e-3 if name == "gates" else 1e-4)
        assert group["weight_decay"] == (0.1 if name in ("decay", "pool_decay") else 0.0)
        for parameter in group["params"]:
            own = names[id(parameter)]
            assert own.startswith(f"{prefix}.") == name.startswith("pool"), own
            if name == "pool_decay":
                assert parameter.dim() == 2, own
    assert f"{prefix}.cls_token" in {names[id(p)] for p in groups["pool_no_decay"]["params"]}
