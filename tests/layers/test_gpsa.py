"""The layer against `nn.Conv2d`, and everything a layer owes its users: state, gradients, folding, AMP, compile."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import PAD_1, PAPERS, issued, outputs_and_gradients, recast_copy
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.fusion import fuse_conv_bn_eval

import recast
from recast import CMHSA, GPSA, Geometry, RecastConfig, RecastError
from recast.layers import functional
from recast.layers.config import PAPERS_LAYER
from recast.layers.forms import Forms
from recast.layers.functional import backends
from recast.surgery.rules import convert

BACKENDS = ("split", "merged", "sdpa", "dense", "reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoid_gate_reaches_the_convolution_in_the_limit(backend: Any, random_case: Any, error_of: Any) -> None:
    """α = λ = 40: what is left of the Gaussian's neighbours and of the content is e^−40."""
    config = RecastConfig(gate="sigmoid", alpha=40.0, lambda_init=40.0, backend=backend)
    for seed in range(40):
        conv, x, text = random_case(seed)
        measured = outputs_and_gradients(convert(conv, config), x)
        for name, value in outputs_and_gradients(conv, x).items():
            assert error_of(measured[name], value) <= 1e-10, text


@pytest.mark.parametrize(
    ("channels", "kernel", "groups", "asked", "expected"),
    [(512, 3, 1, None, 56), (4, 3, 1, None, 1), (64, 7, 64, None, 8), (64, 3, 32, None, 7), (512, 3, 1, 64, 64)],
)
def test_head_width(channels: int, kernel: int, groups: int, asked: int | None, expected: int) -> None:
    config = RecastConfig("linear", head_dim=asked, **PAPERS_LAYER)
    layer = GPSA(channels, channels, Geometry((kernel, kernel)), groups=groups, config=config, device="meta")
    assert layer.head_dim == expected
    assert layer.query.shape == layer.key.shape == (kernel**2 * expected, channels)
    assert (layer.value is None) == (groups == channels)


def gradients_of(layer: GPSA) -> dict[str, bool]:
    """Whether any gradient reaches each parameter."""
    layer.zero_grad()
    layer(torch.randn(2, layer.in_channels, 6, 7)).square().sum().backward()
    return {name: p.grad is not None and bool(p.grad.any()) for name, p in layer.named_parameters()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_alive_at_the_start(backend: Any) -> None:
    """Sigmoid: W_key = 0 and W_qry random, so the key moves first, then the query."""
    layer = GPSA(9, 4, PAD_1, config=RecastConfig("linear", backend=backend, **PAPERS_LAYER))
    alive = gradients_of(layer)
    assert {name for name, is_alive in alive.items() if is_alive} == {"weight", "bias", "value", "gamma", "spread"}
    assert bool((torch.stack((layer.gamma.grad, layer.spread.grad)) != 0).all())
    with torch.no_grad():
        layer.gamma.fill_(0.1)
    assert gradients_of(layer) == {**dict.fromkeys(alive, True), "query": False, "center": False, "raw_alpha": False}
    with torch.no_grad():
        layer.spread.fill_(0.1)
        layer.key.normal_()
    assert all(gradients_of(layer).values())
    layer = GPSA(9, 4, PAD_1, config=RecastConfig(gate="sigmoid", backend=backend))
    alive = gradients_of(layer)
    assert alive == {**dict.fromkeys(alive, True), "query": False}
    with torch.no_grad():
        layer.key.add_(layer.key.grad)
    assert all(gradients_of(layer).values())


@pytest.fixture
def heads_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of heads of every computation of the part that is not a convolution."""
    counted: list[int] = []
    original = backends._gathers

    def spy(x: Tensor, values: Tensor, w: functional.Weights, *rest: Any) -> Any:
        counted.append(len({*w.gaussian_heads, *w.content_heads}))
        return original(x, values, w, *rest)

    monkeypatch.setattr(backends, "_gathers", spy)
    return counted


def open_two(layer: GPSA) -> GPSA:
    with torch.no_grad():
        layer.gamma[1], layer.spread[4] = -0.2, 0.3
        layer.key.normal_()
    return layer


def test_closed_heads_are_skipped_in_eval_without_gradients(heads_run: list[int]) -> None:
    layer = open_two(GPSA(3, 4, PAD_1, config=PAPERS).eval())
    x = torch.randn(1, 3, 5, 5)
    everything = layer(x)
    assert heads_run == [9]  # gradients may be asked for: a closed gate's gradient needs its map
    with torch.no_grad():
        assert layer.open_maps() == ((4,), (1,))
        torch.testing.assert_close(layer(x), everything)
        assert heads_run == [9, 2]
        layer.train()(x)
    assert heads_run == [9, 2, 9]
    layer.eval().gamma.requires_grad_(False)
    layer.spread.requires_grad_(False)
    layer(x)  # the kernel gets its gradient without closed maps
    assert heads_run == [9, 2, 9, 2]


def loaded(layer: GPSA, state: GPSA, assign: bool) -> GPSA:
    nn.Sequential(layer).load_state_dict(nn.Sequential(state).state_dict(), assign=assign)
    return layer


def on_meta_first(state: GPSA) -> GPSA:
    with torch.device("meta"):
        layer = GPSA(3, 4, state.geometry, config=PAPERS)
    return loaded(layer.eval(), state, assign=True)


WAYS: dict[str, Callable[[GPSA], GPSA]] = {
    "as it is": lambda layer: layer,
    "copied": copy.deepcopy,
    "pickled": lambda layer: pickle.loads(pickle.dumps(layer)),
    "loaded": lambda layer: loaded(GPSA(3, 4, layer.geometry, config=PAPERS).eval(), layer, assign=False),
    "made on the meta device": on_meta_first,
    "trained and back": lambda layer: layer.train().eval(),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_computed_when_all_heads_are_closed(way: str, heads_run: list[int]) -> None:
    conv, x = nn.Conv2d(3, 4, 3, padding=1).eval(), torch.randn(1, 3, 5, 5)
    layer = WAYS[way](convert(conv, PAPERS))
    with torch.no_grad():
        assert torch.equal(layer(x), conv(x))
    layer.requires_grad_(False)
    layer(x.requires_grad_()).sum().backward()  # as an attack does: no gate gets a gradient
    gradient, x.grad = x.grad, None
    conv(x).sum().backward()
    assert torch.equal(gradient, x.grad)
    assert heads_run == []


def written(layer: GPSA, opened: GPSA) -> GPSA:
    with torch.no_grad():
        for mine, theirs in zip(layer.parameters(), opened.parameters(), strict=True):
            mine.copy_(theirs)
    return layer


def averaged(write: Callable[[list[nn.Parameter], list[nn.Parameter]], object]) -> Callable[[GPSA, GPSA], GPSA]:
    """Return an update of a running average, in eval mode, that writes as a package does."""

    def update(layer: GPSA, opened: GPSA) -> GPSA:
        with torch.no_grad():
            write(list(layer.parameters()), list(opened.parameters()))
        return layer

    return update


OPENINGS: dict[str, Callable[[GPSA, GPSA], GPSA]] = {
    "averaged by data.lerp_": averaged(lambda a, b: [p.data.lerp_(q.data, 1.0) for p, q in zip(a, b, strict=True)]),
    "averaged by data =": averaged(lambda a, b: [setattr(p, "data", q.data) for p, q in zip(a, b, strict=True)]),
    "averaged by copy_": averaged(lambda a, b: [p.data.copy_(q) for p, q in zip(a, b, strict=True)]),
    "averaged by foreach": averaged(lambda a, b: torch._foreach_lerp_(a, b, 1.0)),
    "averaged as a vector": averaged(lambda a, b: vector_to_parameters(parameters_to_vector(b), a)),
    "trained": lambda layer, opened: written(layer.train(), opened).eval(),
    "written to in eval mode": written,
    "copied, then written to": lambda layer, opened: written(copy.deepcopy(layer), opened),  # as an average does
    "pickled, then written to": lambda layer, opened: written(pickle.loads(pickle.dumps(layer)), opened),
    "written to, then copied": lambda layer, opened: copy.deepcopy(written(layer, opened)),
    "written to, then pickled": lambda layer, opened: pickle.loads(pickle.dumps(written(layer, opened))),
    "loaded": lambda layer, opened: loaded(layer, opened, assign=False),
    "loaded by assignment": lambda layer, opened: loaded(layer, opened, assign=True),
}


@pytest.mark.parametrize("way", OPENINGS)
def test_a_stale_answer_is_never_used(way: str, heads_run: list[int]) -> None:
    """All heads were closed in a pass; then the gates opened. Eval must compute the open ones."""
    layer, x = GPSA(3, 4, PAD_1, config=PAPERS).eval(), torch.randn(1, 3, 5, 5)
    opened = open_two(copy.deepcopy(layer))
    opened.backend = "reference"
    with torch.no_grad():
        layer(x)
        assert heads_run == []
        layer = OPENINGS[way](layer, opened)
        torch.testing.assert_close(layer(x), opened(x))
    assert heads_run == [2]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimiser_is_noticed(fused: bool) -> None:
    """Fused ones write without raising the tensor's own count; in eval mode, as where BatchNorm is frozen."""
    layer, x = GPSA(3, 4, PAD_1, config=PAPERS).eval(), torch.randn(2, 3, 5, 5)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    layer(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(layer(x), layer.eval()(x))
        assert layer.open_maps() == (tuple(range(9)),) * 2


def test_tolerance_closes_small_gates_and_nan_stays_open() -> None:
    layer = open_two(GPSA(3, 4, Geometry((3, 3)), config=PAPERS))
    assert layer.open_maps() == ((4,), (1,))
    layer.close_maps_(0.25)
    assert (layer.gaussian_heads, layer.content_heads) == layer.open_maps() == ((4,), ())
    layer.close_maps_(0.3)
    assert layer.open_maps() == ((), ())
    assert not any(gate.any() for gate in layer.gates().values())
    layer = GPSA(3, 4, Geometry((3, 3)), config=PAPERS)
    with torch.no_grad():
        layer.gamma[7] = float("nan")
    layer.close_maps_(0.3)
    assert layer.content_heads == (7,)
    sigmoid = GPSA(3, 4, Geometry((3, 3)), config=RecastConfig(gate="sigmoid"))
    sigmoid.close_maps_(10)
    assert sigmoid.open_maps() == (sigmoid.gaussian_heads, sigmoid.content_heads) == (tuple(range(9)), ())
    with pytest.raises(RecastError, match=r"got .* \(\) .* \(3,\)"):
        layer.prune_((), (3,))
    with pytest.raises(RecastError, match="prune content heads only"):
        sigmoid.prune_((), ())


@pytest.mark.parametrize(("gate", "forward", "backward"), [("linear", 24, 63), ("sigmoid", 22, 53)])
def test_few_operations(gate: Any, forward: int, backward: int, open_gates: Any) -> None:
    """They decide the time of small maps. What follows from sizes alone is made once."""
    layer = open_gates(GPSA(64, 64, PAD_1, config=RecastConfig(gate, **PAPERS_LAYER)))
    x = torch.randn(1, 64, 8, 8, requires_grad=True)
    layer(x)
    with issued() as first:
        y = layer(x)
    slope = torch.ones_like(y)
    with issued() as second:
        y.backward(slope)
    assert (len(first), len(second)) == (forward, backward), (first, second)


@pytest.mark.parametrize("groups", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_compiled_training_step_has_the_same_gradients(groups: int, open_gates: Any, error_of: Any) -> None:
    """Long maps: with what a compiler keeps for the backward pass, which is for it to choose."""
    layer = open_gates(GPSA(8, 8, PAD_1, groups=groups, config=PAPERS))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(2, 8, 12, 12)
    expected, measured = (outputs_and_gradients(module, x) for module in (layer, compiled))
    for a, b in zip(measured.values(), expected.values(), strict=True):
        assert error_of(a, b) < 1e-5


@pytest.mark.parametrize(
    ("gate", "backend", "content"),
    [
        ("linear", "split", "softmax"),
        pytest.param("sigmoid", "sdpa", "softmax", marks=pytest.mark.slow),
        ("linear", "auto", "linear"),
        ("bias", "auto", "softmax"),
    ],
)
def test_compiles_in_one_graph_once_a_size(gate: Any, backend: Any, content: Any, open_gates: Any) -> None:
    geometry, groups = Geometry((3, 3), (2, 2), (1, 1, 1, 1)), 1 if backend in ("merged", "auto") else 2
    layer: GPSA | CMHSA
    if gate == "bias":
        layer = CMHSA(4, 4, geometry)
        layer.set_size_(9, 10)
        nn.init.normal_(layer.key)
    else:
        config = RecastConfig(gate=gate, backend=backend, content=content, **PAPERS_LAYER)
        layer = open_gates(GPSA(4, 4, geometry, groups=groups, config=config))
        layer.tuned = (Forms("cpu", (8, 8), "dense", "dense"),)  # where the backend is auto
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    sizes = [(8, 8), (9, 6), (9, 6)]
    for height, width in sizes:
        x = torch.randn(2, 4, height, width)
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count <= len(set(sizes))
    if isinstance(layer, GPSA):
        layer.eval()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x))


def test_second_derivatives_are_for_the_written_out_forms(open_gates: Any, error_of: Any) -> None:
    layer = open_gates(GPSA(4, 4, PAD_1, config=PAPERS)).double()
    x = torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True)

    def second(backend: Any) -> Tensor:
        layer.backend = backend
        (first,) = torch.autograd.grad(layer(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    assert error_of(second("dense"), second("reference")) < 1e-9
    for backend in ("split", "merged"):
        with pytest.raises(RecastError, match="backend='dense'"):
            second(backend)


def per_sample(layer: GPSA, x: Tensor) -> Tensor:
    """Gradients of γ for every image, as differential privacy takes them."""
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(p: dict[str, Tensor], image: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(layer, p, (image[None],))
        return output.square().sum()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)["gamma"]


def forward_mode(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, x.cos()))
        return torch.autograd.forward_ad.unpack_dual(dual).tangent


TRANSFORMS: dict[str, Callable[[GPSA, Tensor], Tensor]] = {
    "grad of each image": per_sample,
    "vmap": lambda layer, x: torch.func.vmap(layer)(x[:, None]),
    "hessian": lambda layer, x: torch.func.hessian(lambda z: layer(z).square().sum())(x[:1, :, :3, :3]),
    "forward mode": forward_mode,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit is deprecated
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("closed", [False, True])
def test_function_transforms_agree_with_the_reference(
    transform: str, closed: bool, open_gates: Any, error_of: Any
) -> None:
    layer = GPSA(4, 4, PAD_1, config=PAPERS).double().eval()
    layer = layer if closed else open_gates(layer).train()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    measured = TRANSFORMS[transform](layer, x)
    layer.backend = "reference"
    assert error_of(measured, TRANSFORMS[transform](layer, x)) < 1e-9


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit is deprecated
@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda layer, _: torch.fx.symbolic_trace(layer), r"torch\.export\.export"),
        (lambda layer, x: layer(x.double()), "torch.float32 weights, got torch.float64"),
    ],
)
def test_what_cannot_be_run_says_so(run: Callable[[nn.Module, Tensor], Any], message: str) -> None:
    for layer in (GPSA(3, 4, Geometry((3, 3)), config=PAPERS), CMHSA(3, 4, Geometry((3, 3)))):
        with pytest.raises(RecastError, match=message):
            run(layer, torch.zeros(1, 3, 5, 5))


CONFIGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "sigmoid": {"gate": "sigmoid"},
    "bias": {"gate": "bias"},
    "linear content": {"content": "linear"},
}


def recast_pair(config: dict[str, Any], gamma: float = 0.0) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network of one convolution, the recast one with its heads open by γ, and images."""
    x, parent = torch.randn(2, 8, 9, 9), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)).eval()
    child = recast_copy(parent, x, RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config))
    recast.wake_(child, x)
    if gamma and isinstance(child[0], GPSA) and child[0].config.gate == "linear":
        nn.init.constant_(child[0].gamma, gamma)
    return parent, child.eval(), x


@pytest.mark.parametrize(
    ("kind", "gamma", "warned"), [("linear", 0.0, 0), ("linear", 0.5, 1), ("sigmoid", 0.0, 1), ("bias", 0.0, 1)]
)
def test_weight_read_as_a_kernel_warns_once(kind: str, gamma: float, warned: int) -> None:
    _, child, x = recast_pair(CONFIGS[kind], gamma)
    (layer,) = child
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for copied in (copy.deepcopy(child), pickle.loads(pickle.dumps(child))):
            copied.load_state_dict(child.state_dict())
        torch.optim.AdamW(child.parameters()).zero_grad()
        torch.func.functional_call(child, dict(child.named_parameters()), (x,))
        torch.compile(child, backend="eager", fullgraph=True)(x)
        layer.weight = nn.Parameter(dict(layer.named_parameters())["weight"].detach())
        recast.fold_(copy.deepcopy(child))
        assert not [w for w in caught if "trained attention" in str(w.message)]
        assert layer.weight.data.shape == layer.weight.shape == (8, 8, 3, 3)
        messages = [w for w in caught if "recast.fold_" in str(w.message)]
    assert len(messages) == warned
    assert all(w.filename == __file__ for w in messages)
    if warned:  # so do helpers that build a convolution of the layer, and each of its copies
        with pytest.warns(UserWarning, match="trained attention"):
            fuse_conv_bn_eval(layer, nn.BatchNorm2d(8).eval())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["split", "merged", "plain", "sdpa", "reference"])
def test_half_precision_never_makes_nan(kind: str, gamma: float, backend: Any) -> None:
    """Logits pass 65,504: where the parent is finite so is the child, and closed gates pass finite gradients."""
    parent, child, x = recast_pair(CONFIGS[kind], gamma)
    child.train()
    if isinstance(child[0], GPSA):
        child[0].backend = backend
    for scale in (300, 3000):
        with torch.autocast("cpu", dtype=torch.float16):
            assert parent(x * scale).isfinite().all()
            y = child(x * scale)
        half = copy.deepcopy(child).half()(x.half() * scale)
        assert y.isfinite().all()
        assert half.isfinite().all()
        if kind in ("linear", "linear content") and not gamma:
            child.zero_grad()
            y.float().mean().backward()
            assert all(p.grad is None or p.grad.isfinite().all() for p in child.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [{}, {"gate": "linear", "content_heads": 1}])
def test_a_network_of_half_precision_takes_similar_queries(dtype: torch.dtype, config: Any) -> None:
    parent, images = nn.Sequential(nn.Conv2d(4, 4, 3)).to(dtype), torch.randn(1, 4, 6, 6, dtype=dtype)
    model = recast_copy(parent, images, RecastConfig(**config, query_key="similar"))
    rows = model[0].query.detach().float() / RecastConfig().logit_std ** 0.5
    torch.testing.assert_close(rows @ rows.mT, torch.eye(len(rows)), atol=0.02, rtol=0)
