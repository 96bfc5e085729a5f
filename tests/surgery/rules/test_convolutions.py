"""The rules against the modules they read, there and back: the same bits, gradients and flags, in every backend."""

import copy
import itertools
import os
import random
from typing import Any

import pytest
import timm.layers
import torch
from layer_helpers import PAPERS, outputs_and_gradients, recast_copy
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import recast
from recast.layers.config import PAPERS_LAYER, RecastConfig
from recast.layers.functional import backends, long_maps, operands
from recast.layers.gpsa import GPSA
from recast.surgery import rules
from recast.surgery.rules import convert, find_rule, recasts, refusal

KINDS = "Conv2d Conv2dSame ConvTranspose2d ScaledStdConv2d ScaledStdConv2dSame StdConv2d StdConv2dSame".split()
CLASSES = [getattr(nn, kind, None) or getattr(timm.layers, kind) for kind in KINDS]
BACKENDS = ("split", "merged", "sdpa", "dense", "reference")
NUM_GEOMETRIES = int(os.environ.get("RECAST_NUM_GEOMETRIES", "500" if os.environ.get("RECAST_SLOW") else "100"))
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_starts_as_the_module(kind: str, dtype: torch.dtype, case_of: Any, kernel_of: Any, error_of: Any) -> None:
    """Forward and the gradients of input, weight, gain and bias; `split` gives the module's own bits.

    The layer's kernel is compared with one written out from the formulas, and its gradient is carried back through
    those formulas to what the module trains.
    """
    first = NUM_GEOMETRIES * (dtype == torch.float32)
    for seed in range(first, first + NUM_GEOMETRIES // (2 if kind == "Conv2d" else 10)):
        module, x, text = case_of(kind, seed, dtype)
        layer = convert(module, PAPERS)
        kernel = kernel_of(module)
        assert error_of(layer.weight, kernel) <= TOLERANCE[dtype], text
        expected = outputs_and_gradients(module, x)
        made = {name: value for name, value in module.named_parameters() if name != "bias"}
        # standardisation divides by σ, and passes on nothing of a gradient along its result: differences are left
        spread = float(module.weight.detach().flatten(1).std(1).min()) if hasattr(module, "eps") else 1.0
        for backend in BACKENDS:
            measured = outputs_and_gradients(layer, x, backend)
            assert error_of(measured["output"], expected["output"]) <= TOLERANCE[dtype], f"{backend}, {text}"
            if backend == "split":
                assert torch.equal(measured["output"], expected["output"]), text
            of_kernel = measured["weight"]
            carried = torch.autograd.grad(kernel, list(made.values()), of_kernel, retain_graph=True)
            measured |= dict(zip(made, carried, strict=True))
            least = float(of_kernel.abs().max()) / spread
            for name, value in expected.items():
                scale = max(float(value.abs().max()), least if name in made else 0)
                error = float((measured[name] - value).abs().max())
                assert error <= TOLERANCE[dtype] * scale, f"{backend} {name} {text}"


def size_of_terms(layer: GPSA, x: Tensor) -> float:
    """Largest Σ|terms| of an output pixel: what rounding errors are relative to where the terms cancel."""
    w, mix = layer.weights(), layer.attention(x).mix.abs()
    values = layer.geometry.pad(operands.project_values(x, w.value, layer.groups)).abs().flatten(2)
    gathered = torch.einsum("bcm,bhnm->bchn", values, mix.expand(len(x), -1, -1, -1))[..., None, :]
    return float(operands.project_out(gathered, w.weight.flatten(2).abs(), None, layer.groups).detach().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
@pytest.mark.parametrize("content", ["softmax", "linear"])
@pytest.mark.parametrize("attend_padding", [False, True])
def test_backends_agree_with_random_open_gates(
    dtype: torch.dtype,
    gate: Any,
    content: Any,
    attend_padding: bool,
    case_of: Any,
    open_gates: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output and every gradient: all kinds of convolution, maps pruned or not, W_val folded or not, chunks of any size.

    fp64 relative to each tensor; fp32 relative to the terms where they cancel, in outputs of a few numbers.
    """
    config = RecastConfig(gate=gate, content=content, attend_padding=attend_padding, **PAPERS_LAYER)
    options = (dtype == torch.float32, gate == "sigmoid", content == "linear", attend_padding)
    first = 1000 * sum(2**i for i, chosen in enumerate(options) if chosen)
    for seed in range(first, first + max(10, NUM_GEOMETRIES // 12)):
        rng = random.Random(seed)
        # maps in one part, a few queries at a time, some images; short ones written out
        monkeypatch.setattr(long_maps, "MAP_NUMBERS", rng.choice((2**20, 300, 60, 7, 1)))
        monkeypatch.setattr(long_maps, "LARGEST_EXPONENT", rng.choice((40.0, 0.0)))
        monkeypatch.setattr(backends, "KEYS", rng.choice((0, 10**6)))
        kind = rng.choice(("Conv2d", "Conv2d", "Conv2dSame", "ConvTranspose2d", "ScaledStdConv2dSame"))
        module, x, text = case_of(kind, seed, dtype)
        layer = open_gates(convert(module, config), seed)
        if rng.random() < 0.4:
            kept = [[h for h in range(layer.num_heads) if rng.random() < 0.5] for _ in range(2)]
            layer.prune_(range(layer.num_heads) if gate == "sigmoid" else kept[0], kept[1])
        if kind == "Conv2d" and rng.random() < 0.3:
            layer.fold_value_()
        expected = outputs_and_gradients(layer, x, "reference")
        steepest = max(float(g.abs().max()) for name, g in expected.items() if name != "output")
        # a gradient that is exactly zero comes out as a rounding error
        least = 1.0 if dtype == torch.float32 else 1e-5
        smallest = dict.fromkeys(expected, least * steepest) | {"output": min(least, 0.1) * size_of_terms(layer, x)}
        for backend in ("dense", "split", "merged", "plain", "sdpa"):
            measured = outputs_and_gradients(layer, x, backend)
            assert measured.keys() == expected.keys()
            for name, value in measured.items():
                scale = max(float(expected[name].abs().max()), smallest[name])
                error = float((value - expected[name]).abs().max()) / scale
                assert error <= TOLERANCE[dtype], f"{backend} {name} {error:.1e}, {text}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
def test_flags_and_dtype_are_carried_over(
    kind: str, dtype: torch.dtype, training: bool, case_of: Any, error_of: Any
) -> None:
    module, _, _ = case_of(kind, 1, dtype)
    x = torch.randn(2, module.in_channels, 9, 8, dtype=dtype)
    for frozen in ("", "weight gain", "bias", "weight gain bias"):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen.split())
        module.train(training)
        before = copy.deepcopy(module.state_dict())
        layer = convert(module, PAPERS)
        assert layer.training == module.training == training
        assert {p.dtype for p in layer.parameters()} == {dtype}
        assert layer.weight.requires_grad == ("weight" not in frozen)
        assert (layer.bias is None) == (module.bias is None)
        assert layer.bias is None or layer.bias.requires_grad == ("bias" not in frozen)
        assert layer.gamma.requires_grad == any(p.requires_grad for p in module.parameters())
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


@pytest.mark.parametrize("kind", CLASSES)
def test_memory_format_is_carried_over(kind: type[nn.Module]) -> None:
    module = kind(4, 6, 3, stride=2).to(memory_format=torch.channels_last)
    layer = convert(module, PAPERS)
    if "Std" not in kind.__name__:  # a standardised kernel is computed, in another format than its weight
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    pixels = torch.randn(2, 4, 9, 8)
    for x, backend in itertools.product((pixels, pixels.to(memory_format=torch.channels_last)), ("auto", "sdpa")):
        layer.backend = backend
        expected, trained, to_train = module(x), layer.train()(x), layer.chosen_backend()
        evaluated = layer.eval()(x)
        torch.testing.assert_close(trained, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(trained, expected) or to_train != "split"
        assert torch.equal(evaluated, expected)
        assert trained.stride() == evaluated.stride() == expected.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_takes_the_layer_where_it_takes_the_module(kind: str, case_of: Any) -> None:
    for seed in range(4):
        module, x, text = case_of(kind, seed, torch.float32)
        layer = convert(module, PAPERS).eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x), module(x)), text
            assert layer(x).dtype == torch.bfloat16


class Scaled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", CLASSES)
def test_subclasses_that_compute_the_same_are_taken(kind: type[nn.Module]) -> None:
    class Named(kind):
        def __init__(self, channels: int) -> None:
            super().__init__(channels, channels, 3, padding=1)

    conv, x = Named(4).eval(), torch.randn(1, 4, 5, 5)
    assert refusal(conv, PAPERS) is None
    assert find_rule(conv)[0] is kind
    assert torch.equal(convert(conv, PAPERS)(x), conv(x))


def test_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact type wins over its bases: a convolution with a forward of its own can be given a rule."""
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @recasts(Scaled)
    def _(conv: Scaled, config: RecastConfig) -> GPSA:
        plain = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, bias=conv.bias is not None)
        return convert(plain, config)

    assert find_rule(Scaled(3, 4, 3))[0] is Scaled
    assert find_rule(nn.Conv2d(3, 4, 3))[0] is nn.Conv2d
    assert find_rule(timm.layers.StdConv2d(3, 4, 3))[0] is timm.layers.StdConv2d


def kind_of_fold(module: Any) -> type[nn.Module]:
    if isinstance(module, nn.ConvTranspose2d):
        return nn.ConvTranspose2d
    follows_input = isinstance(module, timm.layers.Conv2dSame) or getattr(module, "same_pad", False)
    return timm.layers.Conv2dSame if follows_input else nn.Conv2d


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_a_layer_folds_untouched_and_with_its_values_when_its_gates_closed_again(
    kind: str, dtype: Any, tolerance: float, case_of: Any, open_gates: Any
) -> None:
    """Untouched: the same bits. Random W_val and kernel, gates opened, then closed: the layer, to be recast again."""
    for seed in range(10):
        module, x, text = case_of(kind, seed, dtype)
        folded = convert(module, RecastConfig("linear")).fold()
        assert torch.equal(folded(x), module(x)), text
        if isinstance(folded, nn.Sequential):  # a padding layer for other padding at the end than at the start
            folded = folded[1]
        assert type(folded) is kind_of_fold(module), text
        for name in ("stride", "dilation", "groups", "in_channels", "out_channels", "kernel_size"):
            assert getattr(folded, name) == getattr(module, name), f"{name}, {text}"
        if kind == "ConvTranspose2d":
            assert (folded.padding, folded.output_padding) == (module.padding, module.output_padding), text
            assert torch.equal(folded.weight, module.weight), text
        layer = open_gates(convert(module, PAPERS), seed)
        with torch.no_grad():
            layer.weight.normal_()
            assert layer.fold() is layer, text
            opened = layer(x)
            layer.gamma.zero_()
            layer.spread.zero_()
            expected = layer(x)
            folded = layer.fold()
            scale = max(1.0, float(expected.abs().max()))
            assert float((folded(x) - expected).abs().max()) <= tolerance * scale, text
            if not isinstance(folded, nn.Sequential):
                assert torch.equal(convert(folded.eval(), PAPERS)(x), folded(x)), text
        if layer.num_heads > 1:
            assert float((opened - expected).abs().max()) > 1e-3 * scale, text


@pytest.mark.parametrize("fold", [recast.fold_, lambda model: reparameterize_model(model, inplace=True)])
def test_a_network_of_every_class_folds_and_is_loaded_folded(fold: Any, tmp_path: Any) -> None:
    parent = nn.Sequential(
        timm.layers.Conv2dSame(3, 4, 3, 2),
        nn.ConvTranspose2d(4, 4, 3, 2, 1, 1, groups=2),
        timm.layers.ScaledStdConv2d(4, 4, 3),
        timm.layers.StdConv2dSame(4, 4, 2, 2),
        parametrizations.weight_norm(nn.Conv2d(4, 5, 3)),
    ).eval()
    x = torch.randn(2, 3, 14, 11)
    child = recast_copy(parent, x, RecastConfig("linear"), where="all")
    assert all(isinstance(module, GPSA) for module in child)
    fold(child)
    names = [type(module).__name__ for module in child]
    assert names == ["Conv2dSame", "ConvTranspose2d", "Conv2d", "Conv2dSame", "Conv2d"]
    assert torch.equal(child(x), parent(x))
    if fold is recast.fold_:  # the plan says so
        loaded = recast.load(recast.save(child, tmp_path / "folded.safetensors"), parent=parent)
        assert [type(module).__name__ for module in loaded] == names
        assert torch.equal(loaded(x), child(x))
