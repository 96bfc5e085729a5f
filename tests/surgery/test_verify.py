"""`verify` must see what is there: equal networks as equal, and one swapped pair of taps as a failure."""

import copy
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_helpers import PAPERS, InCode, recast_copy, unchanged
from torch import Tensor, nn

from recast import PoolConfig, RecastConfig, RecastError, plan, recast_, trace, verify
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER
from recast.models.cifar import CifarResNet
from recast.surgery.compare import relative_error
from recast.surgery.exactness import TOLERANCE, Exactness

INF, NAN = float("inf"), float("nan")
X = torch.zeros(2, 3, 16, 16)


def small() -> CifarResNet:
    return CifarResNet((1, 1, 1), (8, 8, 16), shortcut="conv").eval()


def pair() -> tuple[CifarResNet, CifarResNet]:
    parent = small()
    return parent, recast_copy(parent, X)


@pytest.mark.parametrize("backend", ["split", "merged", "dense", "reference"])
@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
def test_every_backend_can_be_verified_and_is_given_back(backend: Any, gate: Any) -> None:
    parent = small()
    options: Any = PAPERS_LAYER if gate == "linear" else {"alpha": 20.0, "lambda_init": 14.0}
    child = recast_copy(parent, X, RecastConfig(gate=gate, **options))
    child.layer3[0].conv1.backend = "reference"
    x = torch.randn(4, 3, 16, 16)
    exactness = verify(parent, child, x, backend=backend)
    assert exactness.backend == backend
    assert exactness.ok(1e-5 if gate == "linear" else 1e-4)
    assert [layer.backend for layer in gated_layers(child).values()] == ["reference", "auto"]


def test_inplace_activations_do_not_hide_a_difference() -> None:
    """The trace keeps copies: an in-place ReLU after the layer must not change them."""
    parent = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
    (y,) = trace(parent, plan(parent, X, PAPERS), torch.randn(X.shape)).layers["0"]
    assert bool((y < 0).any())


@pytest.mark.parametrize("fail", [False, True])
def test_modes_backends_and_tf32_are_given_back(fail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = small().train()
    parent.layer2.eval()
    child = recast_copy(parent, X)
    child.layer1.eval()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with unchanged(parent, child):
        if fail:
            with pytest.raises(RecastError, match="cannot run on the example"):
                verify(parent, child, torch.zeros(1, 4, 8, 8))
        else:
            assert verify(parent, child, torch.randn(X.shape), backend="dense").ok()
    assert torch.backends.cudnn.allow_tf32
    assert {layer.backend for layer in gated_layers(child).values()} == {"auto"}


def answering(answer: Callable[[Tensor], Any]) -> InCode:
    """A network that returns what `answer` makes of its map."""
    return InCode(lambda m, x: answer(m.conv(x)), conv=nn.Conv2d(3, 4, 3)).eval()


@dataclass(slots=True)
class Slots:
    value: Any


def boxed(value: Any) -> SimpleNamespace:
    """A user's object, which no pytree knows."""
    return SimpleNamespace(value=value)


ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "map": lambda y: y,
    "logits": lambda y: y.mean((2, 3)),
    "one number an image": lambda y: y.mean((1, 2, 3)),
    "a number": lambda y: y.mean(),
    "dict": lambda y: {"a": y.mean((2, 3)), "b": [y, y.sum()], "c": None, "d": 3},
    "tuple with integers": lambda y: (y.mean((2, 3)), y.argmax(1), y > 0),
    "features": lambda y: [y, y.mean((2, 3))],
    "an object": lambda y: boxed(y.mean((2, 3))),
    "slots": Slots,
    "objects in a list": lambda y: [boxed(boxed(y))],
    "NumPy": lambda y: {"boxes": y.detach().numpy(), "area": float(y.detach().sum())},
    "a user's mapping": lambda y: UserDict(value=y),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_any_nest_of_tensors(answer: str) -> None:
    parent, x = answering(ANSWERS[answer]), torch.randn(X.shape)
    child = recast_copy(parent, X)
    exactness = verify(parent, child, x)
    assert exactness.bitwise
    assert exactness.ok()
    assert "bitwise equal" in str(exactness)
    nn.init.constant_(child.conv.gamma, 0.5)
    exactness = verify(parent, child, x)
    assert not exactness.ok()
    assert exactness.max_relative_error > 1e-3
    assert "max relative error" in str(exactness)
    assert exactness.to_dict()["images"] == exactness.images


OTHER_OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "more tensors": (lambda y: {"a": y}, lambda y: {"a": y, "b": y}),
    "no tensor": (lambda y: "text", lambda y: "text"),
    "other keys": (lambda y: {"a": y}, lambda y: {"b": y}),
    "None for a tensor": (lambda y: {"out": y, "aux": None}, lambda y: {"out": y, "aux": y}),
    "double for single precision": (lambda y: y.double(), lambda y: y),
    "a tuple for a list": (lambda y: [y, y], lambda y: (y, y)),
    "other classes": (lambda y: y.mean((2, 3)), lambda y: y.mean((2, 3))[:, :2]),
    "another number": (lambda y: (y, 3), lambda y: (y, 4)),
}


@pytest.mark.parametrize("case", OTHER_OUTPUTS)
def test_outputs_of_another_kind_are_refused(case: str) -> None:
    parent = answering(lambda y: y)
    child = recast_copy(parent, X)
    parent.run, child.run = (answering(answer).run for answer in OTHER_OUTPUTS[case])
    with pytest.raises(RecastError, match="different kinds of output"):
        verify(parent, child, torch.randn(X.shape))


def test_what_cannot_be_compared_is_refused() -> None:
    parent = answering(lambda y: [y, iter(y)])
    with pytest.raises(RecastError, match="iterator"):
        verify(parent, recast_copy(parent, X), torch.randn(X.shape))


@torch.no_grad()
def open_and_triple_(child: nn.Module) -> None:
    for layer in gated_layers(child).values():
        layer.gamma.fill_(0.7)
        layer.value.mul_(3)


@pytest.mark.parametrize(
    ("message", "images"),
    [("no image", torch.zeros(0, 3, 16, 16)), ("no tensor", None), ("same network", X), ("for CifarResNet", X)],
)
def test_what_cannot_be_a_proof_is_refused(message: str, images: Any) -> None:
    parent, child = pair()
    models = {"same network": child, "for CifarResNet": CifarResNet((1, 1, 1), (8, 8, 12))}
    model = models.get(message, parent)
    for wrapped in (model, nn.Sequential(model)):
        with pytest.raises(RecastError, match=message):
            verify(wrapped, child, images)


@pytest.mark.parametrize(
    "images", [X, X + 0.3, torch.ones(2, 3, 16, 16) * torch.randn(2, 3, 1, 1)], ids=["zero", "constant", "colours"]
)
def test_images_without_a_signal_prove_nothing(images: Tensor) -> None:
    parent, child = pair()
    exactness = verify(parent, child, images)
    assert not exactness.ok()
    assert exactness.blind == ["layer3.0.conv1", "layer3.0.conv2"]
    assert "inconclusive: no signal reached layer3.0.conv1 and 1 more" in str(exactness)
    both = exactness + verify(parent, child, torch.randn(X.shape))  # others showed it
    assert both.ok()
    assert both.layers == dict.fromkeys(both.signal, 0.0)


@pytest.mark.parametrize("hides", ["a zero norm after the blocks", "a huge bias after the layer", "of the layer"])
def test_a_layer_cannot_hide_behind_what_follows(hides: str) -> None:
    """The outputs are equal to rounding, and the layers are not."""
    parent = small()
    with torch.no_grad():
        if hides == "a zero norm after the blocks":
            nn.init.zeros_(parent.layer3[0].bn2.weight)
        elif hides == "of the layer":
            parent.layer3[0].conv2.bias = nn.Parameter(torch.full((16,), 1e4))
        parent.fc.bias.fill_(1e12)
    child, x = recast_copy(parent, X), torch.randn(X.shape)
    assert verify(parent, child, x).ok()
    open_and_triple_(child)
    exactness = verify(parent, child, x)
    assert exactness.max_relative_error <= TOLERANCE
    assert max(exactness.layers.values()) > 0.1
    assert not exactness.ok()
    assert not exactness.bitwise
    assert "bitwise" not in str(exactness)


def test_a_layer_that_runs_less_often_is_another_function() -> None:
    parent = InCode(lambda m, x: m.conv(x) + 0 * m.conv(x), conv=nn.Conv2d(3, 3, 3)).eval()
    child = recast_copy(parent, X)
    child.run = lambda m, x: m.conv(x)
    exactness = verify(parent, child, torch.randn(X.shape))
    assert exactness.max_relative_error == 0
    assert exactness.layers == {"conv": INF}
    assert not exactness.ok()


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, nn.Sequential])
def test_the_layers_of_a_wrapped_network_are_compared(wrap: Callable[[nn.Module], nn.Module]) -> None:
    parent, child = pair()
    x = torch.randn(X.shape)
    assert verify(wrap(parent), child, x).layers.keys() == {"layer3.0.conv1", "layer3.0.conv2"}
    nn.init.zeros_(parent.layer3[0].bn2.weight)
    nn.init.zeros_(child.layer3[0].bn2.weight)
    open_and_triple_(child)
    assert not verify(wrap(parent), child, x).ok()


def test_neither_random_state_nor_buffers_nor_backends_move() -> None:
    def draw_and_count(m: Any, x: Tensor) -> Tensor:
        m.count += len(x)
        if not float(x.abs().sum()) >= 0:  # a value: shapes alone do not run it
            raise ValueError
        return m.conv(x + torch.randn_like(x))

    parent: Any = InCode(draw_and_count, conv=nn.Conv2d(3, 4, 3)).eval()
    parent.register_buffer("count", torch.zeros(()))
    pooled, state = small(), torch.get_rng_state()
    planned = plan(parent, X, PAPERS)
    assert planned.note.startswith("costs are those of this example")
    plan(pooled, X, PAPERS, pool=PoolConfig("single"))
    assert torch.equal(torch.get_rng_state(), state)
    child = recast_(copy.deepcopy(parent), planned)
    state, x = torch.get_rng_state(), torch.randn(16, *X.shape[1:])
    torch.set_rng_state(state)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda form: verify(parent, child, x, backend=form), ["split", "dense"] * 4))
    assert all(exactness.ok() for exactness in results)  # both drew the same
    assert [exactness.backend for exactness in results] == ["split", "dense"] * 4
    assert child.conv.backend == "auto"
    assert torch.equal(torch.get_rng_state(), state)
    assert parent.count == child.count == 0


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("large", ["bias", "weight"])
def test_a_large_class_hides_no_other(classes: int, large: str) -> None:
    parent = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)).eval()
    with torch.no_grad():
        getattr(parent[3], large)[0] = 1e8
    child, x = recast_copy(parent, X), torch.randn(X.shape)
    assert verify(parent, child, x, backend="dense").ok()
    with torch.no_grad():
        child[3].weight[classes - 1] += 1
    exactness = verify(parent, child, x)
    assert not exactness.ok()
    assert exactness.worst == f"output, channel {classes - 1}"
    assert f"channel {classes - 1}" in str(exactness)


def test_a_recast_parent_is_refused() -> None:
    parent, child = pair()
    open_and_triple_(child)
    x = torch.randn(X.shape)
    for model in (copy.deepcopy(child), nn.Sequential(copy.deepcopy(child))):
        with pytest.raises(RecastError, match=r"already recast .*layer3\.0\.conv1"):
            verify(model, child, x)
        with pytest.raises(RecastError, match="already recast"):
            trace(model, plan(parent, X, PAPERS), x)
    pooled = recast_copy(parent, X, where="none", pool=PoolConfig("single"))
    with pytest.raises(RecastError, match="already recast"):
        verify(copy.deepcopy(pooled), pooled, x)


@pytest.mark.parametrize("first", ["last_stage", "none"])
def test_layers_and_pooling_are_verified_one_after_the_other(first: str) -> None:
    pools = {"last_stage": PoolConfig("none"), "none": PoolConfig("single", start="average")}
    (second,) = pools.keys() - {first}
    parent = recast_copy(small(), X, where=first, pool=pools[first])
    child = recast_copy(parent, X, where=second, pool=pools[second])
    result = verify(parent, child, torch.randn(X.shape), control=True)
    assert result.ok()
    assert result.telling


@pytest.mark.parametrize("scale", [1e7, 1e20, 1e30])
def test_images_without_a_scale_prove_nothing(scale: float) -> None:
    parent, child = pair()
    assert not verify(parent, child, scale * torch.randn(X.shape)).ok()
    assert verify(parent, child, 1e3 * torch.randn(X.shape)).ok()


def test_nan_in_a_layer_is_never_ok() -> None:
    broken, equal = (Exactness(1, 0.0, False, 1.0, "split", {"a": e}, 1, {"a": 1.0}) for e in (float("nan"), 0.0))
    assert equal.ok()
    assert not any(exactness.ok() for exactness in (broken, broken + equal, equal + broken))


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0, 0),
        ([1.0, -3.0], [1.0, -4.0], 0.25, 0.25),
        ([1.0, -4.0], [1.0], INF, INF),
        ([1.0, NAN], [1.0, -4.0], INF, INF),
        ([INF, 1.0], [1.0, -4.0], INF, INF),
        ([INF, 1.0], [INF, 1.0], INF, INF),
        ([[1e8, 1.0, 3.0]], [[1e8, 1.0, 2.0]], 0.05, 0.5),
        ([[1e8, 1.0, 2.0]], [[1e8 + 800, 1.0, 2.0]], 7e-6, 9e-6),
        ([[1.0, 0.1]], [[1.0, 0.0]], 0.1, 0.11),
        ([[[1e8, 1.0, 3.0]] * 2], [[[1e8, 1.0, 2.0]] * 2], 0.05, 0.5),
        ([1.0, -4.0], [0.0, 0.0], 1e30, INF),
        ([], [], 0, 0),
        ([1, 5], [1, 4], 0.25, 0.25),
        ([1 + 1j], [1 + 2j], 0.44, 0.45),
        ([True], [False], 1.1, INF),
    ],
)
def test_relative_error(a: list[Any], b: list[Any], low: float, high: float) -> None:
    assert low <= relative_error(torch.tensor(a), torch.tensor(b)) <= high
