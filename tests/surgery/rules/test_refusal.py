"""What is refused, with the reason a user reads: by `refusal`, and by `plan` on a small model."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import torchvision
from layer_helpers import PAPERS, InCode
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import recast
from recast.errors import RecastError

X = torch.zeros(2, 3, 8, 8)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation"),
]


class Doubled(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 3, padding=1)


def changed(change: Callable[[nn.Conv2d], Any]) -> nn.Conv2d:
    module = conv()
    change(module)
    return module


def quantised() -> nn.Module:
    import torch.ao.quantization as ao

    torch.backends.quantized.engine = "x86" if "x86" in torch.backends.quantized.supported_engines else "qnnpack"
    stub = nn.Sequential(ao.QuantStub(), conv(), ao.DeQuantStub()).eval()
    stub.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    ao.prepare(stub, inplace=True)
    stub(torch.randn(2, 4, 8, 8))
    return ao.convert(stub)


def trained_for_quantisation() -> nn.Module:
    from torch.ao.nn import qat
    from torch.ao.quantization import get_default_qat_qconfig

    return qat.Conv2d(4, 4, 3, padding=1, qconfig=get_default_qat_qconfig("x86"))


HOOKS: dict[str, Callable[[nn.Conv2d], Any]] = {
    "forward": lambda module: module.register_forward_hook(lambda *_: None),
    "forward with names": lambda module: module.register_forward_hook(lambda *_, **__: None, with_kwargs=True),
    "pre": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "backward": lambda module: module.register_full_backward_hook(lambda *_: None),
    "backward pre": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
}
OLDER: dict[str, Callable[[nn.Conv2d], Any]] = {
    "prune.remove": lambda module: prune.random_unstructured(module, "weight", 0.5),
    "parametrizations.weight_norm": torch.nn.utils.weight_norm,
    "parametrizations.spectral_norm": torch.nn.utils.spectral_norm,
}
"""What to use instead of it, and a hook that computes the weight."""


Builder = Callable[[], nn.Module]
Use = Callable[[Any, Tensor], Tensor] | None
NO_RULE = r"no rule for {} \(rules exist for Conv2d, "
UP: Builder = lambda: nn.ConvTranspose2d(4, 4, 3, stride=2)  # noqa: E731
TWO_INPUTS = r"called with more than its input \(output_size\?\)"
REFUSED: dict[str, tuple[Builder, Use, str]] = {
    "conditional": (
        lambda: timm.layers.CondConv2d(4, 4, 3, num_experts=2),
        lambda module, x: module(x, torch.ones(len(x), 2)),
        NO_RULE.format("CondConv2d"),
    ),
    "deformable": (
        lambda: torchvision.ops.DeformConv2d(4, 4, 3, padding=1),
        lambda module, x: module(x, torch.zeros(len(x), 18, 8, 8)),
        NO_RULE.format("DeformConv2d"),
    ),
    "1-D": (lambda: nn.Conv1d(4, 4, 3), lambda module, x: module(x.flatten(2)), "no rule for Conv1d, which is 1-d"),
    "3-D": (lambda: nn.Conv3d(4, 4, (1, 3, 3)), lambda module, x: module(x[:, :, None]), "no rule for Conv3d.*3-d"),
    "own forward": (lambda: Doubled(4, 4, 3), None, NO_RULE.format("Doubled")),
    # trainers of seamless textures replace `_conv_forward` of an instance
    **{
        f"instance {n}": (lambda n=n: changed(lambda m: setattr(m, n, getattr(m, n))), None, f"Conv2d has a {n} of its")
        for n in ("forward", "_conv_forward")
    },
    "quantised": (quantised, None, "Conv2d is quantised: recast the float model, then quantise it"),
    "quantisation aware": (trained_for_quantisation, None, "quantis"),
    "scripted": (lambda: torch.jit.script(conv()), None, "is TorchScript: recast the original nn.Module"),
    "output_size": (UP, lambda module, x: module(x, output_size=[18, 18]), TWO_INPUTS),
    "output_size by place": (UP, lambda module, x: module(x, [18, 18]), TWO_INPUTS),
    "weight read": (conv, lambda module, x: F.conv2d(x, module.weight), "not called by the example .* weight is read"),
    "one image": (conv, lambda module, x: module(x[0])[None], r"got \(4, 8, 8\), expected \(batch, C, H, W\)"),
    "cropped beyond its kernel": (
        lambda: nn.ConvTranspose2d(4, 4, (3, 1), stride=3, padding=(0, 1)),
        None,
        "exceeds the reach of its kernel",
    ),
    "complex": (
        lambda: nn.Conv2d(4, 4, 3, dtype=torch.complex64),
        lambda module, x: module(x + 0j).abs(),
        "complex weights",
    ),
    **{f"{name} hook": (lambda f=f: changed(f), None, "Conv2d carries hooks.* lose$") for name, f in HOOKS.items()},
    **{
        f"instead of {name}": (lambda f=f: changed(f), None, rf"Conv2d carries hooks.* torch\.nn\.utils\.{name}")
        for name, f in OLDER.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_leaves_what_it_cannot_take_and_says_why(name: str) -> None:
    build, use, expected = REFUSED[name]
    call = use or (lambda module, x: module(x))
    stem = nn.Conv2d(3, 4, 3, padding=1)
    model = InCode(lambda m, x: call(m.conv, m.stem(x)).flatten(2).mean(2), stem=stem, conv=build())
    planned = recast.plan(model, X, PAPERS, where="all")
    assert [step.name for step in planned.steps] == ["stem"]
    (layer,) = planned.left
    assert layer.name.startswith("conv")
    assert re.search(expected, layer.reason), layer.reason
    with pytest.raises(RecastError, match=f"{layer.name} cannot be recast: .*{expected}"):
        recast.plan(model, X, PAPERS, where=[layer.name])
    recast.recast_(model, planned)  # what is taken beside it does not disturb it


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)], ids=["script", "trace"])
@pytest.mark.parametrize("where", ["last_stage", "all", "stage:0"])
def test_a_torchscript_model_is_refused(make: Callable[..., nn.Module], where: str) -> None:
    model = make(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)))
    for network in (model, InCode(lambda m, x: m.inside(x), inside=model)):
        with pytest.raises(RecastError, match=r"Module is TorchScript: recast the original nn\.Module"):
            recast.plan(network, X, where=where)


SHARED = nn.PReLU()  # a parametrisation with a parameter
TIES = {
    "weight": lambda a, b: setattr(b, "weight", a.weight),
    "bias": lambda a, b: setattr(b, "bias", a.bias),
    "normed weight": lambda a, b: setattr(
        parametrizations.weight_norm(b).parametrizations.weight,
        "original1",
        parametrizations.weight_norm(a).parametrizations.weight.original1,
    ),
    "parametrisation": lambda a, b: [parametrize.register_parametrization(m, "weight", SHARED) for m in (a, b)],
}


@pytest.mark.parametrize("name", TIES)
def test_what_is_shared_with_another_module_is_left(name: str) -> None:
    """A copy in the new layer would stop following the other one in training."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), conv(), conv())
    TIES[name](model[1], model[2])
    planned = recast.plan(model, X, PAPERS, where="all")
    assert [step.name for step in planned.steps] == ["0"]
    for layer, name, partner in zip(planned.left, "12", "21", strict=True):
        assert layer.name == name
        assert re.search(f"shares.* with {partner}", layer.reason)


def test_a_kernel_that_the_model_holds_as_well_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), conv())
    model.register_parameter("kernel", model[1].weight)
    (layer,) = recast.plan(model, X, PAPERS, where="all").left
    assert layer.reason.startswith("shares its weight with Sequential")


class Conv2d(nn.Conv2d):
    """Called as torch's, as detectron2 and mmcv call theirs."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Conv2d(3, 4, 3), X, rf"no rule for {re.escape(__name__)}\.Conv2d.*forward"),
        (nn.Conv1d(3, 4, 3), torch.zeros(2, 3, 8), "1-d.*2-d"),
        (nn.Conv3d(3, 4, 3), torch.zeros(2, 3, 8, 8, 8), "3-d.*2-d"),
        (nn.ConvTranspose1d(3, 4, 3), torch.zeros(2, 3, 8), "1-d.*2-d"),
    ],
)
@pytest.mark.parametrize("where", ["last_stage", "all"])
def test_networks_that_no_rule_takes_say_why(model: nn.Module, x: Tensor, message: str, where: str) -> None:
    with pytest.raises(RecastError, match=message):
        recast.plan(nn.Sequential(model, nn.Flatten()), x, PAPERS, where=where)
