"""`plan` reads only, says what is true, and is data that survives a round trip."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_helpers import InCode, recast_copy, unchanged
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

from recast import Plan, PoolConfig, RecastConfig, RecastError, attention_pool_, plan
from recast.layers.config import PAPERS_LAYER
from recast.models.cifar import CifarResNet

X = torch.zeros(2, 3, 16, 16)


def small() -> CifarResNet:
    """A network that says what it takes: its pool is looked for at that size."""
    model = CifarResNet((1, 1, 1), (8, 8, 16), shortcut="option_a")
    model.pretrained_cfg = {"input_size": (3, 16, 16)}
    return model


def macs_of(model: nn.Module, x: Tensor) -> int:
    """Of a forward pass in training, whose form a plan counts."""
    with FlopCounterMode(display=False) as flops:
        model.train()(x)
    return flops.get_total_flops() // 2 // len(x)


@pytest.mark.parametrize("parametrised", [None, "weight_norm", "spectral_norm"])
@pytest.mark.parametrize("stride", ["keep", "remove"])
def test_plan_reads_only(parametrised: str | None, stride: Any) -> None:
    model = small()
    if parametrised:
        getattr(parametrizations, parametrised)(model.layer3[0].conv2)
    model.layer2.eval()  # a mixture of flags, as with frozen norms
    model.requires_grad_(False).layer3.requires_grad_(True)
    random = torch.get_rng_state()
    with unchanged(model):
        plan(model, X, RecastConfig("linear", stride=stride, **PAPERS_LAYER))
        plan(model, X)
    assert torch.equal(torch.get_rng_state(), random)


CONFIGS = [RecastConfig(gate, stride=stride) for gate in ("linear", "sigmoid") for stride in ("keep", "remove")]


@pytest.mark.parametrize("config", [RecastConfig(), *(config.replace(**PAPERS_LAYER) for config in CONFIGS)])
@pytest.mark.parametrize("parametrised", [False, True])
def test_totals_are_those_of_the_real_models(config: RecastConfig, parametrised: bool) -> None:
    parent = small()
    if parametrised:
        parametrizations.weight_norm(parent.layer3[0].conv2)
    child = recast_copy(parent, X, config)
    before, after = child.recast_plan.before, child.recast_plan.after
    assert before.parameters == sum(p.numel() for p in parent.parameters())
    assert after.parameters == sum(p.numel() for p in child.parameters())
    assert (before.macs, after.macs) == (macs_of(parent, X), macs_of(child, X))
    assert after.activation_bytes > before.activation_bytes


def test_costs_do_not_depend_on_the_batch_or_on_what_is_frozen() -> None:
    expected = plan(small(), X[:1])  # a slice: the storage behind it holds more than one image
    assert plan(small(), torch.zeros(5, 3, 16, 16)) == expected
    assert plan(small().requires_grad_(False), X[:1]) == expected
    with torch.no_grad():
        assert plan(small(), X[:1]) == expected


@pytest.mark.parametrize(
    ("config", "exact"),
    [
        (RecastConfig(), True),
        (RecastConfig(gamma_init=0.1), False),
        (RecastConfig("linear"), True),
        (RecastConfig("linear", gamma_init=0.1), False),
        (RecastConfig("linear", s_init=0.1, gaussian_heads="all"), False),
        (RecastConfig(gate="sigmoid"), False),
        (RecastConfig(gate="sigmoid", alpha=20.0, lambda_init=14.0), False),
    ],
)
def test_exact_is_promised_only_where_it_holds(config: RecastConfig, exact: bool) -> None:
    parent, x = small().eval(), torch.randn(X.shape)
    child = recast_copy(parent, X, config)
    assert {step.exact for step in child.recast_plan.steps} == {exact}
    assert torch.equal(child(x), parent(x)) == exact


@pytest.mark.parametrize("example", [torch.zeros(1, 4, 16, 16), torch.zeros(3, 16, 16), (), None, "image", (X, X)])
def test_an_example_that_does_not_fit_is_refused(example: Any) -> None:
    with pytest.raises(RecastError):
        plan(small(), example)
    with pytest.raises(RecastError, match=r"got \(3, 16, 16\), expected \(B, C, H, W\)"):
        plan(nn.Conv2d(3, 4, 3), X[0])
    with pytest.raises(RecastError, match="lazy layers, whose weights have no shape yet"):
        plan(nn.Sequential(nn.LazyConv2d(4, 3)), X)


@pytest.mark.parametrize(
    "convert",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        Tensor.to_mkldnn,
        lambda eye: torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
        lambda eye: torch.nested.nested_tensor([eye, eye[:2]]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_named(convert: Callable[[Tensor], Tensor]) -> None:
    model = small()
    model.register_buffer("graph", convert(torch.eye(3)))
    with pytest.raises(RecastError, match="graph is sparse, quantized or nested"):
        plan(model, X)


def test_costs_that_hold_for_one_example_are_said() -> None:
    def choose(m: nn.Module, x: Tensor) -> Tensor:
        y = m.body(x)
        return y if float(y.sum()) > 0 else -y

    model = InCode(choose, body=small())
    with unchanged(model):
        planned = plan(model, X)
    assert planned.note.startswith("costs are those of this example")
    assert planned.note in str(planned)
    expected = plan(small(), X)
    assert (planned.before, planned.after) == (expected.before, expected.after)
    # frozen parameters stay frozen, and what they keep once they are trained counts all the same
    assert plan(model.requires_grad_(False), X).before == expected.before
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("left"),
        lambda d: d.update(steps=["x"]),
        lambda d: d.update(steps=d["steps"] * 2),
        lambda d: d["steps"][0].update(kernel=[0, 3]),
        lambda d: d["totals"].update(before={}),
        lambda d: d["steps"][0]["before"].update(macs=10**400),
    ],
)
def test_a_file_that_is_no_plan_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(plan(small(), X).to_json())
    change(document)
    with pytest.raises(RecastError, match=r"plan\.json"):
        Plan.from_json(json.dumps(document), "plan.json")
    for content in (None, document, b"{}"):
        with pytest.raises(RecastError, match="a plan must be text in JSON"):
            Plan.from_json(content)


@pytest.mark.parametrize("where", ["none", ["none"], "last_stage"])
@pytest.mark.parametrize("kind", ["single", "per_class"])
def test_a_pool_is_counted_and_nothing_is_changed(kind: Any, where: Any) -> None:
    model, pool = small(), PoolConfig(kind)
    with unchanged(model):
        planned = plan(model, X, where=where, pool=pool)
    pooled, cost = attention_pool_(small(), config=pool), planned.pool_cost
    assert cost.parameters == sum(p.numel() for p in pooled.parameters()) - sum(p.numel() for p in model.parameters())
    assert cost.macs == macs_of(pooled, X) - macs_of(model, X) > 0
    unpooled = plan(model, X, where=where) if where == "last_stage" else None
    assert planned.steps == (unpooled.steps if unpooled else ())
    assert planned.after == (unpooled.after if unpooled else planned.before) + cost
    assert len(planned.left) + len(planned.steps) == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert Plan.from_json(planned.to_json()) == planned
    assert "attention pooling: " + ("a single token" if kind == "single" else "a token for every class") in str(planned)


def test_a_pool_that_cannot_be_is_refused_in_its_own_words() -> None:
    for pool in (None, PoolConfig()):
        with pytest.raises(RecastError, match=r"where=.none. without pool"):
            plan(small(), X, where="none", pool=pool)
    with pytest.raises(RecastError, match="pools") as raised:
        plan(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), X, where="none", pool=PoolConfig("single"))
    assert "cannot run on the example" not in str(raised.value)
