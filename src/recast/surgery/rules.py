"""Rules of recasting: a rule reads a convolution and returns an attention layer with its weights.

Attention beside a convolution (gate="beside") needs no rule: it takes any module that states its channels, and a rule
only gives the kernel's middle tap. A class without a rule is probed (`probing`): a convolution by what it computes
becomes attention too. Rules never change the module they read; the swap itself is `recast.recast_`. Every rule answers
the same two questions: which `Geometry`, and which kernel the module uses in eval mode. What computes that kernel
(standardisation, weight norm, spectral norm) is replaced by its result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn.modules.utils import _pair
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from recast.errors import RecastError
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.config import BesideGate, LinearGate, RecastConfig
from recast.layers.geometry import Geometry, flip_transpose
from recast.layers.gpsa import GPSA
from recast.modes import FORWARD, hooks_of, in_eval, inherits_forward
from recast.surgery.probing import probed_geometry

Rule = Callable[[nn.Module, RecastConfig], RecastLayer]

_RULES: dict[type[nn.Module], Rule] = {}
REGISTER = "register a rule with recast.surgery.rules.recasts (docs/networks.md)"
EXPECTED = {"weight", "bias", "gain", "parametrizations"}
"""Tensors and modules of a convolution of torch or timm that rules carry over."""
REMEDIES: dict[type, str] = {
    WeightNorm: "use torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "use torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: "call torch.nn.utils.prune.remove first",
}
"""Hooks of torch that compute a weight, and what to do instead."""


def recasts(kind: type[nn.Module]) -> Callable[[Callable[..., RecastLayer]], Callable[..., RecastLayer]]:
    """Register the decorated function as the rule for `kind`: `@recasts(MyConv) def _(conv, config) -> RecastLayer`.

    The layer is GPSA, or CMHSA for gate="bias"; gate="beside" needs no rule. A rule only reads the module, and must
    also work on the meta device, where a plan counts costs. It raises `RecastError` with the reason for a module that
    it cannot convert.
    """

    def register(rule: Callable[..., RecastLayer]) -> Callable[..., RecastLayer]:
        _RULES[kind] = rule
        return rule

    return register


def find_rule(module: nn.Module) -> tuple[type[nn.Module], Rule] | None:
    """Return the rule for a module: its exact type first, then its bases.

    A base's rule holds only for subclasses that compute what the base computes: one that overrides `forward` (a weight
    standardised on the fly, padding that depends on the input) needs a rule of its own.
    """
    base = next((base for base in type(module).__mro__ if base in _RULES), None)
    return (base, _RULES[base]) if base is not None and inherits_forward(type(module), base) else None


def convert(module: nn.Module, config: RecastConfig, probed: nn.Module | None = None) -> RecastLayer:
    """Convert a module by its rule or by what it computes, or put attention beside it, as `config.gate` says.

    `probed` is the module with values, where `module` is its copy on the meta device. Raises `RecastError` if the rule
    refuses it, or if it does not state its channels.
    """
    if isinstance(config, BesideGate):
        return AttentionBeside(module, tap=middle_tap(module), config=config)
    if (rule := find_rule(module)) is not None:
        return rule[1](module, config)
    conv: Any = module
    return as_attention(conv, probed_geometry(probed or module), conv.weight.detach(), config)


def middle_tap(conv: nn.Module) -> Tensor | None:
    """Return the middle tap of the kernel that a rule reads, (O, C/g); None where no rule takes the module."""
    rule = find_rule(conv)
    try:
        layer = None if rule is None else rule[1](conv, LinearGate(content_heads=1, head_dim=1))
    except RecastError:
        return None
    return None if layer is None else layer.weight.detach().flatten(2)[..., layer.content_heads[0]]


def planned_geometry(conv: nn.Module, layer: RecastLayer) -> Geometry:
    """Return the geometry of a convolution as its rule reads it; beside attention, as far as its class states it."""
    if not isinstance(layer, AttentionBeside):
        return layer.geometry
    if isinstance(conv, nn.Conv2d):
        return _geometry(conv)
    if isinstance(conv, nn.ConvTranspose2d):
        with contextlib.suppress(RecastError):  # padding beyond the reach of its kernel
            return Geometry.of(conv)
    pairs = {name: _pair(getattr(conv, name, 1)) for name in ("kernel_size", "stride", "dilation")}
    return Geometry(pairs["kernel_size"], pairs["stride"], dilation=pairs["dilation"])


def is_convolution(module: nn.Module) -> bool:
    """Return True for any convolution (a kernel size and a weight), and for a recast layer."""
    if isinstance(module, nn.modules.conv._ConvNd | RecastLayer) or find_rule(module) is not None:
        return True
    # not hasattr(module, "weight"): reading a parametrised weight computes it
    weighs = "weight" in module._parameters or hasattr(type(module), "weight")
    return weighs and hasattr(module, "kernel_size")


def axes_of(module: nn.Module) -> int:
    """Return the number of axes that a convolution runs over."""
    return len(module.kernel_size) if isinstance(module, nn.modules.conv._ConvNd) else 2


# --- what cannot be recast --------------------------------------------------------------------------------------------


def refusal(module: nn.Module, config: RecastConfig) -> str | None:
    """Return the reason why a convolution-like module cannot be recast; None if it can.

    A class may give the reason itself, in an attribute `not_recast`.
    """
    kind = type(module).__name__
    if isinstance(module, RecastLayer):
        return "already has attention beside it" if isinstance(module, AttentionBeside) else f"is already {kind}"
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript: recast the original nn.Module, then script it"
    if any(part in type(module).__module__ for part in (".quantized", ".qat.")):
        return f"{kind} is quantised: recast the float model, then quantise it"
    if reason := getattr(module, "not_recast", None):
        return str(reason)
    if any(parameter.is_complex() for parameter in module.parameters()):
        return f"{kind} has complex weights: attention is real"
    if isinstance(config, BesideGate) and axes_of(module) == 2:
        needs = [p for p in signature(module.forward).parameters.values() if p.default is p.empty and str(p)[0] != "*"]
        return f"{kind} requires more than its input" if len(needs) > 1 else None
    rule = find_rule(module)
    return _no_rule(module) or _lost(module, type(module) if rule is None else rule[0])


def _no_rule(module: nn.Module) -> str | None:
    """Return the reason why neither a rule nor probing takes a convolution; None if one does."""
    kind = type(module).__name__
    if (axes := axes_of(module)) != 2:
        return f"no rule for {kind}, which is {axes}-d: only 2-d convolutions become attention"
    if find_rule(module) is not None:
        return None
    known = f" (rules exist for {', '.join(sorted(rule.__name__ for rule in _RULES))})"
    if any(base in _RULES and base.__name__ == kind for base in type(module).__mro__):  # detectron2's and mmcv's
        kind, known = f"{type(module).__module__}.{kind}", f": its forward is not that of torch's {kind}"
    try:
        probed_geometry(module)
    except RecastError as error:
        return f"no rule for {kind}{known}, and probing failed: {error}; {REGISTER}"
    return None


def _lost(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Return what the layer made by the rule for `base` would lose: hooks, a replaced forward, added tensors.

    A custom rule knows the tensors and modules of its own kind.
    """
    kind = type(module).__name__
    if hooks := [hook for group in hooks_of(module) for hook in group.values()]:
        remedies = [f": {text}" for made, text in REMEDIES.items() if any(isinstance(hook, made) for hook in hooks)]
        return f"{kind} carries hooks, which the new layer would lose" + "".join(remedies[:1])
    if base.__module__.partition(".")[0] in ("torch", "timm"):
        if "weight" not in module._parameters and not parametrize.is_parametrized(module, "weight"):
            return f"{kind} has a weight that is no parameter: other code sets it"
        added = {*module._buffers, *module._parameters, *module._modules} - EXPECTED
        if added:
            return f"{kind} has a {min(added)!r} of its own, which the new layer would lose"
    if patched := [name for name in FORWARD if name in vars(module)]:
        return f"{kind} has a {patched[0]} of its own, set on the instance"
    return None


def check_finite(name: str, module: nn.Module) -> None:
    """Raise `RecastError` if a tensor of `module` has no values (meta device), or holds NaN or infinity."""
    for tensor_name, tensor in module.state_dict().items():
        if tensor.is_meta:
            raise RecastError(
                f"{name}.{tensor_name} is on the meta device, without values: a model there can be planned; "
                "to recast it, load its weights first"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RecastError(f"{name}.{tensor_name} holds NaN or infinite values: repair or reload the weights first")


def held_elsewhere(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, str]:
    """Return the `modules` that share a parameter with another module: name → "weight with head".

    Recasting such a module would untie them. Parameters of a parametrisation count as its module's own.
    """
    places: dict[int, list[str]] = {}
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):  # a module in several places is listed at each
        places.setdefault(id(module), []).append(name)
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    shared: dict[str, str] = {}
    for name, module in modules.items():
        inside = tuple(f"{place}." for place in places[id(module)])
        for key, parameter in module.named_parameters():
            outside = [n for n in holders[id(parameter)] if "." not in inside and not f"{n}.".startswith(inside)]
            if outside:
                shared.setdefault(name, f"{key} with {outside[0] or type(model).__name__}")
    return shared


# --- the rules: `nn.Conv2d`, `nn.ConvTranspose2d`, timm's convolutions with SAME padding or standardised weights ------


def standardized(weight: Tensor, eps: float, gain: Tensor | None) -> Tensor:
    """Return Ŵ = g·(W − mean) / √(var + eps) per output channel (Qiao et al. 2019), variance over the kernel.

    `gain` (O, 1, 1, 1): g of norm-free networks (Brock et al. 2021, ScaledStdConv2d); None: 1.
    """
    # timm computes it by batch_norm over one image: the same bits
    rows = weight.reshape(1, weight.shape[0], -1)
    g = None if gain is None else gain.view(-1)
    return F.batch_norm(rows, None, None, weight=g, training=True, momentum=0.0, eps=eps).reshape_as(weight)


def computes_weight(conv: nn.Module) -> bool:
    """Return True if a convolution computes its kernel in every forward pass."""
    standardised = isinstance(conv, StdConv2d | StdConv2dSame | ScaledStdConv2d | ScaledStdConv2dSame)
    return standardised or parametrize.is_parametrized(conv, "weight")


@torch.no_grad()
def effective_weight(conv: nn.Module) -> Tensor:
    """Return the weight that `conv` uses in eval mode, computed by its parametrisation if it has one."""
    with in_eval(conv):  # spectral norm takes a power-iteration step when read in training mode
        assert isinstance(conv.weight, Tensor)
        return conv.weight.detach()


def pads_same(conv: nn.Module) -> bool:
    """Return True for TensorFlow's SAME padding, which follows the input's size."""
    return isinstance(conv, Conv2dSame) or (isinstance(conv, StdConv2dSame | ScaledStdConv2dSame) and conv.same_pad)


def _geometry(conv: nn.Conv2d) -> Geometry:
    geometry = Geometry.of(conv)
    return replace(geometry, padding=(0, 0, 0, 0), same=True) if pads_same(conv) else geometry


@recasts(nn.Conv2d)
@recasts(Conv2dSame)
def _conv2d(conv: nn.Conv2d, config: RecastConfig) -> RecastLayer:
    """W_out^h = the kernel's position h, W_val = I, Δ_h = the position's offset (d'Ascoli et al. 2021, Eq. 6)."""
    return as_attention(conv, _geometry(conv), effective_weight(conv), config)


@recasts(nn.ConvTranspose2d)
def _conv_transpose2d(conv: nn.ConvTranspose2d, config: RecastConfig) -> RecastLayer:
    """A convolution of the input with zeros between its pixels, the kernel flipped and transposed."""
    return as_attention(conv, Geometry.of(conv), flip_transpose(effective_weight(conv), conv.groups), config)


@recasts(StdConv2d)
@recasts(StdConv2dSame)
@recasts(ScaledStdConv2d)
@recasts(ScaledStdConv2dSame)
def _standardised(conv: nn.Conv2d, config: RecastConfig) -> RecastLayer:
    gain: Any = getattr(conv, "gain", None)
    with torch.no_grad():
        gain = None if gain is None else gain * conv.scale
        return as_attention(conv, _geometry(conv), standardized(effective_weight(conv), float(conv.eps), gain), config)  # type: ignore[arg-type]


def as_attention(
    conv: nn.Conv2d | nn.ConvTranspose2d, geometry: Geometry, weight: Tensor, config: RecastConfig
) -> RecastLayer:
    """Make a layer with kernel `weight` in W_out's layout, and the mode, freezing, dtype and device of `conv`."""
    kind = CMHSA if config.gate == "bias" else GPSA
    layer = kind(
        conv.in_channels, conv.out_channels, geometry, groups=conv.groups, bias=conv.bias is not None,
        config=config, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    made = dict(conv.named_parameters())
    # a computed weight is a plain tensor here: what it was made from says whether it is trained
    biases = {name: p for name, p in made.items() if name == "bias" or name.startswith("parametrizations.bias.")}
    trained = any(p.requires_grad for name, p in made.items() if name not in biases)
    # clone keeps channels_last, which copy_ into a new tensor would not
    layer.weight = nn.Parameter(weight.clone(), trained)
    if conv.bias is not None and layer.bias is not None:
        with torch.no_grad():
            layer.bias.copy_(conv.bias).requires_grad_(any(p.requires_grad for p in biases.values()))
    if made and not any(parameter.requires_grad for parameter in made.values()):
        layer.requires_grad_(False)  # what was frozen stays frozen, whole
    return layer.train(conv.training)
