"""What the library promises of models it changed, and that a refusal changes nothing."""

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import recast


def digits_resnet(num_classes: int = 10) -> Any:
    torch.manual_seed(0)
    return timm.create_model("digits_resnet", num_classes=num_classes).eval()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the snippets below may use: a network, an image, its plan, recast networks, an optimizer; files here."""
    monkeypatch.chdir(tmp_path)
    model, x = digits_resnet(), torch.randn(2, 3, 16, 16)
    p = recast.plan(model, x)
    child = recast.recast_(copy.deepcopy(model), p)
    soft = recast.recast_(copy.deepcopy(model), recast.plan(model, x, recast.RecastConfig(gate="sigmoid")))
    recast.save(child, "child.safetensors")
    Path("notes.txt").write_text("mine", encoding="utf-8")
    optimizer = torch.optim.AdamW(recast.param_groups(model))
    model.layer1.train()  # a mode of its own must come back

    def bitwise(other: nn.Module) -> bool:
        with torch.no_grad():
            return torch.equal(other.eval()(x), model.eval()(x))

    return {**globals(), "pickle": pickle, **{name: value for name, value in locals().items() if name != "monkeypatch"}}


def state_of(names: dict[str, Any]) -> list[Any]:
    """Everything that a refusal must leave as it was."""
    state: list[Any] = [
        torch.get_rng_state().tolist(),
        random.getstate(),
        torch.is_grad_enabled(),
        names["p"].to_json(),
    ]
    state += [[[id(q) for q in group["params"]] for group in names["optimizer"].param_groups]]
    state += [sorted(path.name for path in names["tmp_path"].iterdir()), Path("notes.txt").read_text("utf-8")]
    for model in (names["model"], names["child"], names["soft"]):
        state += [
            (type(m), id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
        ]
        state += [(id(q), q.requires_grad, q.grad is None) for q in model.parameters()]
        state += [(key, value.double().sum().item()) for key, value in model.state_dict().items()]
    return state


@pytest.mark.parametrize(
    "promise",
    [
        "bitwise(pickle.loads(pickle.dumps(child)))",
        "bitwise(copy.deepcopy(child))",
        "recast.verify(model, copy.deepcopy(child), x).ok()",
        "all(m.backend == 'auto' for m in child.modules() if isinstance(m, recast.GPSA))",
        "torch.func.vmap(child.eval())(x[:, None]).shape == (2, 1, 10)",
        "torch.func.grad(lambda y: child.eval()(y).sum())(x).isfinite().all()",
        "torch.func.jacrev(lambda y: child.eval()(y[None])[0])(x[0]).shape == (10, 3, 16, 16)",
        "recast.Plan.from_json(p.to_json()) == p",
        "not any(q.requires_grad for q in recast.recast_(model.requires_grad_(False), p).parameters())",
        "model.layer3[1].conv2.register_buffer('mine', torch.ones(3)) or "
        "recast.recast_(model, recast.plan(model, x)).layer3[1].conv2.get_buffer('mine').sum() == 3",
    ],
)
def test_a_promise_holds(promise: str, names: dict[str, Any]) -> None:
    assert eval(promise, names)


@pytest.mark.parametrize(
    "call", ["recast.plan(model, x)", "recast.verify(model, child, x)", "recast.trace(model, p, x)"]
)
def test_looking_changes_nothing(call: str, names: dict[str, Any]) -> None:
    before = state_of(names)
    eval(call, names)
    assert state_of(names) == before
