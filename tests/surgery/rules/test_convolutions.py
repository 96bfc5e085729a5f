"""The rules against the modules they read: the same bits, gradients and flags; and the three backends."""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast.layers.functional.streaming import stream
from recast.run.config import RecastConfig

KINDS = ("Conv2dSame", "ConvTranspose2d", "ScaledStdConv2d", "ScaledStdConv2dSame", "StdConv2d", "StdConv2dSame")
BACKENDS = ("split", "merged", "dense", "reference")
NUM_GEOMETRIES = max(24, int(os.environ.get("RECAST_NUM_GEOMETRIES", "500")) // 20)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def slope_of(y: Tensor) -> Tensor:
    """A different weight for every output, so that no gradient cancels."""
    return torch.linspace(0, 9, y.numel(), dtype=y.dtype).cos().view_as(y)


def gradients(y: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((y * slope_of(y)).sum(), tensors, retain_graph=True))


# --- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_starts_as_the_module(
    kind: str, dtype: torch.dtype, case_of: Any, kernel_of: Any, layer_of: Any, error_of: Any
) -> None:
    """Forward and the gradients of input, weight, gain and bias; `split` gives the module's own bits.

    The layer's kernel is compared with one written out from the formulas, and its gradient is carried back through
    those formulas to what the module trains.
    """
    for seed in range(NUM_GEOMETRIES):
        module, x, text = case_of(kind, seed, dtype)
        layer = layer_of(module)
        kernel, x = kernel_of(module), x.requires_grad_()
        assert error_of(layer.weight, kernel) <= TOLERANCE[dtype], text
        y = module(x)
        trained = dict(module.named_parameters())
        expected = dict(zip(["input", *trained], gradients(y, [x, *trained.values()]), strict=True))
        for backend in BACKENDS:
            layer.backend = backend
            z = layer(x)
            assert error_of(z, y) <= TOLERANCE[dtype], f"{backend}, {text}"
            if backend == "split":
                assert torch.equal(z, y), text
            of_x, of_kernel, *of_bias = gradients(z, [x, layer.weight] + ([] if layer.bias is None else [layer.bias]))
            made = {name: value for name, value in trained.items() if name != "bias"}
            carried = torch.autograd.grad(kernel, list(made.values()), of_kernel, retain_graph=True)
            measured = {"input": of_x, **dict(zip(made, carried, strict=True)), **dict(zip(["bias"], of_bias))}  # noqa: B905
            assert measured.keys() == expected.keys()
            # standardisation divides by σ, and passes on nothing of a gradient along its result: differences are left
            spread = float(module.weight.detach().flatten(1).std(1).min()) if hasattr(module, "eps") else 1.0
            least = float(of_kernel.abs().max()) / spread
            for name, value in measured.items():
                scale = max(float(expected[name].abs().max()), least if name in made else 0)
                assert float((value - expected[name]).abs().max()) <= TOLERANCE[dtype] * scale, (
                    f"{backend} {name} {text}"
                )


@pytest.mark.parametrize("kind", ["ConvTranspose2d", "Conv2dSame", "ScaledStdConv2dSame"])
@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
@pytest.mark.parametrize("attend_padding", [False, True])
def test_backends_agree_with_random_open_gates(
    kind: str,
    gate: Any,
    attend_padding: bool,
    case_of: Any,
    layer_of: Any,
    open_gates: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and every parameter's gradient, kept parametrisations among them."""
    config = RecastConfig(gate=gate, attend_padding=attend_padding, keep_parametrization=True)
    for seed in range(100, 100 + NUM_GEOMETRIES // 2):
        # by turns: everything at once, and chunks of a few queries
        monkeypatch.setitem(stream.MAP_NUMBERS, "cpu", 60 if seed % 2 else 2**20)
        module, x, text = case_of(kind, seed)
        layer = open_gates(layer_of(module, config), seed)
        parameters, outputs = dict(layer.named_parameters()), {}
        for backend in BACKENDS:
            layer.backend = backend  # type: ignore[assignment]
            y = layer(x.requires_grad_())
            values = gradients(y, [x, *parameters.values()])
            outputs[backend] = dict(zip(["output", "input", *parameters], [y.detach(), *values], strict=True))
        expected = outputs["reference"]
        steepest = max(float(value.abs().max()) for value in expected.values())
        assert all(bool(expected[name].any()) for name in parameters if layer.num_heads > 1 and name == "gamma"), text
        for backend, name in itertools.product(("split", "dense", "merged"), expected):
            # a gradient that is exactly zero comes out as a rounding error
            scale = max(float(expected[name].abs().max()), 1e-5 * steepest)
            error = float((outputs[backend][name] - expected[name]).abs().max()) / scale
            assert error <= 1e-10, f"{backend} {name} {error:.1e}, {text}"


# --- what is carried over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Conv2d", *KINDS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_flags_and_dtype_are_carried_over(
    kind: str, dtype: torch.dtype, training: bool, case_of: Any, layer_of: Any, error_of: Any
) -> None:
    module = case_of(kind, 1, dtype).module
    x = torch.randn(2, module.in_channels, 9, 8, dtype=dtype)
    for frozen in ("", "weight gain", "bias", "weight gain bias"):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen.split())
        module.train(training)
        before = copy.deepcopy(module.state_dict())
        layer = layer_of(module)
        assert layer.training == module.training == training
        assert {p.dtype for p in layer.parameters()} == {dtype}
        assert layer.weight.requires_grad == ("weight" not in frozen)
        assert (layer.bias is None) == (module.bias is None)
        assert layer.bias is None or layer.bias.requires_grad == ("bias" not in frozen)
        assert layer.gamma.requires_grad
        y, expected = layer(x), module(x)
        assert y.dtype == dtype
        if layer.chosen_backend() == "split":
            assert torch.equal(y, expected)
        else:  # the form that is cheapest to train agrees to rounding
            assert training
            assert error_of(y, expected) <= TOLERANCE.get(dtype, torch.finfo(dtype).eps)
        assert torch.equal(layer.eval()(x), expected)
        with torch.no_grad():  # nothing is shared: training the child leaves the parent alone
            for parameter in layer.parameters():
                parameter.add_(1)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", ["Conv2d", *KINDS])
def test_memory_format_is_carried_over(kind: str, layer_of: Any) -> None:
    import timm.layers

    build = getattr(nn, kind, None) or getattr(timm.layers, kind)
    module = build(4, 6, 3, stride=2).to(memory_format=torch.channels_last)
    layer = layer_of(module)
    if "Std" not in kind:  # a standardised kernel is computed, in another format than its weight
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    for x in (torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8).to(memory_format=torch.channels_last)):
        expected, trained, to_train = module(x), layer.train()(x), layer.chosen_backend()
        evaluated = layer.eval()(x)
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(trained, expected) or to_train != "split"
        assert torch.equal(evaluated, expected)
        assert trained.stride() == evaluated.stride() == expected.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_takes_the_layer_where_it_takes_the_module(kind: str, case_of: Any, layer_of: Any) -> None:
    for seed, keep in itertools.product(range(4), (False, True)):
        module, x, text = case_of(kind, seed, torch.float32)
        layer = layer_of(module, RecastConfig(keep_parametrization=keep)).eval()
        layer.refresh_gates()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x), module(x)), text
            assert layer(x).dtype == torch.bfloat16
