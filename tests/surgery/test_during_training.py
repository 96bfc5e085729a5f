"""A switch in the middle of a training: the optimiser goes on as if nothing had happened, until the gates open."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm.optim
import torch
from layer_helpers import PAPERS, InCode, groups_by_name, unchanged
from timm.layers import StdConv2d
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from recast import GPSA, Plan, RecastConfig, RecastError, attention_pool_, param_groups, plan, recast_during_training_
from recast.layers.cmhsa import gated_layers
from recast.layers.pool_config import PoolConfig
from recast.papers.prs.pixel_conv import PixelConv2d

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(param_groups(m, 0.05), momentum=0.9, nesterov=True),
    "adamw": lambda m: AdamW(param_groups(m, 1e-2)),
    "lamb": lambda m: timm.optim.create_optimizer_v2(param_groups(m, 1e-2), "lamb", max_grad_norm=None),
    "adamw inside lookahead": lambda m: timm.optim.create_optimizer_v2(param_groups(m, 1e-2), "lookahead_adamw"),
    "plain adamw": lambda m: AdamW(m.parameters(), 1e-2, weight_decay=0.05),
}


def network(dtype: torch.dtype = torch.float64) -> Any:
    """Convolutions of several kinds, a norm, a head."""
    torch.manual_seed(0)
    return InCode(
        lambda m, x: m.head(m.up(m.norm(m.strided(m.stem(x).relu())).relu()).mean((2, 3))),
        stem=nn.Conv2d(3, 8, 3, padding=1),
        strided=nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False),
        norm=nn.BatchNorm2d(8),
        up=nn.ConvTranspose2d(8, 6, 2, stride=2, groups=2),
        head=nn.Linear(6, 4),
    ).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 3, 8, 8, generator=generator, dtype=dtype), torch.arange(6) % 4


def train(model: nn.Module, optimizer: Optimizer, batches: range) -> None:
    model.train()
    for number in batches:
        images, labels = batch(number, next(model.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def twins(name: str) -> tuple[Any, Optimizer, Any, Optimizer]:
    """The same network after eight steps, twice, each with its own optimiser in the same state."""
    model = network()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(8))
    twin = copy.deepcopy(model)
    copied = OPTIMIZERS[name](twin)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else both would write to the same moments
    return model, optimizer, twin, copied


def sgd(model: nn.Module, *names: str) -> Optimizer:
    """An optimiser of some of a network's parameters, or all."""
    return SGD([p for name, p in model.named_parameters() if not names or name in names], 0.1)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def every(model: nn.Module) -> Plan:
    return plan(model, batch(0, next(model.parameters()).dtype)[0], PAPERS, where=["stem", "strided", "up"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_further_steps_are_the_convolution_s(name: str) -> None:
    conv, optimizer, child, carried = twins(name)
    recast_during_training_(child, carried, every(child))
    for layer in gated_layers(child).values():  # what takes a layer away from its convolution
        for parameter in (layer.gamma, layer.spread, layer.value):
            if parameter is not None:
                parameter.requires_grad_(False)
    train(conv, optimizer, range(8, 18))
    train(child, carried, range(8, 18))
    images, _ = batch(99)
    assert relative(child.eval()(images), conv.eval()(images)) < 1e-12
    assert len(carried.state_dict()["param_groups"]) == len(carried.param_groups)  # it can be saved


def test_only_what_was_swapped_is_touched() -> None:
    _, _, child, carried = twins("adamw")
    before = {name: (p, p.clone(), dict(carried.state[p])) for name, p in child.named_parameters()}
    rates = [(group["lr"], group["weight_decay"]) for group in carried.param_groups]
    images, labels = batch(0)
    nn.functional.cross_entropy(child(images), labels).backward()
    gradient = child.stem.weight.grad
    assert recast_during_training_(child, carried, every(child), ()) is child
    assert isinstance(child.stem, nn.Conv2d)
    assert recast_during_training_(child, carried, every(child), ["stem"]) is child
    assert isinstance(child.stem, GPSA)
    assert isinstance(child.strided, nn.Conv2d)
    assert child.stem.weight.grad is gradient is not None  # one that is there moves too
    for name, parameter in child.named_parameters():
        if not name.startswith("stem"):
            parameter_before, value, state = before[name]
            assert parameter is parameter_before
            assert torch.equal(parameter, value)
            assert all(carried.state[parameter][key] is entry for key, entry in state.items())
    assert [(group["lr"], group["weight_decay"]) for group in carried.param_groups][: len(rates)] == rates


@pytest.mark.parametrize("rates", [{}, {"qk_lr": 0.5}, {"layer_decay": 0.5, "gate_lr": 0.1}])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("config", [PAPERS, RecastConfig()])
@pytest.mark.filterwarnings("ignore:every recast layer is frozen")
def test_new_parameters_join_the_groups_of_a_fresh_optimiser(
    rates: dict[str, float], frozen: bool, config: RecastConfig
) -> None:
    model = timm.create_model("test_resnet")
    planned = plan(model, torch.zeros(1, 3, 64, 64), config)
    for step in planned.steps:
        model.get_submodule(step.name).requires_grad_(not frozen)
    optimizer = AdamW(param_groups(model, 1e-2, **rates))
    later = {name: rate for name, rate in rates.items() if name != "layer_decay"}
    for step in planned.steps:
        recast_during_training_(model, optimizer, planned, [step.name], **later)
    joined, fresh = (
        {n: (g["name"], pytest.approx(g["lr"]), g["weight_decay"]) for n, g in groups_by_name(model, groups).items()}
        for groups in (optimizer.param_groups, param_groups(model, 1e-2, **rates))
    )
    assert joined == fresh
    assert len(joined) == sum(len(group["params"]) for group in optimizer.param_groups)


def test_rates_are_those_of_the_moment() -> None:
    """A schedule keeps a group's peak beside its rate: new groups are as far along as the kernel's."""
    child = network()
    optimizer = AdamW(param_groups(child, 1e-2))
    for group in optimizer.param_groups:
        group["peak_lr"], group["lr"] = group["lr"], group["lr"] / 4
    recast_during_training_(child, optimizer, every(child), gate_lr=0.2)
    gates = groups_by_name(child, optimizer.param_groups)["stem.gamma"]
    assert (gates["peak_lr"], gates["lr"], gates["weight_decay"]) == (0.2, 0.05, 0.0)
    sigmoid = network()
    optimizer = AdamW(param_groups(sigmoid, 1e-2))
    recast_during_training_(sigmoid, optimizer, plan(sigmoid, batch(0)[0], RecastConfig("sigmoid"), where=["stem"]))
    gates = groups_by_name(sigmoid, optimizer.param_groups)["stem.lam"]
    assert (gates["name"], gates["lr"]) == ("sigmoid_gates", 1e-2), "T-CNN*: the same rate"


def test_averages_keep_their_kernels() -> None:
    _, _, child, carried = twins("adamw")
    ema = ModelEmaV3(child, decay=0.5)
    train(child, carried, range(8, 10))
    ema.update(child)
    images, _ = batch(40)
    before, kernel = ema.module(images), ema.module.stem.weight.clone()
    recast_during_training_(child, carried, every(child), averages=[ema.module])
    assert isinstance(child.stem, GPSA)
    assert relative(ema.module(images), before) < 1e-12
    assert torch.equal(ema.module.stem.weight, kernel)
    assert not torch.equal(child.stem.weight, kernel)
    assert torch.equal(ema.module.stem.query, child.stem.query)
    train(child, carried, range(10, 12))
    ema.update(child)  # every pair has the same shape
    assert not torch.equal(ema.module.stem.weight, kernel)


def test_a_compiled_network_is_compiled_once_more() -> None:
    child = network(torch.float32)
    counter = CompileCounter()
    compiled: Any = torch.compile(child, backend=counter)
    optimizer = AdamW(child.parameters(), 1e-2)
    train(compiled, optimizer, range(3))
    assert counter.frame_count == 1
    assert recast_during_training_(compiled, optimizer, every(child)) is compiled
    train(compiled, optimizer, range(3, 6))
    assert counter.frame_count == 2
    images, _ = batch(9, torch.float32)
    assert relative(compiled.eval()(images), child.eval()(images)) < 1e-5
    torch.compiler.reset()


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda o: CosineAnnealingLR(o, 10),
    lambda o: LambdaLR(o, lambda step: 0.9**step),
    lambda o: OneCycleLR(o, 0.1, total_steps=10),
    lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 8)], [2]),
]


@pytest.mark.parametrize("make", SCHEDULERS, ids=["cosine", "lambda", "one cycle", "sequential"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_torch_s_schedulers_go_on(make: Callable[[Optimizer], Any], name: str) -> None:
    """They count the groups when they are made: `plan` makes room for what will come."""
    child = network()
    planned = every(child)
    groups = param_groups(child, 0.1, plan=planned)
    optimizer: Optimizer = SGD(groups, momentum=0.9) if name == "sgd" else AdamW(groups)
    scheduler = make(optimizer)
    train(child, optimizer, range(1))
    scheduler.step()
    before = [group["lr"] for group in optimizer.param_groups]
    recast_during_training_(child, optimizer, planned)
    assert [group["lr"] for group in optimizer.param_groups] == before
    assert all(group["params"] for group in optimizer.param_groups)
    for number in range(1, 4):
        train(child, optimizer, range(number, number + 1))
        scheduler.step()
    assert len({round(group["lr"] / group["initial_lr"], 9) for group in optimizer.param_groups}) == 1


def test_a_kernel_that_is_computed_starts_anew_with_a_warning() -> None:
    model = nn.Sequential(StdConv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 4)).double()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9)
    train(model, optimizer, range(2))
    planned = plan(model, batch(0)[0], PAPERS, where=["0"])
    with pytest.warns(UserWarning, match="starts without its moments"):
        recast_during_training_(model, optimizer, planned)
    assert "momentum_buffer" not in optimizer.state[model[0].weight]
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def broken(model: nn.Module) -> nn.Module:
    """A running average with a NaN in it."""
    average = copy.deepcopy(model)
    nn.init.constant_(average.get_submodule("stem").weight, torch.nan)
    return average


MISTAKES: dict[str, Callable[[Any, Plan], Any]] = {
    "no step 'nowhere'": lambda m, p: recast_during_training_(m, sgd(m), p, ["nowhere"]),
    "another model": lambda m, p: recast_during_training_(nn.Sequential(nn.Linear(2, 2)), sgd(m), p),
    r"does not train stem\.bias": lambda m, p: recast_during_training_(m, sgd(m, "stem.weight"), p),
    r"does not train stem\.weight": lambda m, p: recast_during_training_(m, sgd(m, "head.weight", "head.bias"), p),
    "LBFGS takes one group": lambda m, p: recast_during_training_(m, torch.optim.LBFGS(m.parameters()), p),
    "NaN": lambda m, p: recast_during_training_(m, sgd(m), p, averages=[broken(m)]),
    "put it into a module": lambda m, p: recast_during_training_(
        c := nn.Conv2d(3, 4, 3), sgd(c), plan(c, torch.zeros(1, 3, 8, 8))
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_change_nothing(message: str) -> None:
    model = network()
    planned = every(model)
    with unchanged(model), pytest.raises(RecastError, match=message):
        MISTAKES[message](model, planned)


def test_a_convolution_of_pixels_goes_on_at_its_pace() -> None:
    """Most of W_out over tokens are zeros that the kernel had not: their first updates are no larger than the rate."""
    model = nn.Sequential(PixelConv2d(16, 16, 3, 4))
    optimizer = AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.randn(8, 16, 4, 4, generator=generator)) - 1).square().mean().backward()
        optimizer.step()

    for _ in range(300):
        step()
    planned = plan(model, torch.zeros(1, 16, 4, 4), RecastConfig(gate="bias"), where=["0"])
    recast_during_training_(model, optimizer, planned)
    weight: Any = model[0].weight
    moment = optimizer.state[weight]["exp_avg"]
    assert torch.equal(moment != 0, weight != 0)
    assert int(optimizer.state[weight]["step"]) == 300
    before = weight.detach().clone()
    step()
    moved = (weight.detach() - before).abs()[before == 0]
    assert 0 < float(moved.max()) < 1.1e-3


def test_factored_moments_of_another_layout_start_anew() -> None:
    # rows and columns have the same shapes in both layouts
    model = nn.Sequential(nn.ConvTranspose2d(32, 32, 2, stride=2))
    optimizer = timm.optim.create_optimizer_v2(model.parameters(), "adafactor", lr=1e-2)
    model(torch.randn(2, 32, 4, 4)).square().mean().backward()
    optimizer.step()
    recast_during_training_(model, optimizer, plan(model, torch.zeros(1, 32, 4, 4), PAPERS, where=["0"]))
    assert model[0].weight not in optimizer.state
    assert model[0].bias in optimizer.state


def test_groups_that_know_names_learn_the_new_ones() -> None:
    model = network()
    optimizer = AdamW(model.named_parameters(), 1e-2)
    train(model, optimizer, range(2))
    recast_during_training_(model, optimizer, every(model))
    names = {id(p): name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        assert [names[id(p)] for p in group["params"]] == group["param_names"]
    train(model, optimizer, range(2, 4))


def test_a_pool_goes_in_before_the_optimiser_is_made() -> None:
    model = timm.create_model("digits_resnet")
    planned = plan(model, torch.randn(1, 3, 32, 32), PAPERS, where="layer3.1.conv2", pool=PoolConfig("single"))
    with pytest.raises(RecastError, match="before the optimiser is made"):
        recast_during_training_(model, sgd(model), planned)
    assert not any(isinstance(module, GPSA) for module in model.modules())
    attention_pool_(model, config=planned.pool)
    recast_during_training_(model, sgd(model), planned)
    assert isinstance(model.layer3[1].conv2, GPSA)


def stem_apart(of_rest: dict[str, Any], of_stem: dict[str, Any], **options: Any) -> tuple[nn.Module, Optimizer]:
    """A network and an optimiser with one group for the first kernel, and one for everything else."""
    model = network()
    stem = model.stem.weight
    rest = [p for p in model.parameters() if p is not stem]
    return model, SGD([of_rest | {"params": rest}, of_stem | {"params": [stem]}], 0.1, **options)


@pytest.mark.parametrize(("setting", "of_rest", "of_kernel"), [("lr_scale", 0.1, 0.5), ("momentum", 0.0, 0.9)])
def test_new_parameters_join_the_group_whose_settings_are_the_kernels(
    setting: str, of_rest: float, of_kernel: float
) -> None:
    """timm's layer decay (a scale beside a rate that all groups share), and groups that differ in momentum alone."""
    model, optimizer = stem_apart({setting: of_rest}, {setting: of_kernel}, momentum=0.5)
    recast_during_training_(model, optimizer, every(model), steps=["stem"])
    assert isinstance(model.stem, GPSA)
    groups = groups_by_name(model, optimizer.param_groups)
    names = [f"stem.{key}" for key, _ in model.stem.named_parameters() if key != "bias"]
    assert {groups[name][setting] for name in names} == {of_kernel}


def test_gates_keep_their_rate_in_groups_with_names_of_their_own() -> None:
    model, optimizer = stem_apart({"name": "body", "lr": 1e-4}, {"name": "stem", "lr": 1e-2}, weight_decay=0.1)
    recast_during_training_(model, optimizer, every(model))
    groups = groups_by_name(model, optimizer.param_groups)
    assert {groups[f"stem.{key}"]["lr"] for key in ("query", "key", "value")} == {1e-2}
    assert [groups[f"stem.{key}"]["lr"] for key in ("gamma", "spread")] == pytest.approx([0.5, 0.5])


def test_gates_keep_their_rate_in_one_cycle() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    train(model, optimizer, range(1))
    schedule.step()
    recast_during_training_(model, optimizer, every(model))
    for _ in range(5):
        optimizer.step()
        schedule.step()
    groups = groups_by_name(model, optimizer.param_groups)
    assert groups["stem.gamma"]["name"] == "gates"
    assert groups["stem.gamma"]["lr"] == pytest.approx(50 * groups["head.weight"]["lr"])
