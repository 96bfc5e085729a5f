"""Part `exactness`: every kind of layer in every precision and backend against fp64 on the CPU; networks.

layer    output and all gradients with open gates, against `reference` in fp64 on the CPU, relative to each tensor's
         largest number
closed   heads at their start, against the module itself on the same device. With TF32 off and deterministic
         algorithms both call the same convolution: the note says if the bits are equal; a difference of up to CUDNN is
         cudnn's rounding
random   random convolutions of tests/conftest.py in fp64
network  planned, recast and verified on the device (`exactness.compare`), with a control that must be large
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from conftest import _open_gates, _random_case
from exactness import compare
from part import Row, Unit, precision, row, start
from torch import Tensor, nn

import recast.papers.networks  # noqa: F401  registers them
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.functional.relative_bias import biased_reference
from recast.models.build import build
from recast.models.config import ModelConfig
from recast.surgery.compare import relative_error
from recast.surgery.exactness import TOLERANCE
from recast.surgery.rules import convert
from recast.surgery.scales import randomize_scales_

SIZE = (2, 32, 17, 14)
CUDNN = 1e-6
CONTROL = 1e-2
"""Two swapped taps must change the logits by more than TOLERANCE / CONTROL."""


@dataclass(frozen=True)
class Mode:
    """Precision and memory format of a layer, and the relative error of its output that passes."""

    limit: float
    precision: str = "ieee"
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format
    compiled: bool = False


MODES = {
    "fp64": Mode(1e-10, dtype=torch.float64),
    "fp32": Mode(1e-5),
    "channels_last": Mode(1e-5, memory_format=torch.channels_last),
    "tf32": Mode(5e-3, "tf32"),
    "fp16": Mode(5e-3, autocast=torch.float16),
    "bf16": Mode(4e-2, autocast=torch.bfloat16),
    "bf16 channels_last": Mode(4e-2, autocast=torch.bfloat16, memory_format=torch.channels_last),
    "compiled": Mode(1e-5, compiled=True),
}
"""TF32 and fp16 keep 11 bits of a number, bf16 8: one rounding costs 5e-4 and 4e-3."""
GRADIENTS = 5
"""Factor on the limit for gradients: those of α, Δ and the gates are sums over all pixels that mostly cancel."""
BACKENDS = ("split", "merged", "dense", "sdpa", "auto")
OF_LAYER = {"C-MHSA": ("biased",), **dict.fromkeys(("beside", "beside, strided"), ("split", "sdpa", "auto"))}
NINE = RecastConfig("linear", **PAPERS_LAYER)
LAYERS: dict[str, tuple[Callable[[], nn.Module], RecastConfig]] = {
    "3x3": (lambda: nn.Conv2d(32, 48, 3, padding=1), NINE),
    "one head": (lambda: nn.Conv2d(32, 48, 3, padding=1), RecastConfig("linear", content_heads=1)),
    "beside": (lambda: nn.Conv2d(32, 48, 3, padding=1), RecastConfig()),
    "beside, strided": (lambda: nn.Conv2d(32, 48, 3, stride=2, groups=4), RecastConfig()),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), NINE),
    "strided": (lambda: nn.Conv2d(32, 48, 3, stride=2, padding=1), NINE),
    "dilated": (lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2), NINE),
    "grouped": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4, bias=False), NINE),
    "transposed": (lambda: nn.ConvTranspose2d(32, 24, 4, stride=2, padding=1), NINE),
    "even kernel": (lambda: nn.Conv2d(32, 32, (2, 4), padding="same"), NINE),
    "sigmoid": (lambda: nn.Conv2d(32, 48, 3, padding=1), RecastConfig(gate="sigmoid")),
    "linear content": (
        lambda: nn.Conv2d(32, 48, 3, padding=1),
        RecastConfig("linear", content="linear", **PAPERS_LAYER),
    ),
    "attended padding": (
        lambda: nn.Conv2d(32, 48, 3, padding=1),
        RecastConfig("linear", attend_padding=True, **PAPERS_LAYER),
    ),
    "C-MHSA": (lambda: nn.Conv2d(32, 48, 3, padding=1), RecastConfig(gate="bias", bias_init=4.0)),
}
COMPILED = ("3x3", "beside", "depthwise", "linear content", "C-MHSA")
NETWORKS = {"cifar_resnet20": (64, 32), "resnet18": (8, 224), "patchconvnet_s20": (4, 224)}
"""Network → images of a batch, their side."""
TOY_LAYERS, TOY_MODES = ("3x3", "beside", "C-MHSA"), ("fp32", "bf16")


def tensor_error(a: Tensor, b: Tensor) -> float:
    """Return max|a − b| / max|b| over all entries: a gradient has no channels to be measured separately."""
    return relative_error(a.flatten(), b.flatten())


def module_of(name: str) -> nn.Module:
    """Return the convolution of a case, the same in every call."""
    torch.manual_seed(0)
    return LAYERS[name][0]()


@torch.no_grad()
def open_layer(name: str) -> RecastLayer:
    """Return its layer with all trained tensors moved, and logits of about 1: sharper ones are decided by chance."""
    layer = convert(module_of(name), LAYERS[name][1])
    if isinstance(layer, CMHSA):
        layer.set_size_(*SIZE[2:])
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    elif isinstance(layer, AttentionBeside):
        for parameter in (layer.query, layer.key, layer.gamma):
            parameter.normal_()
    else:
        _open_gates(layer)
    for projection in (layer.query, layer.key):
        projection.mul_(layer.in_channels**-0.5)
    return layer


def prepared(layer: nn.Module, mode: Mode, device: torch.device) -> tuple[nn.Module, Tensor]:
    """Return a copy of the layer and the case's images in the mode's precision and memory format."""
    torch.manual_seed(1)
    x = torch.randn(SIZE).to(device, mode.dtype, memory_format=mode.memory_format)
    return copy.deepcopy(layer).to(x, memory_format=mode.memory_format), x  # type: ignore[call-overload]


def results(run: Callable[[Tensor], Tensor], x: Tensor, inputs: dict[str, Tensor], mode: Mode) -> dict[str, Tensor]:
    """Return the output and the gradients of x and `inputs`, on the CPU in fp64."""
    x = x.detach().requires_grad_()
    with precision(mode.precision):
        with torch.autocast(x.device.type, mode.autocast, enabled=mode.autocast is not None):
            y = run(x)
        slope = torch.linspace(0, 9, y.numel(), dtype=torch.float64).cos().view(y.shape)
        loss = (y * slope.to(y.device, torch.promote_types(y.dtype, torch.float32))).sum()
        gradients = torch.autograd.grad(loss, [x, *inputs.values()])
    tensors = {"output": y, "input": gradients[0], **dict(zip(inputs, gradients[1:], strict=True))}
    return {name: tensor.detach().cpu().double() for name, tensor in tensors.items()}


def parameters(layer: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not empty."""
    return {name: parameter for name, parameter in layer.named_parameters() if parameter.numel()}


@cache
def expected(name: str) -> dict[str, Tensor]:
    """Return the results of the definition in fp64 on the CPU."""
    mode = MODES["fp64"]
    layer, x = prepared(open_layer(name), mode, torch.device("cpu"))
    if isinstance(layer, CMHSA):
        return results(lambda x: biased_reference(x, layer.weights(*SIZE[2:])), x, parameters(layer), mode)
    layer.backend = "reference"  # type: ignore[assignment]
    return results(layer, x, parameters(layer), mode)


def errors(measured: dict[str, Tensor], truth: dict[str, Tensor], arm: str, limit: float) -> list[Row]:
    """Return the error of the output and the largest of the gradients."""
    gradients = {name: tensor_error(value, truth[name]) for name, value in measured.items()}
    output = gradients.pop("output")
    worst = max(gradients, key=gradients.__getitem__)
    gradient = row(arm, "gradient", gradients[worst], GRADIENTS * limit, f"of {worst}")
    return [row(arm, "output", output, limit), gradient]


def check_layer(name: str, mode: Mode, backend: str, device: torch.device) -> list[Row]:
    """Compare a layer with open gates with the definition."""
    layer, x = prepared(open_layer(name), mode, device)
    if not isinstance(layer, CMHSA):
        layer.backend = backend  # type: ignore[assignment]
    if mode.compiled:
        torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, dynamic=False) if mode.compiled else layer
    return errors(results(run, x, parameters(layer), mode), expected(name), backend, mode.limit)


def check_closed(name: str, mode: Mode, device: torch.device) -> list[Row]:
    """Compare a closed layer with its module: in eval and in training by `split`."""
    module, x = prepared(module_of(name), mode, device)
    layer = convert(module, LAYERS[name][1]).eval()
    limit = mode.limit if mode.autocast or mode.precision == "tf32" else CUDNN
    autocast = torch.autocast(x.device.type, mode.autocast, enabled=mode.autocast is not None)
    with torch.no_grad(), precision(mode.precision), autocast:
        y, truth = layer(x), module(x)
    note = "bitwise" if torch.equal(y, truth) else "not bitwise"
    rows = [row("eval", "output", tensor_error(y.double(), truth.double()), limit, note)]
    layer.train().backend = "split"
    bias = {} if layer.bias is None else {"bias": layer.bias}
    measured, reference = (results(m, x, {k: m.bias for k in bias}, mode) for m in (layer, module))
    note = "bitwise" if torch.equal(measured["output"], reference["output"]) else "not bitwise"
    output, gradient = errors(measured, reference, "training", limit)
    return [*rows, {**output, "note": note}, gradient]


def check_random(seeds: range, backend: str, device: torch.device) -> list[Row]:
    """Compare random geometries of `nn.Conv2d` with the definition, in fp64."""
    mode, worst, text = MODES["fp64"], -1.0, ""
    for seed in seeds:
        conv, x, case = _random_case(seed)
        layer = _open_gates(convert(conv, NINE.replace(backend="reference")), seed)
        truth = results(layer, x, parameters(layer), mode)
        layer.to(device).backend = backend  # type: ignore[assignment]
        measured = results(layer, x.to(device), parameters(layer), mode)
        error = max(tensor_error(value, truth[name]) for name, value in measured.items())
        if error > worst:
            worst, text = error, case
    return [row(backend, "output and gradients", worst, mode.limit, text)]


def check_network(name: str, images: int, side: int, device: torch.device) -> list[Row]:
    """Verify a recast network on the device; swapped taps must change it."""
    torch.manual_seed(0)
    batch = torch.randn(images, 3, side, side, device=device)
    parent = randomize_scales_(build(ModelConfig(name))).eval().to(device)
    rows = []
    with precision("ieee"):
        for layers, form, exactness, control in compare(parent, [batch], "last_stage", dict.fromkeys(BACKENDS[:-1], 1)):
            rows.append(row(form, "logits", exactness.max_relative_error, TOLERANCE, f"{layers} layers; {exactness}"))
            rows.append(row(form, "images with another argmax", exactness.differing, 0))
            rows.append(row(form, "tolerance over the control's error", TOLERANCE / max(control, 1e-30), CONTROL))
    return rows


def units(device: torch.device, toy: bool) -> Iterator[Unit]:
    """Yield all units, the longest last."""
    layers = TOY_LAYERS if toy else tuple(LAYERS)
    for name in layers:
        for kind in TOY_MODES if toy else MODES:
            if kind == "compiled":
                continue
            for backend in OF_LAYER.get(name, BACKENDS[: 2 if toy else None]):
                yield f"layer/{name}/{kind}/{backend}", partial(check_layer, name, MODES[kind], backend, device)
            if name not in ("C-MHSA", "sigmoid") and kind != "fp16":  # these start near the convolution
                yield f"closed/{name}/{kind}", partial(check_closed, name, MODES[kind], device)
    for backend in BACKENDS[: 1 if toy else None]:
        for seeds in [range(3)] if toy else [range(at, at + 20) for at in range(0, 100, 20)]:
            yield f"random/{seeds.start}-{seeds.stop - 1}/{backend}", partial(check_random, seeds, backend, device)
    for name, (images, side) in list(NETWORKS.items())[: 1 if toy else None]:
        yield f"network/{name}", partial(check_network, name, 4 if toy else images, side, device)
    for name in () if toy else COMPILED:
        backend = "biased" if name == "C-MHSA" else "auto"
        yield f"layer/{name}/compiled", partial(check_layer, name, MODES["compiled"], backend, device)


if __name__ == "__main__":
    sys.exit(start(units))
