"""The rules: `nn.Conv2d`, `nn.ConvTranspose2d`, and timm's convolutions with SAME padding or standardised weights.

Every rule answers the same two questions: which `Geometry`, and which kernel the module uses in eval mode. What makes
that kernel (standardisation, weight norm, spectral norm) is dropped, or moves along as a parametrisation of W_out:
W_out has the kernel's own layout, so whatever made the kernel makes all heads of the layer, jointly.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from recast.errors import RecastError
from recast.layers.cmhsa import CMHSA, RecastLayer
from recast.layers.geometry import Geometry, flip_transpose
from recast.layers.gpsa import GPSA
from recast.run.config import RecastConfig
from recast.surgery.rules.registry import parametrization_of, recasts, weight_hook
from recast.tracing.hooks import in_eval


class WeightStandardization(nn.Module):
    """Ŵ = g·(W − mean) / √(var + eps) per output channel (Qiao et al. 2019); g = gain · scale in norm-free networks.

    `gain` (O, 1, 1, 1) is trained, or None for g = 1 (Brock et al. 2021, ScaledStdConv2d); variance over the kernel.
    """

    def __init__(self, eps: float, scale: float = 1.0, gain: Tensor | None = None) -> None:
        super().__init__()
        self.eps, self.scale = eps, scale
        self.gain = None if gain is None else nn.Parameter(gain.detach().clone(), gain.requires_grad)

    def forward(self, weight: Tensor) -> Tensor:
        # batch_norm over one image is timm's own way to the same bits
        g = None if self.gain is None else (self.gain * self.scale).view(-1)
        rows = weight.reshape(1, weight.shape[0], -1)
        return F.batch_norm(rows, None, None, weight=g, training=True, momentum=0.0, eps=self.eps).reshape_as(weight)


def computes_weight(conv: nn.Module) -> bool:
    """Whether a convolution computes its kernel from something else in every forward pass."""
    standardised = isinstance(conv, StdConv2d | StdConv2dSame | ScaledStdConv2d | ScaledStdConv2dSame)
    return standardised or parametrization_of(conv) is not None or weight_hook(conv) is not None


@torch.no_grad()
def effective_weight(conv: nn.Module) -> Tensor:
    """The weight that `conv` uses in eval mode, computed by its parametrisation or its hook where it has one."""
    if (hook := weight_hook(conv)) is not None:
        settings = {"do_power_iteration": False} if isinstance(hook, SpectralNorm) else {}
        weight: Tensor = hook.compute_weight(conv, **settings)
        return weight
    with in_eval(conv):  # spectral norm takes a power-iteration step when read in training mode
        assert isinstance(conv.weight, Tensor)
        return conv.weight.detach()


def pads_same(conv: nn.Module) -> bool:
    """Whether a convolution has TensorFlow's SAME padding, which follows the input's size."""
    return isinstance(conv, Conv2dSame) or bool(getattr(conv, "same_pad", False))


def _geometry(conv: nn.Conv2d) -> Geometry:
    geometry = Geometry.of(conv)
    return replace(geometry, padding=(0, 0, 0, 0), same=True) if pads_same(conv) else geometry


@recasts(nn.Conv2d)
@recasts(Conv2dSame)
def _conv2d(conv: nn.Conv2d, config: RecastConfig) -> RecastLayer:
    """W_out^h = the kernel's position h, W_val = I, Δ_h = the position's offset (d'Ascoli et al. 2021, Eq. 6)."""
    return _layer(conv, _geometry(conv), effective_weight(conv), config)


@recasts(nn.ConvTranspose2d)
def _conv_transpose2d(conv: nn.ConvTranspose2d, config: RecastConfig) -> RecastLayer:
    """A convolution of the input with zeros between its pixels, the kernel flipped and transposed."""
    if config.keep_parametrization and (parametrization_of(conv) is not None or weight_hook(conv) is not None):
        raise RecastError("a parametrised transposed kernel has another layout: keep_parametrization must be off")
    return _layer(conv, Geometry.of(conv), flip_transpose(effective_weight(conv), conv.groups), config)


@recasts(StdConv2d)
@recasts(StdConv2dSame)
@recasts(ScaledStdConv2d)
@recasts(ScaledStdConv2dSame)
def _standardised(conv: nn.Conv2d, config: RecastConfig) -> RecastLayer:
    maker = WeightStandardization(conv.eps, getattr(conv, "scale", 1.0), getattr(conv, "gain", None))  # type: ignore[arg-type]
    raw = effective_weight(conv)
    if config.keep_parametrization:
        return _layer(conv, _geometry(conv), raw, config, maker)
    with torch.no_grad():
        return _layer(conv, _geometry(conv), maker(raw), config)


def _layer(
    conv: nn.Conv2d | nn.ConvTranspose2d, geometry: Geometry, weight: Tensor, config: RecastConfig,
    maker: nn.Module | None = None,
) -> RecastLayer:  # fmt: skip
    """A layer with kernel `weight` in W_out's layout, and what `conv` says of training, freezing, dtype and device.

    With `keep_parametrization`, `conv`'s own parametrisations and then `maker` become those of W_out; `weight` is what
    the last of them starts from.
    """
    keep = config.keep_parametrization
    if keep and weight_hook(conv) is not None:
        raise RecastError("keep_parametrization needs torch.nn.utils.parametrizations, this is the older weight hook")
    given = parametrization_of(conv) if keep else None
    kind = CMHSA if config.gate == "bias" else GPSA
    layer = kind(
        conv.in_channels, conv.out_channels, geometry, groups=conv.groups, bias=conv.bias is not None,
        config=config, device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    made = dict(conv.named_parameters())
    # a computed weight is a plain tensor here: what it was made from says whether it is trained
    biases = {name: p for name, p in made.items() if name == "bias" or name.startswith("parametrizations.bias.")}
    if keep and biases and "bias" not in biases:
        raise RecastError("a parametrised bias cannot be kept: keep_parametrization must be off")
    is_source = not (given is None and maker is None) and "weight" in made
    sources = [made["weight"]] if is_source else [p for name, p in made.items() if name not in biases]
    # clone keeps channels_last, which copy_ into a new tensor would not
    layer.weight = nn.Parameter(weight.clone(), any(p.requires_grad for p in sources))
    if conv.bias is not None and layer.bias is not None:
        with torch.no_grad():
            layer.bias.copy_(conv.bias).requires_grad_(any(p.requires_grad for p in biases.values()))
    layer.train(conv.training)
    if given is not None:
        # moved whole: an inverse would give other numbers with the same result, or refuse them
        parametrize.register_parametrization(layer, "weight", nn.Identity(), unsafe=True)
        layer.parametrizations["weight"] = copy.deepcopy(given)  # type: ignore[operator, index, assignment]
    if maker is not None:
        parametrize.register_parametrization(layer, "weight", maker, unsafe=True)
    return layer
