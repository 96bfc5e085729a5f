"""Where does a network pool? Found by running it: what a module takes and gives says more than its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import timm.layers
import torch
from timm.layers import SelectAdaptivePool2d
from timm.layers import adaptive_avgmax_pool as timm_pools
from torch import Tensor, nn

from recast.errors import RecastError
from recast.surgery.records import Layout, Place
from recast.tracing.hooks import hooked, in_eval, named, replaced_output

POOLS: tuple[type[nn.Module], ...] = (
    SelectAdaptivePool2d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool2d,
    nn.MaxPool2d,
    *(kind for kind in vars(timm_pools).values() if isinstance(kind, type) and issubclass(kind, nn.Module)),
)
BY_ATTENTION = tuple(
    kind
    for name, kind in vars(timm.layers).items()
    if name in ("AttentionPool2d", "AttentionPoolLatent", "AttentionPoolPrr", "RotAttentionPool2d")
)
MEANS: dict[Layout, tuple[int, ...]] = {"NCHW": (2, 3), "NHWC": (1, 2), "NLC": (1,)}
"""The dimensions of the positions."""
TOLERANCE = 1e-4
"""Relative difference below which two outputs in single precision are the same."""
TRIED = 6
"""How many of the last nn.Sequential are looked at."""
MAX_PREFIX = 16
"""More tokens than this before those of the patches are no class, distillation or register tokens."""


@torch.no_grad()
def find_place(model: nn.Module, example: Tensor) -> Place:
    """Where `model` pools the positions of its last map (or its tokens), seen on `example` (B, C, H, W) in eval mode.

    Raises RecastError for a network that does not take the example, gives anything but logits (B, K), pools by
    attention already, or pools where nothing can be put in its place.
    """
    kind = type(model).__name__
    if name := next((name for name, module in model.named_modules() if isinstance(module, BY_ATTENTION)), None):
        raise RecastError(f"{kind} pools by attention already ({name}): build it with another global_pool")
    with in_eval(model):
        search = _Search(model, example)
        found = search.module() or search.head() or search.after_sequential()
    if found is None:
        raise RecastError(
            f"cannot tell where {kind} pools: expected a pooling module that gives one position "
            "(nn.AdaptiveAvgPool2d(1)), timm's forward_head, or an nn.Sequential whose output is averaged in code"
        )
    return found


@dataclass(frozen=True)
class _Done:
    """A module that has finished: what it took first and gave, as they were then."""

    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


class _Search:
    """A network, what it gives for images, and the names of its modules in the order in which they finish, with the
    shapes of their first outputs."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.model, self.example, self.kind = model, example, type(model).__name__
        self.modules = dict(model.named_modules())
        self.linear = [name for name, module in self.modules.items() if _is_linear(module)]
        self.order: list[tuple[str, torch.Size]] = []

        def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
            first = _first(output)
            if first is not None:
                self.order.append((name, first.shape))

        with hooked(self.modules.items(), after=note):
            logits = model(example)
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise RecastError(f"attention pooling is for networks that give (batch, classes), got {got}")
        self.logits = logits

    # --- passes ---

    def watch(self, names: Iterable[str]) -> list[_Done]:
        """What the named modules take and give, in the order in which they finish."""
        with _watched(named(self.model, names)) as seen:
            self.model(self.example)
        return seen

    def probe(self, run: Callable[[Tensor], Any], x: Tensor) -> tuple[Tensor, list[_Done]] | None:
        """(what the last linear layer took, all of them) as `run` is given x; None if it cannot take it.

        What that layer takes tells answers apart also where its own weights are zero, as those of some networks are.
        """
        with _watched(named(self.model, self.linear)) as seen:
            try:
                given = run(x)
            except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
                return None
        if not isinstance(given, Tensor) or not (given.is_meta or given.isfinite().all()):
            return None
        return (seen[-1].input if seen else given), seen

    def all_comes_through(self, done: _Done) -> bool:
        """Whether other images give the same answer while a module gives what it gave for these: then nothing goes
        round it."""
        answer = self.probe(self.model, self.example)
        with replaced_output(done.module, lambda _: done.output.clone()):
            other = self.probe(self.model, 1 - self.example.flip(-1))
        return answer is not None and other is not None and _same(other[0], answer[0])

    def classifier(self, tail: list[_Done]) -> str | None:
        """The last linear layer, if what it gives are the logits. Where all are zero, the only one of that size."""
        fits = [done for done in tail if done.output.numel() == self.logits.numel()]
        if not fits or fits[-1] is not tail[-1] or not _same(tail[-1].output.flatten(), self.logits.flatten()):
            return None
        if len(fits) > 1 and not self.logits.is_meta and not self.logits.any():
            return None
        return tail[-1].name

    # --- a pooling module ---

    def module(self) -> Place | None:
        """The last pooling module, where nothing but single positions comes after it."""
        pools = [i for i, (n, shape) in enumerate(self.order) if isinstance(self.modules[n], POOLS) and _is_one(shape)]
        if not pools or any(not _is_one(shape) for _, shape in self.order[pools[-1] + 1 :]):
            return None  # none, or the last is of a channel attention: there are maps after it
        name = self.order[pools[-1]][0]
        after = {n for n, _ in self.order[pools[-1] + 1 :] if n in self.linear}
        before = [n for n, _ in self.order[: pools[-1]] if n in self.linear]
        seen = self.watch({name, *(after or before[-1:])})
        pool = next(done for done in reversed(seen) if done.name == name)
        if sum(done.name == name for done in seen) > 1:
            raise RecastError(f"{name} of {self.kind} pools more than once: it cannot be replaced")
        if not after and (found := self._before_classifier(pool, seen)) is not None:
            return found
        takes, averages = self._layout(pool)
        dim = pool.input.shape[1 if takes == "NCHW" else 3]
        if pool.output.numel() != dim * len(pool.output):
            raise RecastError(
                f"{name} of {self.kind} gives {pool.output[0].numel()} numbers for {dim} channels (average and "
                "maximum): attention pooling gives one a channel; build the network with global_pool='avg'"
            )
        if not self.all_comes_through(pool):
            return None  # it is a branch, and the network pools in code besides
        gives: Layout = "flat" if pool.output.dim() == 2 else "NCHW" if pool.output.shape[1] == dim else "NHWC"
        classifier, positions = self.classifier([d for d in seen if d.name in after]), pool.input[0].numel() // dim
        return Place("module", name, dim, takes, gives, 0, classifier, averages, positions)

    @staticmethod
    def _layout(pool: _Done) -> tuple[Layout, bool]:
        """What a pooling takes, and whether it averages. Others than averages by the number of channels."""
        for layout in ("NCHW", "NHWC"):
            if _same(pool.input.mean(MEANS[layout]).flatten(), pool.output.flatten()):
                return layout, True
        is_last = pool.output[0].numel() == pool.input.shape[3] != pool.input.shape[1]
        return ("NHWC" if is_last else "NCHW"), False

    def _before_classifier(self, pool: _Done, seen: list[_Done]) -> Place | None:
        """A network that classifies every position and averages then (SqueezeNet) is pooled before its classifier."""
        last = next((done for done in reversed(seen) if isinstance(done.module, nn.Conv2d)), None)
        if last is None or not _same(pool.output.flatten(1), self.logits) or last.output.shape != pool.input.shape:
            return None
        if not (_same(last.output, pool.input) or _same(last.output.relu(), pool.input)):
            return None  # what is pooled are features, and there is no classifier
        names = [name for name, _ in self.order]
        for name in reversed(names[: names.index(last.name)]):
            if isinstance(self.modules[name], nn.Sequential) and _same(self.watch({name})[-1].output, last.input):
                dim, positions = last.input.shape[1], last.input[0, 0].numel()
                return Place("append", name, dim, "NCHW", "NCHW", 0, last.name, averages=False, positions=positions)
        return None

    # --- pooling in code ---

    def head(self) -> Place | None:
        """A network of timm whose `forward_head` pools: it gets a single position, in the layout of its features.

        None if it has no such head, or one that cannot take a single position.
        """
        model: Any = self.model
        if not callable(getattr(model, "forward_head", None)):
            return None
        try:
            x = model.forward_features(self.example)
            is_answer = _same(model.forward_head(x), self.logits)
        except (AttributeError, TypeError, NotImplementedError):
            return None
        if is_answer and isinstance(x, tuple | list):
            raise RecastError(
                f"{self.kind} pools {len(x)} maps or sets of tokens for one answer: there is no one place for "
                "attention pooling"
            )
        if not is_answer or not isinstance(x, Tensor) or x.dim() not in (3, 4) or _is_one(x.shape):
            return None
        answer = self.probe(model.forward_head, x)
        if answer is None:
            return None
        layouts, prefixes = self._forms(x)

        def place(layout: Layout, prefix: int, averages: bool) -> Place:
            dim = _channels(x, layout)
            positions = x[0].numel() // dim - prefix
            return Place("head", "", dim, layout, layout, prefix, self.classifier(answer[1]), averages, positions)

        for layout in layouts:
            for prefix in prefixes:
                found = self.probe(model.forward_head, _single(x, layout, prefix))
                if found is not None and _same(found[0], answer[0]):
                    return place(layout, prefix, averages=True)
        # the head reads the class token, or pools otherwise: it takes the pooled position all the same
        width = getattr(model, "num_features", None)
        layout = next((form for form in layouts if _channels(x, form) == width), layouts[0])
        found = self.probe(model.forward_head, _single(x, layout, prefixes[0]))
        if found is None or found[0].shape != answer[0].shape:
            return None
        return place(layout, prefixes[0], averages=False)

    def _forms(self, x: Tensor) -> tuple[list[Layout], list[int]]:
        """Layouts and numbers of leading tokens that features may have, the likeliest first."""
        if x.dim() == 4:
            return ["NCHW", "NHWC"], [0]
        told = getattr(self.model, "num_prefix_tokens", None)
        patches = getattr(getattr(self.model, "patch_embed", None), "num_patches", None)
        derived = x.shape[1] - patches if isinstance(patches, int) else None
        likely = [n for n in (told, derived) if isinstance(n, int) and 0 <= n <= min(MAX_PREFIX, x.shape[1] - 1)]
        return ["NLC"], list(dict.fromkeys([*likely, 0]))

    def after_sequential(self) -> Place | None:
        """An nn.Sequential whose map may be averaged, after a ReLU or not, and the answer stays what it is."""
        answer = self.probe(self.model, self.example)
        names = [
            name
            for name, shape in self.order
            if isinstance(self.modules[name], nn.Sequential) and len(shape) == 4 and not _is_one(shape)
        ]
        for name in list(dict.fromkeys(reversed(names)))[:TRIED]:
            for relu in (False, True):
                shapes: list[torch.Size] = []

                def average(output: Any, relu: bool = relu, shapes: list[torch.Size] = shapes) -> Tensor | None:
                    if not isinstance(output, Tensor) or output.dim() != 4:
                        return None
                    shapes.append(output.shape)
                    return (output.relu() if relu else output).mean((2, 3), keepdim=True)

                with replaced_output(self.modules[name], average):
                    found = self.probe(self.model, self.example)
                if found is None or answer is None or len(shapes) != 1 or not _same(found[0], answer[0]):
                    continue
                if self.all_comes_through(self.watch({name})[-1]):
                    classifier, dim, positions = self.classifier(found[1]), shapes[0][1], shapes[0][2:].numel()
                    return Place("append", name, dim, "NCHW", "NCHW", 0, classifier, True, positions, relu)
        return None


@contextmanager
def _watched(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[list[_Done]]:
    seen: list[_Done] = []
    taken: list[Tensor | None] = []  # calls end in the reverse of the order in which they begin

    def before(_name: str, _module: nn.Module, inputs: Any) -> None:
        first = _first(inputs)
        taken.append(None if first is None else first.clone())  # the module may change it in place

    def after(name: str, module: nn.Module, _inputs: Any, output: Any) -> None:
        x, y = taken.pop(), _first(output)
        if x is not None and y is not None:
            seen.append(_Done(name, module, x, y.clone()))

    with hooked(modules, before, after):
        yield seen


def _single(x: Tensor, layout: Layout, prefix: int) -> Tensor:
    """The mean over positions, as one position; of tokens also in the place of those before the patches."""
    one = x[:, prefix:].mean(MEANS[layout], keepdim=True)
    return one.expand(-1, prefix + 1, -1) if layout == "NLC" else one


def _channels(x: Tensor, layout: Layout) -> int:
    return x.shape[1 if layout == "NCHW" else -1]


def _is_linear(module: nn.Module) -> bool:
    """A linear layer, or a 1×1 convolution."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))


def _is_one(shape: torch.Size) -> bool:
    """Whether a shape is that of a single position: (B, C), (B, C, 1, 1), (B, 1, 1, C) or (B, 1, C)."""
    if len(shape) == 4:
        return tuple(shape[2:]) == (1, 1) or tuple(shape[1:3]) == (1, 1)
    return len(shape) <= 2 or shape[1] == 1


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, to `TOLERANCE` of the largest."""
    if a.shape != b.shape:
        return False
    if a.is_meta or b.is_meta:
        return True  # nothing but shapes to go by
    a, b = a.float(), b.float()
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


def _first(values: Any) -> Tensor | None:
    """The tensor that a module takes or gives; the first of several."""
    if isinstance(values, Tensor):
        return values
    return next((v for v in values if isinstance(v, Tensor)), None) if isinstance(values, tuple | list) else None
