"""Attention beside a convolution: the convolution stays as it is, and a head of content attention is added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.layers.attention_conv import GROUPED_HEAD_DIM, KernelRead, check_no_proxy
from recast.layers.config import BesideGate
from recast.layers.forms import Tuned
from recast.layers.functional.beside import BesideWeights, added, attention_map, by_formula, choose_attend, query_pixels
from recast.layers.functional.operands import is_recorded
from recast.layers.geometry import Geometry
from recast.modes import computes_as, data_of

HEAD_DIM = 32
ATTENTION = ("query", "key", "content", "gamma")
"""Parameters besides those of the convolution."""
STATE = (*ATTENTION, "qk_scale")
"""Names in its state besides those of the convolution."""


class AttentionBeside(Tuned, nn.Module):
    """A convolution that stays as it is, and one head of content attention added to its output.

        y = conv(X) + γ ⊙ (C X W_con)      C = softmax(Q Kᵀ / √D),  Q = c X_q W_qry,  K = c X W_key

    `conv` is the caller's own module: of any class, with its own parameters, hooks, padding and parametrisations. γ has
    a number for every channel of the output; where all are 0, as at the start, the output is bitwise that of `conv`.
    Keys are the pixels of the input X, X_q is the pixel under every pixel of the output (`layers.functional.beside`).
    NCHW in and out, any size. In GPSA's terms the taps' heads stay one-hot shifts, and one more has its own W_out.

    Parameters: those of `conv`, under `conv.`, `query` W_qry and `key` W_key (D, C), `content` W_con (O, C/g),
    block-diagonal in the groups of the convolution, and `gamma` γ (O,). The buffer `qk_scale`, c, is 1 until `wake_`
    sets it. These five are None after `prune_`. A state of the convolution alone loads too. Other numbers and tensors
    are those of `conv`: `stride`, `weight`.

    Args:
        conv: (B, C, H, W) → (B, O, I, J), with numbers `in_channels` and `out_channels`, and `groups` unless 1.
        tap: W_con at the start, (O, C/g): the middle tap of the kernel. Default: random, normal (He et al. 2015).
        config: a `RecastConfig` with gate="beside".

    Raises:
        RecastError: for a module that does not state its channels, and for another gate.

    Example:
        >>> conv = nn.Conv2d(4, 8, 3, padding=1)
        >>> layer = recast.AttentionBeside(conv)
        >>> x = torch.randn(2, 4, 6, 6)
        >>> torch.equal(layer(x), conv(x))
        True
    """

    num_heads = 1
    gaussian_heads = ()
    in_channels: int
    out_channels: int
    head_dim: int
    query: nn.Parameter
    key: nn.Parameter
    content: nn.Parameter
    gamma: nn.Parameter
    qk_scale: Tensor
    if TYPE_CHECKING:
        weight: Any
    else:
        weight = KernelRead()

    def __init__(self, conv: nn.Module, *, tap: Tensor | None = None, config: BesideGate | None = None) -> None:
        super().__init__()
        config = BesideGate() if config is None else config
        if not isinstance(config, BesideGate):
            raise RecastError(f"AttentionBeside requires gate='beside', got gate={config.gate!r}")
        for name in ("in_channels", "out_channels"):
            if not isinstance(count := getattr(conv, name, None), int):
                raise RecastError(f"{type(conv).__name__} does not state {name} as a number")
            setattr(self, name, count)
        self.config, self.backend = config, "auto"
        self.groups = int(getattr(conv, "groups", 1))
        width = min(self.in_channels, HEAD_DIM if self.groups == 1 else GROUPED_HEAD_DIM)
        self.head_dim = config.head_dim or width
        tensors = (*conv.parameters(), *conv.buffers())
        like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
        read, content = (self.head_dim, self.in_channels), (self.out_channels, self.in_channels // self.groups)
        shapes = {"query": read, "key": read, "content": content, "gamma": (self.out_channels,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=like.device, dtype=like.dtype)))
        self.register_buffer("qk_scale", torch.empty((), device=like.device, dtype=like.dtype))
        self.reset_parameters(tap)
        self._conv_state, self._conv_names, self.conv = frozenset(conv.state_dict()), frozenset(dir(conv)), conv
        self.train(conv.training)

    @torch.no_grad()
    def reset_parameters(self, tap: Tensor | None = None) -> None:
        """Set γ, c, W_con to `tap`, and queries and keys as `config.query_key` says; draw what is random."""
        for weight in (self.query, self.key):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if tap is None:
            nn.init.kaiming_normal_(self.content, mode="fan_out")
        else:
            self.content.copy_(tap)
        if self.config.query_key == "zero":
            nn.init.zeros_(self.key)
        elif self.config.query_key == "similar":
            drawn = torch.empty_like(self.query, dtype=torch.promote_types(self.query.dtype, torch.float32))
            self.query.copy_(nn.init.orthogonal_(drawn, gain=self.config.logit_std**0.5))  # half has no QR
            self.key.copy_(self.query)
        nn.init.constant_(self.gamma, self.config.gamma_init)
        self.qk_scale.fill_(1.0)

    # --- forward ------------------------------------------------------------------------------------------------------

    def weights(self) -> BesideWeights:
        """Return the tensors for the pure functions. Raises `RecastError` if the head was pruned."""
        if not self.content_heads:
            raise RecastError("the attention beside this convolution was pruned")
        return BesideWeights(self.query, self.key, self.content, self.gamma, self.qk_scale, self.groups)

    def chosen_backend(self, size: tuple[int, int] | None = None) -> str:
        """Return the backend for inputs of this height and width: the configured one, the tuned one, or "split"."""
        if self.backend != "auto":
            return self.backend
        device = next(self.parameters(), torch.empty(0)).device.type
        return self.tuned_form(device, size) or "split"

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        check_no_proxy(self, input)
        y = self.conv(input, *args, **kwargs)
        if not self.content_heads:
            return y
        backend = "plain" if is_recorded() else self.chosen_backend((input.shape[2], input.shape[3]))
        return self._added(input, y, backend)

    def computed_by(self, backend: str, x: Tensor) -> Tensor:
        """Return the output for x (B, C, H, W), computed by a backend."""
        return self._added(x, self.conv(x), backend)

    def _added(self, x: Tensor, y: Tensor, backend: str) -> Tensor:
        queries, w = query_pixels(x, *y.shape[2:]), self.weights()
        if backend in ("reference", "dense"):
            return by_formula(x, y, queries, w)
        return added(x, y, queries, w, choose_attend(x, y, backend))

    def attention(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Return C for an input (B, C, H, W) and outputs of `size`, (B, 1, queries, keys); default: H and W ÷ stride.

        γ is not in it: rows sum to one.
        """
        return attention_map(x, query_pixels(x, *(size or self.geometry.output_size(*x.shape[2:]))), self.weights())

    # --- what a recast layer states about itself ----------------------------------------------------------------------

    @property
    def content_heads(self) -> tuple[int, ...]:
        """The head, unless it was pruned."""
        return (0,) if self.query is not None else ()

    @property
    def geometry(self) -> Geometry:
        """Geometry of the head: one position, queries at the stride of the convolution."""
        stride = getattr(self.conv, "stride", 1)
        if getattr(self.conv, "transposed", False) or not isinstance(stride, int | tuple):
            stride = 1
        return Geometry((1, 1), stride if isinstance(stride, tuple) else (stride, stride))

    def stored_weight(self) -> Any:
        """Return the weight of the convolution."""
        return getattr(self.conv, "weight", None)

    def foreign_state(self) -> list[str]:
        """Return names in the state that it got later, the convolution's too: those of a pruning mask, of a norm."""
        return sorted({*self.state_dict()} - {*STATE, *(f"conv.{name}" for name in self._conv_state)})

    @torch.no_grad()
    def weight_is_kernel(self) -> bool:
        """Return True if the gate is closed, or has no values (meta and fake tensors)."""
        if not self.content_heads or type(self.gamma) not in (Tensor, nn.Parameter) or self.gamma.is_meta:
            return True
        return not self.gamma.any()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("conv", *STATE) or name not in self.__dict__.get("_conv_names", ()):
                raise  # so are names that other code gives to every module: counters' `total_ops`, `__flops__`
            return data_of(self.conv, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what only the convolution has there (a weight that other code computes, say), anything else here."""
        is_own = name in (*self.__dict__, "conv", *STATE) or (hasattr(type(self), name) and name != "weight")
        if is_own or name not in self.__dict__.get("_conv_names", ()):
            super().__setattr__(name, value)
        else:
            setattr(self.conv, name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of its own. Raises `RecastError` for others: they belong to the convolution."""
        if name not in ATTENTION:
            raise RecastError(f"AttentionBeside takes no parameter {name!r}: pass the convolution in it, .conv")
        super().register_parameter(name, param)

    # --- smaller forms ------------------------------------------------------------------------------------------------

    def gates(self) -> dict[str, Tensor]:
        """Return the largest |γ| of the channels as "gamma", (1,); 0 if the head was pruned."""
        return {"gamma": self.gamma.abs().amax(0, keepdim=True) if self.content_heads else torch.zeros(1)}

    @torch.no_grad()
    def gate_sizes(self) -> Tensor:
        """Return `gates()["gamma"]`, or nothing if the head was pruned."""
        return self.gates()["gamma"][: len(self.content_heads)]

    def close_maps_(self, tol: float) -> None:
        """Remove the head if |γ| of all channels is within `tol`."""
        if bool((self.gate_sizes() <= tol).all()):
            self.prune_((), ())

    def prune_(self, gaussian_heads: Iterable[int], content_heads: Iterable[int]) -> None:
        """Remove the head, with its parameters, unless it is among `content_heads`: the convolution remains."""
        gaussian, content = set(gaussian_heads), set(content_heads)
        if gaussian or not content <= set(self.content_heads):
            raise RecastError(f"prune_ got heads that the layer does not have: it has {self.content_heads}")
        if not content:
            for name in STATE:
                setattr(self, name, None)
            self.tuned = ()

    def fold(self, tol: float = 0.0) -> nn.Module:
        """Return the convolution, the same object, if all |γ| ≤ `tol`, else the layer."""
        self.close_maps_(tol)
        return self if self.content_heads or not computes_as(self, AttentionBeside) else self.conv

    # timm's `reparameterize_model` calls this name on every module that has it
    fuse = fold

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load, also the state of the convolution alone, as checkpoints of the parent hold it."""
        if not any(prefix + name in state_dict for name in ATTENTION):
            names = {prefix + name for name in self.state_dict()}
            for key in [key for key in state_dict if key.startswith(prefix) and key not in names]:
                state_dict[f"{prefix}conv.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        elif self.content_heads:  # queries and keys without it are those of c = 1
            state_dict.setdefault(f"{prefix}qk_scale", torch.ones(()))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        head = f"1 head × {self.head_dim}" if self.content_heads else "pruned"
        return f"{self.in_channels} → {self.out_channels}, {head}, backend={self.chosen_backend()}"
