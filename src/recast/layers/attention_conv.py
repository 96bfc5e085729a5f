"""Base class of the attention layers: kernel, values, queries, keys, and the attributes of a convolution."""

from __future__ import annotations

import dis
import math
import sys
import warnings
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from recast.config import Count, typed
from recast.errors import RecastError
from recast.layers.config import LinearGate, RecastConfig
from recast.layers.functional.operands import fold_value, in_autocast
from recast.layers.geometry import Geometry, convolution

QUERY_STD = 0.02
PARAMETERS = set("weight bias value query key center raw_alpha gamma spread lam relative_bias".split())
"""Names of the parameters of the layers that replace a convolution."""
NO_VALUES = {"dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "layout", "is_floating_point"}
"""What code may read of a weight without reading its values."""
GROUPED_HEAD_DIM = 8


def default_head_dim(in_channels: int, groups: int, num_heads: int) -> int:
    """Return the width D of a head's queries and keys: the paper's ⌊C/H⌋, at least 1.

    In a grouped layer D is ⌊C/(g·H)⌋, at least 8: a grouped kernel has C/g input channels per head, and wide queries
    and keys over all C would have many times its parameters.
    """
    dense = max(1, in_channels // num_heads)
    if groups == 1:
        return dense
    narrow = max(GROUPED_HEAD_DIM, in_channels // groups // num_heads)
    return narrow if groups == in_channels else min(dense, narrow)


def check_no_proxy(layer: nn.Module, x: Any) -> None:
    """Raise `RecastError` while torch.fx traces symbolically."""
    if isinstance(x, torch.fx.Proxy):
        raise RecastError(
            f"torch.fx.symbolic_trace does not support {type(layer).__name__}: use torch.export.export, or make it a "
            "leaf (Tracer.is_leaf_module)"
        )


@lru_cache
def _asks_for_no_value(code: CodeType, at: int) -> bool:
    """Return True if the instruction after `at` reads the dtype, the device or the like of what was got there."""
    after = next((step for step in dis.get_instructions(code) if step.offset > at), None)
    return after is not None and after.opname == "LOAD_ATTR" and after.argval in NO_VALUES


class KernelRead:
    """Descriptor of `weight`, which warns where code reads it of a layer that computes more than its convolution.

    Blocks that merge their branches, and helpers that build a convolution, read `.weight` as a kernel. From a layer
    with open heads they would get a convolution without the trained attention. Each line that reads values of a layer
    is told once; `.weight.dtype` and the like are no such reads. The descriptor has no `__set__`, so state, copies,
    parametrisations and replicas are not affected.
    """

    NOT_AS_KERNEL = ("recast.", "torch.nn.modules.module", "torch.nn.utils.parametri")
    """Modules that read `weight` as a parameter, without a warning."""

    def __init__(self) -> None:
        self.warned: WeakKeyDictionary[nn.Module, set[tuple[CodeType, int]]] = WeakKeyDictionary()

    def __get__(self, layer: Any, kind: type[nn.Module]) -> Any:
        if layer is None:
            return self
        if (weight := layer.stored_weight()) is None:
            raise AttributeError(f"{kind.__name__} has no parameter 'weight'")
        if torch.compiler.is_compiling():
            return weight
        reader = sys._getframe(1)
        place = reader.f_code, reader.f_lineno
        if place in self.warned.get(layer, ()) or _asks_for_no_value(reader.f_code, reader.f_lasti):
            return weight
        module = str(reader.f_globals.get("__name__"))
        if not module.startswith(self.NOT_AS_KERNEL) and not layer.weight_is_kernel():
            self.warned.setdefault(layer, set()).add(place)
            warnings.warn(
                f"reading .weight of {kind.__name__}({layer.in_channels} → {layer.out_channels}, kernel "
                f"{layer.kernel_size}): a convolution built from it loses the trained attention; call recast.fold_ "
                "first and merge only layers that became convolutions",
                stacklevel=2,
            )
        return weight


class AttentionConv2d(nn.Module):
    """y = b + Σ_h A_h X W_val W_out^h with one head for each position of the kernel; subclasses define the maps A_h.

    Parameters: `weight` (O, C/g, rows, columns) is W_out in a kernel's own layout, `bias` (O,), `value` W_val (C, C/g;
    none for depthwise), `query` and `key` (H_c·D, C) for the H_c heads that have content. A subclass adds its own in
    `_build`. What a layer does not have is None, as `bias` is: queries and keys without a content map, say.
    """

    _default_config: type[RecastConfig] = LinearGate
    if TYPE_CHECKING:
        weight: nn.Parameter
    else:
        weight = KernelRead()
    bias: nn.Parameter | None
    value: nn.Parameter | None
    content_heads: tuple[int, ...]
    """Heads that have a content map: those of `config.content_heads`, minus pruned ones."""

    @typed("in_channels", "out_channels", "geometry", "groups", "bias", "config")
    def __init__(
        self, in_channels: Count, out_channels: Count, geometry: Geometry, *, groups: Count = 1, bias: bool = True,
        config: RecastConfig | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        config = self._default_config() if config is None else config
        if in_channels % groups or out_channels % groups:
            raise RecastError(f"channels {in_channels} → {out_channels} are not divisible by groups={groups}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.geometry, self.config = geometry, config
        self.num_heads = heads = geometry.num_heads
        self.content_heads = geometry.heads(config.content_heads)
        content = len(self.content_heads)
        self.head_dim = config.head_dim or default_head_dim(in_channels, groups, heads)
        kernel = (out_channels, in_channels // groups, *geometry.kernel)
        self.weight = nn.Parameter(torch.empty(kernel, device=device, dtype=dtype))
        self.bias = self._parameter(out_channels) if bias else None
        self.value = self._parameter(in_channels, in_channels // groups) if self._projects_values else None
        self.query = self._parameter(content * self.head_dim, in_channels)
        self.key = self._parameter(content * self.head_dim, in_channels)
        self._build()
        self.reset_parameters()

    def _build(self) -> None:
        """Add the parameters of the subclass. Raises `RecastError` for a configuration of another layer."""

    def stored_weight(self) -> nn.Parameter | None:
        """Return the parameter W_out; None where a parametrisation computes it."""
        return self._parameters.get("weight")

    def foreign_state(self) -> list[str]:
        """Return names in the state that are not the layer's own: those of a pruning mask, of a norm."""
        return [name for name in self.state_dict() if name not in PARAMETERS]

    def weight_is_kernel(self) -> bool:
        """Return True if the layer computes the convolution of `weight`, or has no values (meta and fake tensors)."""
        tensors = [t for t in self._parameters.values() if t is not None]
        if any(type(t) not in (Tensor, nn.Parameter) or t.is_meta for t in tensors):
            return True
        return self._is_closed() and (self.value is None or torch.equal(self.value, self._identity()))

    def _is_closed(self) -> bool:
        """Return True if every head is only its kernel position."""
        return False

    def _w_out(self) -> nn.Parameter:
        """Return W_out without `KernelRead`, which compilers cannot follow."""
        weight = self.stored_weight()
        return self.weight if weight is None else weight

    @property
    def _projects_values(self) -> bool:
        """True if the layer has W_val. Depthwise layers have none: it would be a factor of W_out."""
        return self.config.project_values and (self.groups < self.in_channels or self.groups == 1)

    def _parameter(self, *shape: int) -> Any:
        """Return a new parameter, or None for no elements: loops over parameters (norms, histograms) stop at them."""
        return nn.Parameter(self._w_out().new_empty(shape)) if math.prod(shape) else None

    def _entries(self, name: str, *shape: int) -> Tensor:
        """Return a parameter; no elements, in this shape, if the layer does not have it."""
        value: Tensor | None = getattr(self, name)
        return self._w_out().new_empty(shape) if value is None else value

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw a convolution's usual random kernel, set W_val = I, queries and keys as `config.query_key` says."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.value is not None:
            self.value.copy_(self._identity())
        self._reset_queries_and_keys()

    def _identity(self) -> Tensor:
        """Return the identity W_val, (C, C/g)."""
        like = self._w_out()
        eye = torch.eye(self.in_channels // self.groups, device=like.device, dtype=like.dtype)
        return eye.repeat(self.groups, 1)

    def _reset_queries_and_keys(self) -> None:
        """Draw W_qry with W_key = 0, draw both, or set both to the same random orthonormal rows for every head.

        They must not both be zero: neither would ever get a gradient. Orthonormal rows are scaled for features of
        variance 1: logits QKᵀ/√D then have the standard deviation `logit_std`.
        """
        if not self.content_heads:
            return
        if self.config.query_key in ("zero", "random"):
            nn.init.trunc_normal_(self.query, std=QUERY_STD)
            nn.init.zeros_(self.key)
            if self.config.query_key == "random":
                nn.init.trunc_normal_(self.key, std=QUERY_STD)
            return
        for rows in self.query.split(self.head_dim):
            drawn = torch.empty_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))  # half has no QR
            rows.copy_(nn.init.orthogonal_(drawn, gain=self.config.logit_std**0.5))
        self.key.copy_(self.query)

    # attributes of a convolution, for networks that read them (to pad their input, say)

    @property
    def kernel_size(self) -> tuple[int, int]:
        """Rows and columns of the kernel."""
        return self.geometry.kernel

    @property
    def stride(self) -> tuple[int, int]:
        """Stride of the convolution, or of the transposed one."""
        return self.geometry.upsample if self.geometry.is_transposed else self.geometry.stride

    @property
    def dilation(self) -> tuple[int, int]:
        """Distance of the kernel's positions."""
        return self.geometry.dilation

    @property
    def padding(self) -> tuple[int, int]:
        """Pixels added above and on the left."""
        return self.geometry.padding[0], self.geometry.padding[2]

    def set_geometry_(self, geometry: Geometry) -> None:
        """Set another stride, dilation or padding for the same kernel."""
        assert geometry.kernel == self.geometry.kernel
        self.geometry = geometry

    @torch.no_grad()
    def to_conv(self) -> nn.Module:
        """Return the convolution of the layer with closed gates: W_val multiplied into W_out.

        A padding layer precedes it where `nn.Conv2d` cannot express the padding.
        """
        weight = self.weight  # read once: a parametrisation computes it
        kernel = torch.empty_like(weight)  # in the memory format of the layer's own
        kernel.copy_(fold_value(weight, self.value, self.groups))
        sources = ("weight", "parametrizations.weight.")
        trained = any(p.requires_grad for name, p in self.named_parameters() if name.startswith(sources))
        return convolution(self.geometry, kernel, self.bias, self.groups, trained).train(self.training)

    @torch.no_grad()
    def fold_value_(self) -> None:
        """Multiply W_val into W_out, in place, unless W_out is parametrised: it is computed anew in every pass."""
        if self.value is None or parametrize.is_parametrized(self, "weight"):
            return
        self.weight.copy_(fold_value(self.weight, self.value, self.groups))
        self.value = None

    def _check_input(self, x: Tensor) -> None:
        check_no_proxy(self, x)
        if torch.jit.is_tracing():
            return  # comparing sizes in a trace would warn
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            kind = type(self).__name__
            raise RecastError(f"{kind} expected input (B, {self.in_channels}, H, W), got {tuple(x.shape)}")
        if x.dtype != (dtype := self._w_out().dtype) and not in_autocast(x):
            raise RecastError(f"{type(self).__name__} has {dtype} weights, got {x.dtype} input: convert one")

    def _repr(self, heads: str, rest: str) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return (
            f"{self.in_channels} → {self.out_channels}, {self.geometry}{groups}, bias={self.bias is not None}, "
            f"{self.num_heads} heads × {self.head_dim}{heads}, gate={self.config.gate}{rest}"
        )
