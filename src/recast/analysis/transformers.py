"""Attention over tokens of networks that are not ours, timm's transformers, torchvision's and like ones, and its grid.

timm's attention keeps its weights for itself: the fused kernel never has them. `timm.utils.AttentionExtract` reads them
where they pass the module's dropout (`attn_drop`); its hooks stay for good, it sets the network to eval mode for good,
and fused modules are left out without a word (24 of CaiT's 26 maps). So the hooks here are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from recast.layers.cmhsa import RecastLayer
from recast.surgery.pooling.find import MAX_PREFIX
from recast.tracing.hooks import hooked, replaced_inputs, replaced_output

SILENT = "gives no weights of one token for another"
NOT_WHOLE = "attention within windows, over reduced keys or over channels, which has no maps over the whole grid"
NO_GRID = "attention over tokens whose grid is not known"
FUSED = "attention that never shows its weights"


def is_attention(module: nn.Module) -> bool:
    """Return True for an attention layer of this or another library."""
    says = isinstance(getattr(module, "attn_drop", None), nn.Module) or hasattr(module, "fused_attn")
    return says or isinstance(module, nn.MultiheadAttention | RecastLayer)


class Grids:
    """Sizes of the maps of whole images that a forward pass has made so far: tokens lie on one of them."""

    def __init__(self) -> None:
        self.batch: int | None = None
        """Images that the network was given, where it was called as a whole."""
        self._seen: list[tuple[int, int]] = []

    def begin(self, image: Any) -> None:
        """Begin a pass over these images."""
        self._seen.clear()
        self.batch = image.shape[0] if isinstance(image, Tensor) and image.dim() == 4 else None

    def see(self, output: Any) -> None:
        """Remember a map (B, C, h, w); anything else is none, and so is one of each window or patch."""
        if isinstance(output, Tensor) and output.dim() == 4 and self.batch in (None, output.shape[0]):
            self._seen.append((output.shape[2], output.shape[3]))

    def of(self, batch: int, tokens: int, max_prefix: int = MAX_PREFIX) -> tuple[int, int] | None:
        """Return the size of the latest map with as many pixels as there are tokens, or up to `max_prefix` fewer.

        Class, distillation and register tokens come before the patches. None if no map fits.
        """
        if self.batch not in (None, batch):
            return None
        fits = (size for size in reversed(self._seen) if 0 <= tokens - size[0] * size[1] <= max_prefix)
        return next(fits, None)


@contextmanager
def watched_grids(model: nn.Module) -> Iterator[Grids]:
    """Note the maps that convolutions (and layers that were some) of `model` make: a patch embedding is one."""
    grids = Grids()
    convolutions = ((name, m) for name, m in model.named_modules() if isinstance(m, nn.Conv2d | RecastLayer))
    with (
        hooked([("", model)], before=lambda _name, _module, inputs: grids.begin(next(iter(inputs), None))),
        hooked(convolutions, after=lambda _name, _module, _inputs, output: grids.see(output)),
    ):
        yield grids


@contextmanager
def watched_tokens(
    model: nn.Module,
    ours: Sequence[nn.Module],
    grids: Grids,
    keep: Callable[[str, Tensor, tuple[int, int]], None],
    leave_out: Callable[[str, str], None],
) -> Iterator[None]:
    """Call keep(name, weights, grid) after every call of a module that attends over all tokens, weights
    (B, H, queries, keys), and leave_out(name, reason) after one of others. Parts of `ours` are not among them."""

    def see(name: str, weights: Tensor | None) -> None:
        if weights is None:
            leave_out(name, SILENT)
        elif weights.dim() != 4 or weights.shape[2] not in (1, weights.shape[3]):
            leave_out(name, NOT_WHOLE)
        elif (grid := grids.of(weights.shape[0], weights.shape[3])) is None:
            leave_out(name, NOT_WHOLE if grids.batch not in (None, weights.shape[0]) else NO_GRID)
        else:
            keep(name, weights.detach(), grid)

    inside = {part for module in ours for part in module.modules()}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if module not in inside:
                stack.enter_context(_watched(module, partial(see, name), partial(leave_out, name)))
        yield


def _watched(
    module: nn.Module, see: Callable[[Tensor | None], None], leave_out: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Report the weights of an attention layer to `see`, or to `leave_out` why it has none; nothing for others."""

    def without_maps(reason: str) -> AbstractContextManager[None]:
        return hooked([("", module)], after=lambda *_: leave_out(reason))

    if isinstance(module, nn.MultiheadAttention):
        return _watched_torch(module, see)
    if isinstance(getattr(module, "attn_drop", None), nn.Module):
        # with a temperature, over channels (XCiT), whatever their number
        return without_maps(NOT_WHOLE) if hasattr(module, "temperature") else _watched_timm(module, see)
    return without_maps(FUSED) if hasattr(module, "fused_attn") else nullcontext()


@contextmanager
def _unfused(module: nn.Module) -> Iterator[None]:
    """Switch fused attention off inside the block."""
    flag: Any = module.fused_attn
    module.fused_attn = False  # type: ignore[assignment]
    try:
        yield
    finally:
        module.fused_attn = flag


@contextmanager
def _watched_timm(module: nn.Module, see: Callable[[Tensor | None], None]) -> Iterator[None]:
    """Report the weights that enter the dropout, also in training mode."""
    passed: list[Tensor] = []

    def end(*_called_with: Any) -> None:
        see(passed[-1] if passed else None)
        passed.clear()  # not to hold it any longer

    with ExitStack() as stack:
        if "fused_attn" in vars(module):
            stack.enter_context(_unfused(module))
        stack.enter_context(hooked([("", module)], before=lambda *_: passed.clear(), after=end))
        stack.enter_context(
            hooked([("", module.get_submodule("attn_drop"))], before=lambda _n, _m, inputs: passed.extend(inputs[:1]))
        )
        yield


_MHA = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


@contextmanager
def _watched_torch(module: nn.MultiheadAttention, see: Callable[[Tensor | None], None]) -> Iterator[None]:
    """Request the weights of every head, and return to the caller what it requested."""
    asked: list[tuple[bool, bool]] = []

    def ask(inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {**dict(zip(_MHA, inputs, strict=False)), **named}
        asked.append((named.get("need_weights", True), named.get("average_attn_weights", True)))
        return (), {**named, "need_weights": True, "average_attn_weights": False}

    def answer(output: Any) -> tuple[Tensor, Tensor | None]:
        wanted, averaged = asked.pop()
        y, weights = output
        see(weights)
        return y, (weights.mean(-3) if averaged else weights) if wanted else None

    with replaced_inputs(module, ask), replaced_output(module, answer):
        yield
