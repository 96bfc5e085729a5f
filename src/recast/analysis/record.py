"""Attention maps: one recorder for recast layers, attention pools and the attention of other networks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recast.analysis.thresholds import AWAKE
from recast.analysis.transformers import SILENT, Grids, is_attention, watched_grids, watched_tokens
from recast.analysis.wakefulness import MAX_QUERIES, of_batch, summary
from recast.config import typed
from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool, attention_pools
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer, recast_layers
from recast.modes import in_eval
from recast.surgery.plan import plan_of
from recast.surgery.planning import MAX_TOKENS
from recast.surgery.pooling.adapters import PooledLayer
from recast.surgery.wrappers import whole
from recast.tracing.hooks import hooked

SHOWN = 16
"""Layers that a printed record names, one a line."""


@dataclass(frozen=True, repr=False)
class Attention:
    """Attention of every query of a layer to every key, in the layer's latest call, without gradients.

    Rows of `mix` sum to one, but for linear gates, and for talking heads: their maps are those after the second mix.
    """

    mix: Tensor
    """A as the layer applies it, (1 or B, H, queries, keys); beside a convolution C, without γ. The last keys are
    those of the grid."""
    grid: tuple[int, int] | None
    """Rows and columns of the keys: the padded input of a recast layer, else pixels or patches; None: not known."""
    num_tokens: int = 0
    """Queries, the first ones, that are tokens and have no place: class, distillation, registers; all of a pool's."""
    shift: Tensor | None = None
    """S, G and C of GPSA, position and content of C-MHSA, each as large as `mix`; None of other layers."""
    gaussian: Tensor | None = None
    content: Tensor | None = None
    position: Tensor | None = None

    def __repr__(self) -> str:
        images, heads, queries, keys = self.mix.shape
        over = "" if self.grid is None else f", over {self.grid[0]}×{self.grid[1]}"
        return f"Attention({images} × {heads} heads, {queries} queries, {keys} keys{over})"

    @property
    def num_prefix(self) -> int:
        """Keys before the grid: class, distillation and register tokens, a pool's own token."""
        return self.mix.shape[-1] - self._size[0] * self._size[1]

    @property
    def patches(self) -> Tensor | None:
        """Maps of the queries that have a place, (B, H, n, h, w); None if all queries are tokens."""
        maps = self.mix[..., self.num_tokens :, self.num_prefix :].unflatten(-1, self._size)
        return maps if maps.shape[2] else None

    @property
    def tokens(self) -> Tensor:
        """Maps of the tokens, (B, H, T, h, w); T may be 0. A pool has one token, or one per class."""
        return self.mix[..., : self.num_tokens, self.num_prefix :].unflatten(-1, self._size)

    @property
    def kept(self) -> Tensor:
        """Attention of the tokens to the keys before the grid, (B, H, T): to themselves and each other."""
        return self.mix[..., : self.num_tokens, : self.num_prefix].sum(-1)

    @property
    def _size(self) -> tuple[int, int]:
        if self.grid is None:
            raise RecastError("the grid of these tokens is unknown, so there are no maps over it")
        return self.grid


class Record(dict[str, Attention]):
    """Attention by the name of its module, in the order of calls. A name that was left out is a `RecastError`."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}
        """Modules that attend and gave no maps, and why."""
        self.shares: dict[str, list[float]] = {}
        """Share of a recast layer's output that every head with content made beyond a global mean (`recast.awake`)."""

    def __repr__(self) -> str:
        lines = [f"Record of {len(self)} layer{'s' * (len(self) != 1)}"]
        lines[0] += f", {len(self.left_out)} left out" if self.left_out else ""
        if shares := [share for layer in self.shares.values() for share in layer]:
            lines[0] += f": {sum(share >= AWAKE for share in shares)} of {len(shares)} heads attend"
        lines += [f"  {name or 'the model'}: {attention!r}" for name, attention in list(self.items())[:SHOWN]]
        return "\n".join([*lines, f"  and {len(self) - SHOWN} more"] if len(self) > SHOWN else lines)

    def keep(self, name: str, attention: Attention) -> None:
        """Put it last: its layer was called now."""
        self.pop(name, None)
        self[name] = attention

    def __missing__(self, name: str) -> Attention:
        if name in self.left_out:
            raise RecastError(f"{name} has no maps: {self.left_out[name]}")
        raise KeyError(name)


@typed("model")
@contextmanager
def record(model: nn.Module) -> Iterator[Record]:
    """Record attention during forward passes, without gradients: `with record(model) as maps: model(x)`.

    `maps[name]` is the `Attention` of a layer's latest call, in full: of recast layers (with the parts of the mix),
    attention pools, timm's attention (ViT, DeiT, CaiT, ConViT, BEiT, EVA …), and `nn.MultiheadAttention`. Maps are made
    whatever the layer's backend; over more than 1,024 tokens a warning says so. Fused attention is
    switched off inside, and outputs differ by rounding from those outside. What has no maps, as attention within
    windows or over fewer keys (Swin, PVT), is named in `maps.left_out`.

    Args:
        model: any network.

    Returns:
        A context manager of a `Record`, module name → `Attention`.

    Raises:
        RecastError: for a network that was never recast and has no attention.

    Example:
        >>> layer = recast.CMHSA(4, 8, recast.Geometry((3, 3)))
        >>> layer.set_size_(6, 6)
        >>> with recast.record(layer) as maps:
        ...     _ = layer(torch.randn(2, 4, 6, 6))
        >>> maps[""].mix.shape  # images, heads, queries, keys
        torch.Size([2, 9, 16, 36])
    """
    maps, modules = Record(), whole(model).modules()
    if plan_of(model) is None and not any(is_attention(m) or isinstance(m, AttentionPool) for m in modules):
        raise RecastError(f"{type(model).__name__} has no attention to record: call recast_(model, plan) first")

    def keep_recast(name: str, layer: RecastLayer, x: Tensor, output: Tensor) -> None:
        grid = layer.geometry.padded_size(*x.shape[-2:])
        if grid[0] * grid[1] > MAX_TOKENS:
            warnings.warn(f"{name}: recording maps over {grid[0] * grid[1]} tokens takes memory", stacklevel=2)
        if isinstance(layer, AttentionBeside):
            content = layer.attention(x, (output.shape[-2], output.shape[-1]))
            maps.keep(name, Attention(content, grid, content=content))
        else:
            parts = layer.maps(x) if isinstance(layer, CMHSA) else layer.attention(x)
            maps.keep(name, Attention(grid=grid, **parts._asdict()))
        if layer.content_heads:
            shares = summary(layer, *of_batch(layer, x, output, MAX_QUERIES), len(x))["attention_share"]
            maps.shares[name] = [share for share in shares if share is not None]

    with watched(model, keep_recast, maps.keep, maps.left_out.__setitem__):
        yield maps


SeeRecast = Callable[[str, RecastLayer, Tensor, Tensor], None]
Keep = Callable[[str, Attention], None]
LeaveOut = Callable[[str, str], None]


@contextmanager
def watched(model: nn.Module, see_recast: SeeRecast, keep: Keep, leave_out: LeaveOut) -> Iterator[None]:
    """Report every call of an attention module inside the block, without gradients.

    see_recast(name, layer, x, output): a recast layer after its call, with its input; its maps may be too large to
    make. Layers whose attention was pruned are not seen.
    keep(name, attention): an attention pool, or another network's attention over tokens, after its call.
    leave_out(name, reason): a module that has no maps.
    """

    model = whole(model)
    recast, pools = recast_layers(model), attention_pools(model)
    attending = {n: m for n, m in recast.items() if m.content_heads or not isinstance(m, AttentionBeside)}

    @torch.no_grad()
    def after_recast(name: str, _layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        see_recast(name, recast[name], inputs[0], output)

    @torch.no_grad()
    def after(name: str, _pool: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        keep(name, _of_pool(pools[name], inputs[0], grids))

    def keep_tokens(name: str, weights: Tensor, grid: tuple[int, int]) -> None:
        # one query: the class token alone asks (CaiT's second stage)
        alone = weights.shape[-2] != weights.shape[-1]
        prefix = weights.shape[-1] - grid[0] * grid[1]
        keep(name, Attention(weights, grid, weights.shape[-2] if alone else prefix))

    with (
        torch.compiler.set_stance("force_eager"),  # compiled code that is there already calls no hook
        hooked(attending.items(), after=after_recast),
        watched_grids(model) as grids,
        hooked(pools.items(), after=after),
        watched_tokens(model, [*recast.values(), *pools.values()], grids, keep_tokens, leave_out),
    ):
        yield


def _of_pool(pool: AttentionPool, x: Tensor, grids: Grids) -> Attention:
    """Return the attention of a pool; the grid of pooled tokens is looked up."""
    weights: Tensor = pool.forward(x, return_attention=True)[1]
    size = pool.as_map(x).shape[-2:]
    grid: tuple[int, int] | None = (size[0], size[1])
    if isinstance(pool, PooledLayer) and pool.takes == "NLC":
        grid = grids.of(x.shape[0], size[0] * size[1], max_prefix=0)
    return Attention(weights, grid, weights.shape[-2])


@torch.no_grad()
def class_maps(model: nn.Module, x: Tensor) -> Tensor:
    """Return the class maps of a network (B, T, h, w) for images x (B, C, H, W), in the mean over heads.

    T = K of a network that pools with one token a class (K classes), else 1: the single token of its pool, or the class
    token of its last attention (CaiT's second class attention, DeiT's last block). The weights of the patches alone:
    they sum to 1 less what the tokens before them kept. The network is run in eval mode and left as it was.
    Raises `RecastError` for a network that has neither, or whose attention cannot be seen.
    Touvron et al. 2021, arXiv:2112.13692 (pools), arXiv:2103.17239 (CaiT).
    """
    kind = type(model).__name__
    maps = Record()
    with watched(model, lambda *_: None, maps.keep, maps.left_out.__setitem__), in_eval(model):
        model(x)
    pools = [name for name in maps if name in attention_pools(model)]
    if pools:
        if maps[pools[-1]].grid is None:
            raise RecastError(f"{pools[-1]} of {kind} pools tokens whose grid is not known: there is no map")
        return maps[pools[-1]].tokens.mean(1)
    for name, reason in maps.left_out.items():
        if reason == SILENT:
            raise RecastError(f"the class token of {kind} cannot be followed: {name} {SILENT}")
    tokens = [attention.tokens[:, :, :1] for attention in maps.values() if attention.num_tokens]
    if not tokens or token_names(model, 1) != ("class token",):  # or nobody reads it
        raise RecastError(
            f"{kind} has no class maps, which require attention pooling or a class token: call recast.attention_pool_"
        )
    return tokens[-1].mean(1)


def token_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Return the names of the `count` tokens before the patches, from the names of the network's parameters.

    All are registers where the network pools its patches (BEiT, `global_pool="avg"`, attention pooling).
    """
    parameters = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    pooling = getattr(model, "global_pool", None)
    if attention_pools(model) or (isinstance(pooling, str) and pooling not in ("token", "")):
        return tuple(f"register {i + 1}" for i in range(count))  # the answer comes from the patches: nobody reads these
    names = [] if parameters.isdisjoint({"cls_token", "class_token", "class_embedding"}) else ["class token"]
    if "dist_token" in parameters:
        names.append("distillation token")
    word = "token" if parameters.isdisjoint({"reg_token", "register_tokens"}) else "register"
    return tuple([*names, *(f"{word} {i + 1}" for i in range(count - len(names)))][:count])
