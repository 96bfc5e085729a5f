"""Attention over tokens, of networks that are not ours: timm's transformers, torchvision's, and like ones.

timm's attention keeps its weights for itself: the fused kernel never has them. `timm.utils.AttentionExtract` reads them
where they pass the module's dropout (`attn_drop`); its hooks stay for good, it sets the network to eval mode for good,
and fused modules are left out without a word (24 of CaiT's 26 maps). So the hooks here are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from recast.analysis.grids import Grids, watched_grids
from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool
from recast.layers.cmhsa import RecastLayer
from recast.surgery.pooling.swap import attention_pools

SILENT = "gives no weights of one token for another"
NOT_WHOLE = "attention within windows, over reduced keys or over channels, which has no maps over the whole grid"
NO_GRID = "attention over tokens whose grid is not known"
FUSED = "attention that never shows its weights"
MLP = "an MLP over tokens, which has no matrix of weights"


class TokenMaps(NamedTuple):
    """How much every query attends to every token: A (B, H, N_q, N_k), of which the last h·w keys are the patches.

    N_q = N_k, or 1 where the class token alone asks (CaiT's second stage). Rows sum to 1 but for talking heads, whose
    maps are those that are applied: after the second mix. Of a linear layer over tokens (ResMLP) A is its weight,
    (1, 1, N, N), of either sign and the same for every image.
    """

    weights: Tensor
    grid: tuple[int, int]
    is_linear: bool = False

    @property
    def num_prefix(self) -> int:
        """Keys before the patches: class, distillation, register tokens."""
        return self.weights.shape[-1] - self.grid[0] * self.grid[1]

    @property
    def patches(self) -> Tensor | None:
        """Of the patches' queries over the patches, (B, H, h·w, h, w); None where the class token alone asks."""
        if self.weights.shape[-2] != self.weights.shape[-1]:
            return None
        return self._over_patches(self.weights[..., self.num_prefix :, :])

    @property
    def prefix(self) -> Tensor:
        """Of the tokens before the patches over the patches, (B, H, T, h, w); T may be 0."""
        if self.weights.shape[-2] != self.weights.shape[-1]:
            return self._over_patches(self.weights)
        return self._over_patches(self.weights[..., : self.num_prefix, :])

    def _over_patches(self, weights: Tensor) -> Tensor:
        return weights[..., self.num_prefix :].unflatten(-1, self.grid)


class TokenRecord(dict[str, TokenMaps]):
    """Maps by the name of their module, in the order of calls; `left_out`: modules without one, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: dict[str, str] = {}


@contextmanager
def record_tokens(model: nn.Module) -> Iterator[TokenRecord]:
    """Record token attention during forward passes: `with record_tokens(model) as maps: model(x)`.

    `maps[name]` is the `TokenMaps` of a module's latest call, without gradients: of timm's attention (ViT, DeiT, CaiT,
    ConViT, BEiT, EVA …), of `nn.MultiheadAttention`, of ResMLP's linear layers over tokens. Fused attention is switched
    off inside, and outputs differ by rounding from those outside. Attention within windows or over fewer keys (Swin,
    PVT), and MLPs over tokens (Mixer), are named in `maps.left_out`.
    Raises `RecastError`, at the end, for attention that was called and should have shown its weights but did not.
    """
    record = TokenRecord()

    def keep(name: str, maps: TokenMaps) -> None:
        record.pop(name, None)
        record[name] = maps

    with watched_grids(model) as grids, watched_tokens(model, grids, keep, record.left_out.__setitem__):
        yield record
    silent = [name for name, reason in record.left_out.items() if reason == SILENT]
    if silent:
        raise RecastError(
            f"{', '.join(silent)} of {type(model).__name__} {SILENT}: expected weights to pass its attn_drop; "
            "recast.explain.make.explain shows the maps of the others"
        )


Keep = Callable[[str, TokenMaps], None]
LeaveOut = Callable[[str, str], None]


@contextmanager
def watched_tokens(model: nn.Module, grids: Grids, keep: Keep, leave_out: LeaveOut) -> Iterator[None]:
    """Call `keep(name, maps)` after every call of a module that attends over all tokens, and `leave_out(name, reason)`
    after one of others. Our own layers and pools are not among them: `recast.analysis.record.record`."""

    def see(name: str, weights: Tensor | None) -> None:
        if weights is None:
            leave_out(name, SILENT)
        elif weights.dim() != 4 or weights.shape[2] not in (1, weights.shape[3]):
            leave_out(name, NOT_WHOLE)
        elif (grid := grids.of(weights.shape[0], weights.shape[3])) is None:
            leave_out(name, NOT_WHOLE if grids.batch not in (None, weights.shape[0]) else NO_GRID)
        else:
            keep(name, TokenMaps(weights.detach(), grid))

    with ExitStack() as stack:
        for name, module in _others(model):
            attn_drop = getattr(module, "attn_drop", None)
            if isinstance(module, nn.MultiheadAttention):
                _watch_torch(stack, name, module, see)
            elif isinstance(attn_drop, nn.Module):
                # cross-covariance attention (XCiT) is over channels, whatever their number
                _watch_timm(stack, name, module, attn_drop, (lambda name, _: leave_out(name, NOT_WHOLE))
                            if hasattr(module, "temperature") else see)  # fmt: skip
            elif hasattr(module, "fused_attn"):
                stack.callback(module.register_forward_hook(_saying(leave_out, name, FUSED)).remove)
            elif name.rpartition(".")[2] == "mlp_tokens":
                stack.callback(module.register_forward_hook(_saying(leave_out, name, MLP)).remove)
            elif name.rpartition(".")[2] == "linear_tokens" and isinstance(module, nn.Linear):
                _watch_linear(stack, name, module, grids, keep, leave_out)
        yield


def token_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """What the `count` tokens before the patches are, by the names of the network's parameters; all of them registers
    where the network pools its patches (BEiT, `global_pool="avg"`, attention pooling)."""
    known = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    pooling = getattr(model, "global_pool", None)
    if attention_pools(model) or (isinstance(pooling, str) and pooling not in ("token", "")):
        return tuple(f"register {i + 1}" for i in range(count))  # the answer comes from the patches: nobody reads these
    names = [] if known.isdisjoint({"cls_token", "class_token", "class_embedding"}) else ["class token"]
    if "dist_token" in known:
        names.append("distillation token")
    word = "token" if known.isdisjoint({"reg_token", "register_tokens"}) else "register"
    return tuple([*names, *(f"{word} {i + 1}" for i in range(count - len(names)))][:count])


def _others(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are no part of a recast layer or of an attention pool."""
    ours = [module for module in model.modules() if isinstance(module, RecastLayer | AttentionPool)]
    inside = {part for module in ours for part in module.modules()}
    for name, module in model.named_modules():
        if module not in inside:
            yield name, module


def _watch_timm(
    stack: ExitStack, name: str, module: nn.Module, attn_drop: nn.Module, see: Callable[[str, Tensor | None], None]
) -> None:
    """Weights as they come into the dropout: before it, in training mode too."""
    passed: list[Tensor] = []
    if vars(module).get("fused_attn"):
        stack.callback(setattr, module, "fused_attn", module.fused_attn)
        module.fused_attn = False  # type: ignore[assignment]

    def begin(_module: nn.Module, _inputs: Any) -> None:
        passed.clear()

    def take(_module: nn.Module, inputs: Any) -> None:
        passed.extend(inputs[:1])

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        see(name, passed[-1] if passed else None)
        passed.clear()  # not to hold it any longer

    stack.callback(module.register_forward_pre_hook(begin).remove)
    stack.callback(attn_drop.register_forward_pre_hook(take).remove)
    stack.callback(module.register_forward_hook(end).remove)


_MHA = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def _watch_torch(
    stack: ExitStack, name: str, module: nn.MultiheadAttention, see: Callable[[str, Tensor | None], None]
) -> None:
    """Ask for the weights of every head, and give the caller what the caller asked for."""
    asked: list[tuple[bool, bool]] = []

    def ask(_module: nn.Module, inputs: Any, named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {**dict(zip(_MHA, inputs, strict=False)), **named}
        asked.append((named.get("need_weights", True), named.get("average_attn_weights", True)))
        return (), {**named, "need_weights": True, "average_attn_weights": False}

    def end(_module: nn.Module, _inputs: Any, output: Any) -> tuple[Tensor, Tensor | None]:
        wanted, averaged = asked.pop()
        y, weights = output
        see(name, weights)
        return y, (weights.mean(-3) if averaged else weights) if wanted else None

    stack.callback(module.register_forward_pre_hook(ask, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(end).remove)


def _watch_linear(
    stack: ExitStack, name: str, module: nn.Linear, grids: Grids, keep: Keep, leave_out: LeaveOut
) -> None:
    def end(_module: nn.Module, inputs: Any, _output: Any) -> None:
        grid = grids.of(inputs[0].shape[0], module.in_features, max_prefix=0)
        if grid is None or module.out_features != module.in_features:
            leave_out(name, NOT_WHOLE)
        else:
            keep(name, TokenMaps(module.weight.detach()[None, None], grid, is_linear=True))

    stack.callback(module.register_forward_hook(end).remove)


def _saying(leave_out: LeaveOut, name: str, reason: str) -> Callable[[nn.Module, Any, Any], None]:
    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        leave_out(name, reason)

    return end
