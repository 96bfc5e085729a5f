"""Layers whose heads do not all have content or a Gaussian from the start: the same function as a pruned layer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from layer_helpers import PAD_1, recast_copy
from torch import nn

import recast
from recast import GPSA, Geometry, RecastConfig, RecastError
from recast.layers import functional
from recast.layers.config import PAPERS_LAYER
from recast.layers.functional import backends

KERNELS = {
    "3×3": PAD_1,
    "5×3 stride 2": Geometry((5, 3), (2, 2), (2, 2, 1, 1)),
    "2×2": Geometry((2, 2)),
    "1×1": Geometry((1, 1)),
    "3×3 dilated": Geometry((3, 3), padding=(2, 2, 2, 2), dilation=(2, 2)),
    "3×3 padded above": Geometry((3, 3), padding=(2, 0, 0, 2)),
    "transposed": Geometry((3, 3), padding=(1, 1, 1, 1), upsample=(2, 2), is_transposed=True),
}

NINE = tuple(range(9))


@pytest.mark.parametrize(
    ("choice", "heads"),
    [
        *[("all", tuple(range(9))), ("none", ()), ("1", (4,)), ("2", (0, 4)), ("3", (0, 4, 8))],
        *[("5", (0, 2, 4, 6, 8)), ("9", tuple(range(9))), ("40", tuple(range(9))), ((0, 8), (0, 8)), ((7,), (7,))],
    ],
)
def test_which_heads_a_choice_names(choice: Any, heads: tuple[int, ...]) -> None:
    assert KERNELS["3×3"].heads(choice) == heads


@pytest.mark.parametrize(
    "config",
    [
        *({"content_heads": wrong} for wrong in ("none", "most", "0,0", -1, 1.5, True, None)),
        {"gate": "sigmoid", "gaussian_heads": 1},
        *({"gate": "bias"} | heads for heads in ({"content_heads": 1}, {"gaussian_heads": "none"})),
    ],
)
def test_choices_that_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RecastError, match="heads"):
        RecastConfig(**{"gate": "linear"} | config)


@pytest.mark.parametrize(
    ("config", "heads", "values", "width"),
    [
        ({}, ((), NINE), False, 7),
        ({"gate": "sigmoid"}, (NINE, NINE), True, 7),
        ({"content_heads": 2}, ((), (0, 4)), False, 7),
        ({"gaussian_heads": 1}, ((4,), NINE), False, 7),
        ({"project_values": True}, ((), NINE), True, 7),
    ],
)
def test_every_head_has_content_unless_fewer_are_asked_for(config: Any, heads: Any, values: bool, width: int) -> None:
    layer = GPSA(64, 64, KERNELS["3×3"], config=RecastConfig(**{"gate": "linear"} | config))
    assert (layer.gaussian_heads, layer.content_heads) == heads
    assert (layer.value is not None, layer.head_dim) == (values, width)


def test_what_a_default_layer_costs() -> None:
    parent = timm.create_model("digits_resnet")
    plan = recast.plan(parent, torch.zeros(1, 3, 32, 32))
    assert plan.after.macs / plan.before.macs == pytest.approx(1.107, abs=0.001)


def test_a_position_that_the_kernel_does_not_have_is_refused() -> None:
    with pytest.raises(RecastError, match="no position 9"):
        recast.plan(
            nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8), RecastConfig("linear", content_heads=[0, 9]), where="all"
        )


def made(name: str, dtype: torch.dtype, open_gates: Callable[..., GPSA], **config: Any) -> GPSA:
    torch.manual_seed(0)
    return open_gates(GPSA(6, 4, KERNELS[name], config=RecastConfig(**{"gate": "linear"} | config), dtype=dtype))


CONFIGS = [
    {"content_heads": 1, "gaussian_heads": "none"},
    {"content_heads": 1, "gaussian_heads": "none", "project_values": False},
    {"content_heads": [0], "gaussian_heads": "none"},
    {"content_heads": 3, "gaussian_heads": 2},
    {"content_heads": 2, "content": "linear", "gaussian_heads": "none", "head_dim": 3},
    {"content_heads": 2, "gate": "sigmoid"},
]


@pytest.mark.parametrize(
    ("size", "short", "layout"),
    [
        ((7, 6), backends.READ_AGAIN, torch.contiguous_format),
        ((4, 3), 0, torch.contiguous_format),
        ((7, 6), backends.READ_AGAIN, torch.channels_last),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "1×1"])
def test_every_form_is_the_reference_forward_and_backward(
    name: str,
    config: Any,
    dtype: Any,
    size: Any,
    short: int,
    layout: Any,
    open_gates: Any,
    error_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "READ_AGAIN", short)
    layer = made(name, dtype, open_gates, **config).train()
    x = torch.randn(2, 6, *size, dtype=dtype).to(memory_format=layout).requires_grad_()
    inputs = [x, *(p for p in layer.parameters() if p.requires_grad)]

    def run(backend: str) -> list[torch.Tensor]:
        y = getattr(functional, backend)(x, layer.weights())
        return [y, *torch.autograd.grad(y.square().sum(), inputs)]

    expected = run("reference")
    assert all(bool(gradient.any()) for gradient in expected)
    for backend in ("dense", "split", "merged", "sdpa"):
        for ours, theirs in zip(run(backend), expected, strict=True):
            assert error_of(ours, theirs) < (1e-10 if dtype == torch.float64 else 5e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_is_the_full_layer_pruned(config: dict[str, Any], open_gates: Callable[..., GPSA]) -> None:
    layer = made("3×3", torch.float64, open_gates, **PAPERS_LAYER | config)
    full = {
        name: value for name, value in config.items() if name not in ("content_heads", "gaussian_heads", "head_dim")
    }
    pruned = made("3×3", torch.float64, open_gates, **PAPERS_LAYER | full, head_dim=layer.head_dim)
    pruned.prune_(layer.gaussian_heads, layer.content_heads)
    assert {n: p.shape for n, p in pruned.named_parameters()} == {n: p.shape for n, p in layer.named_parameters()}
    pruned.load_state_dict(layer.state_dict())
    x = torch.randn(2, 6, 7, 6, dtype=torch.float64)
    assert torch.equal(layer(x), pruned(x))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_network_keeps_its_form(config: dict[str, Any], tmp_path: Path, error_of: Callable[..., float]) -> None:
    """Exact at the start; trained, saved, loaded and folded as it is; what is planned is what it costs."""
    parent = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU()).eval()
    x, path = torch.randn(4, 3, 16, 16), tmp_path / "child.safetensors"
    child = recast_copy(parent, x, RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config), where="2")
    full = {name: value for name, value in config.items() if name in ("gate", "content")}
    full_plan = recast.plan(parent, x, RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | full), where="2")
    assert child.recast_plan.after.macs < full_plan.after.macs
    assert child.recast_plan.after.parameters == sum(p.numel() for p in child.parameters())
    if config.get("gate") != "sigmoid":
        assert recast.verify(parent, child, x).bitwise
    recast.wake_(child, x)
    optimizer = torch.optim.AdamW(recast.param_groups(child.train(), lr=1e-2, gate_lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        child(x).square().mean((2, 3)).sum().backward()
        optimizer.step()
    expected = child.eval()(x)
    assert error_of(expected, parent(x)) > 1e-3
    recast.save(child, path)
    assert torch.equal(recast.load(path, parent).eval()(x), expected)
    recast.fold_(child)
    assert error_of(child(x), expected) < 1e-5
    recast.save(child, path)
    assert error_of(recast.load(path, parent).eval()(x), expected) < 1e-5
