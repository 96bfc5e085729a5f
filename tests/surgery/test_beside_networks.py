"""Networks with attention beside their convolutions: which get it, training, files, folding, forms, maps."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from layer_helpers import InCode, groups_by_name, unchanged
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, AdamW, Optimizer

import recast
from recast import AttentionBeside, plan, recast_
from recast.layers.cmhsa import gated_layers

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
WIDTHS = ((3, 8), (8, 8), (8, 16), (16, 16))


def vgg() -> nn.Sequential:
    """Two stages of two convolutions each, in one row: every convolution is a block."""
    convolutions = (nn.Sequential(nn.Conv2d(*width, 3, padding=1), nn.ReLU()) for width in WIDTHS)
    first, second, third, fourth = (list(pair) for pair in convolutions)
    return nn.Sequential(*first, *second, nn.MaxPool2d(2), *third, *fourth)


def nested() -> nn.Sequential:
    """Two blocks in a stage, and one whose body is an nn.Sequential itself."""

    def pair() -> list[nn.Module]:
        return [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]

    units = [InCode(lambda m, x: x + m.b(m.a(x).relu()), a=a, b=b) for a, b in (pair(), pair())]
    body = InCode(lambda m, x: x + m.body(x), body=nn.Sequential(*pair()))
    return nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.Sequential(*units, nn.ReLU()), nn.Sequential(body))


@pytest.mark.parametrize(
    ("make", "of_blocks"),
    [
        (lambda: timm.create_model("resnet18"), ["layer4.0.conv2", "layer4.1.conv2"]),
        (vgg, ["5", "7"]),
        (nested, ["1.0.b", "1.1.b", "2.0.body.1"]),
    ],
)
def test_the_last_of_the_blocks(make: Any, of_blocks: list[str]) -> None:
    """A block is the smallest item of an nn.Sequential that holds more than the convolution."""
    model = make().eval()
    x = torch.zeros(1, 3, 64, 64)
    names = {where: [step.name for step in plan(model, x, where=where).steps] for where in ("last_of_blocks", "last")}
    assert names == {"last_of_blocks": of_blocks, "last": of_blocks[-1:]}
    assert [step.name for step in plan(model, x).steps] == of_blocks
    reasons = {left.name: left.reason for left in plan(model, x, where="last").left}
    assert all("not the last of the network" in reasons[name] for name in of_blocks[:-1])


# --- training ---------------------------------------------------------------------------------------------------------


def network() -> Any:
    return InCode(
        lambda m, x: m.head(m.up(m.norm(m.strided(m.stem(x).relu())).relu()).mean((2, 3))),
        stem=nn.Conv2d(3, 8, 3),
        strided=nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False),
        norm=nn.BatchNorm2d(8),
        up=nn.ConvTranspose2d(8, 6, 2, stride=2),
        head=nn.Linear(6, 4),
    )


NAMES = ["stem", "strided", "up"]
ADDED = ("query", "key", "content", "gamma")


def train(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(X), torch.tensor([0, 1])).backward()
        optimizer.step()


@torch.enable_grad()
def opened() -> tuple[nn.Module, Any]:
    """A parent, and a copy with attention beside three convolutions, trained until it counts."""
    torch.manual_seed(0)
    parent = network().eval()
    child: Any = recast_(copy.deepcopy(parent), plan(parent, X, where=NAMES))
    train(child, AdamW(recast.param_groups(child, lr=1e-2, gate_lr=0.3)))
    return parent, child.eval()


@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.05, momentum=0.9), lambda p: AdamW(p, 1e-2)], ids=["sgd", "adamw"])
def test_during_training_the_kernel_and_its_moments_stay(make: Any) -> None:
    model = network()
    optimizer = make(recast.param_groups(model, 1e-2))
    train(model, optimizer)
    twin, ema = copy.deepcopy(model), ModelEmaV3(model, decay=0.5)
    other = make(recast.param_groups(twin, 1e-2))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    kernels = {name: model.get_submodule(name).weight for name in NAMES}
    states = {name: dict(optimizer.state[kernel]) for name, kernel in kernels.items()}
    average = {name: value.clone() for name, value in ema.module.state_dict().items()}
    recast.recast_during_training_(model, optimizer, plan(model, X, where=NAMES), averages=[ema.module])
    groups = groups_by_name(model, optimizer.param_groups)
    assert groups.keys() == dict(model.named_parameters()).keys()
    for name, kernel in kernels.items():
        assert model.get_submodule(name).conv.weight is kernel
        assert optimizer.state[kernel].keys() == states[name].keys()
        assert all(optimizer.state[kernel][key] is value for key, value in states[name].items())
        assert torch.equal(ema.module.get_submodule(name).conv.weight, average[f"{name}.weight"])
        for key in ADDED:
            assert torch.equal(ema.module.get_parameter(f"{name}.{key}"), model.get_parameter(f"{name}.{key}"))
    for layer in gated_layers(model).values():
        layer.gamma.requires_grad_(False)
    train(model, optimizer)
    train(twin, other)
    assert torch.equal(model.eval()(X), twin.eval()(X))  # bit for bit, while the gates are closed
    ema.update(model)


# --- files, folding ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_saved_pruned_and_folded_it_comes_back(tmp_path: Path, error_of: Any) -> None:
    parent, child = opened()

    def reloaded() -> Any:
        loaded = recast.load(recast.save(child, tmp_path / "child.safetensors"), parent=parent).eval()
        assert [type(m) for m in loaded.modules()] == [type(m) for m in child.modules()]
        assert torch.equal(loaded(X), child(X))
        assert loaded.recast_plan == child.recast_plan
        return loaded

    assert error_of(child(X), parent(X)) > 1e-3
    reloaded()
    child.strided.prune_((), ())
    expected, conv = child(X), child.strided.conv
    report = {done.name: done for done in recast.fold_(child, data=X)}
    assert {name: (done.convolution, done.content) for name, done in report.items()} == {
        "stem": (False, 1),
        "strided": (True, 0),
        "up": (False, 1),
    }
    assert child.strided is conv
    assert torch.equal(child(X), expected)
    reloaded()
    nn.init.zeros_(child.stem.gamma)
    nn.init.constant_(child.up.gamma, 1e-3)
    (*_, up) = recast.fold_(child, tol=0.01)
    assert (up.name, up.convolution) == ("up", True)
    assert up.change == pytest.approx(1e-3)
    assert not gated_layers(child)
    assert reloaded().state_dict().keys() == parent.state_dict().keys()
    with pytest.raises(recast.RecastError, match="was recast and folded"):
        recast_(child, plan(child, X, where=NAMES))


# --- forms and maps ---------------------------------------------------------------------------------------------------


def test_forms_are_tuned_and_maps_recorded(tmp_path: Path, error_of: Any) -> None:
    """`stem` has no padding, `strided` a stride and groups, `up` is transposed."""
    parent, child = opened()
    expected = child(X)
    table = recast.tune_(child, X, seconds=0.01)
    assert [(row.layers, row.mode, row.merged_ms, row.dense_ms) for row in table] == [
        (name, mode, None, None) for name in NAMES for mode in ("inference", "training")
    ]
    assert all(layer.tuned and layer.backend == "auto" for layer in gated_layers(child).values())
    assert error_of(child(X), expected) < 1e-5
    loaded: Any = recast.load(recast.save(child, tmp_path / "child.safetensors"), parent=parent)
    assert all(loaded.get_submodule(name).tuned == child.get_submodule(name).tuned for name in NAMES)
    with recast.record(child) as maps:
        child(X)
    shapes = {name: (tuple(maps[name].mix.shape), maps[name].grid) for name in NAMES}
    assert shapes == {
        "stem": ((2, 1, 14 * 14, 16 * 16), (16, 16)),
        "strided": ((2, 1, 7 * 7, 14 * 14), (14, 14)),
        "up": ((2, 1, 14 * 14, 7 * 7), (7, 7)),
    }
    assert all(torch.allclose(maps[name].mix.sum(-1), torch.ones(()), atol=1e-5) for name in NAMES)


# --- any convolution --------------------------------------------------------------------------------------------------


class Doubled(nn.Conv2d):
    """A class with a forward of its own, and an argument more."""

    def forward(self, input: Tensor, scale: float = 2.0) -> Tensor:
        return scale * super().forward(input)


class Clamping(nn.Conv2d):
    """Changes its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.clamp_(-1, 1))


class Rolled(nn.Module):
    """No convolution of torch: a kernel, and channels that it states."""

    def __init__(self) -> None:
        super().__init__()
        self.in_channels = self.out_channels = 4
        self.kernel_size, self.weight = (3, 3), nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x.roll(1, -1), self.weight, padding=1)


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1, **options)


def hooked(*hooks: str) -> nn.Conv2d:
    module, seen = conv(), [0]
    for name in hooks:
        getattr(module, name)(lambda *_: seen.append(1))
    return module


def tied() -> list[nn.Module]:
    first, second = conv(), conv()
    second.weight = first.weight
    return [first, second]


FOREIGN: dict[str, Any] = {
    "a forward of its own": lambda: [Doubled(4, 4, 3)],
    "of no class of torch": lambda: [Rolled()],
    "hooks": lambda: [hooked("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")],
    "pruned": lambda: [prune.random_unstructured(conv(), "weight", 0.5)],
    "normed": lambda: [parametrizations.weight_norm(conv())],
    "padding beyond its kernel": lambda: [nn.ConvTranspose2d(4, 4, (3, 1), stride=3, padding=(0, 1))],
    "tied": tied,
    "twice": lambda: [module := conv(), module],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_any_convolution_is_planned_and_verified(name: str) -> None:
    parent = nn.Sequential(nn.Conv2d(3, 4, 1), *FOREIGN[name](), nn.Flatten(), nn.LazyLinear(2)).eval()
    with torch.no_grad():  # in it, a kernel that torch's prune computes can be copied
        parent(X)
        child = copy.deepcopy(parent)
    with unchanged(parent):
        planned = plan(parent, X, where="all")
    recast_(child, planned)
    names = [step.name for step in planned.steps]
    assert names == list(gated_layers(child)) == (["1", "2"] if name == "tied" else ["1"])
    result = recast.verify(parent, child, X, control=True)
    assert (result.bitwise, result.ok(), result.telling) == (True, True, "outputs")
    if name == "tied":
        assert child[1].conv.weight is child[2].conv.weight
    optimizer = SGD(child.parameters(), 0.1)
    child.train()(X).square().sum().backward()
    optimizer.step()
    assert all(bool(child.get_submodule(step).gamma.any()) for step in names)


def test_a_convolution_called_with_more_than_its_input() -> None:
    parent = InCode(
        lambda m, x: m.up(m.scaled(x, scale=0.5), output_size=[31, 31]).mean((2, 3)),
        scaled=Doubled(3, 4, 3, padding=1),
        up=nn.ConvTranspose2d(4, 4, 2, 2, padding=1),
    ).eval()
    child: Any = recast_(copy.deepcopy(parent), plan(parent, X, where="all"))
    assert isinstance(child.scaled, AttentionBeside)
    assert recast.verify(parent, child, X, control=True).ok()


def test_a_convolution_that_changes_its_input() -> None:
    """Attention reads the input as the convolution left it."""
    parent = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Clamping(8, 8, 3, padding=1)).eval()
    child = recast_(copy.deepcopy(parent), plan(parent, X, where="all"))
    assert recast.verify(parent, child, X, control=True).ok()
    child.train()(X).sum().backward()


def test_a_convolution_that_requires_more_than_its_input_stays() -> None:
    """The operations of timm's CondConv2d cannot be counted from its input alone."""
    network = timm.create_model("efficientnet_cc_b0_4e").eval()
    reasons = {each.name: each.reason for each in plan(network, X, where="all").left}
    assert reasons["blocks.5.0.conv_dw"] == "CondConv2d requires more than its input"
    assert all(type(network.get_submodule(step.name)) is nn.Conv2d for step in plan(network, X).steps)


class Scaled(nn.Conv2d):
    """Requires a keyword."""

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return super().forward(scale * x)


def test_a_convolution_that_requires_a_keyword_stays() -> None:
    body = {"plain": nn.Conv2d(3, 8, 3, padding=1), "scaled": Scaled(8, 8, 3, padding=1)}
    planned = plan(InCode(lambda m, x: m.scaled(m.plain(x), scale=0.5), **body).eval(), X, where="all")
    assert [step.name for step in planned.steps] == ["plain"]
    assert [left.reason for left in planned.left] == ["Scaled requires more than its input"]
