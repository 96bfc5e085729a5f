"""Find the global pooling of a network by running it: inputs and outputs say more than names."""

from __future__ import annotations

from typing import Any

import timm.layers
import torch
from timm.layers import adaptive_avgmax_pool as timm_pools
from torch import Tensor, nn

from recast.errors import RecastError, errors_in
from recast.modes import computes_as, in_eval
from recast.surgery.pooling.probe import ModuleCall, Probe, is_one, same
from recast.surgery.records import Layout, Place
from recast.tracing.examples import Example, arguments_of
from recast.tracing.hooks import undisturbed

POOLS: tuple[type[nn.Module], ...] = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)
POOLS += tuple(kind for kind in vars(timm_pools).values() if isinstance(kind, type) and issubclass(kind, nn.Module))
BY_ATTENTION = tuple(
    kind
    for name, kind in vars(timm.layers).items()
    if name in ("AttentionPool2d", "AttentionPoolLatent", "AttentionPoolPrr", "RotAttentionPool2d")
)
MEANS: dict[Layout, tuple[int, ...]] = {"NCHW": (2, 3), "NHWC": (1, 2), "NLC": (1,)}
"""The dimensions of the positions."""
CHANNELS: dict[Layout, int] = {"NCHW": 1, "NHWC": 3, "NLC": 2}
"""The dimension of the channels."""
TRIED = 6
"""Number of nn.Sequential modules that are tried, from the last."""
MAX_PREFIX = 16
"""More tokens than this before those of the patches are no class, distillation or register tokens."""


@torch.no_grad()
def find_place(model: nn.Module, example: Example) -> Place:
    """Find where `model` pools the positions of its last map (or its tokens), on an example in eval mode.

    Raises RecastError for a network that does not take the example, gives anything but logits (B, K), pools by
    attention already, or pools where nothing can be put in its place.
    """
    kind = type(model).__name__
    if name := next((name for name, module in model.named_modules() if isinstance(module, BY_ATTENTION)), None):
        raise RecastError(f"{kind} pools by attention already ({name}): build it with another global_pool")
    with in_eval(model), undisturbed(model), errors_in(f"finding where {kind} pools"):
        net = Probe(model, example)
        place = _pooling_module(net) or _head(net) or _after_sequential(net)
    if place is None:
        raise RecastError(
            f"cannot tell where {kind} pools: expected a pooling module that gives one position "
            "(nn.AdaptiveAvgPool2d(1)), timm's forward_head, or an nn.Sequential whose output is averaged in code"
        )
    return place


def _pooling_module(net: Probe) -> Place | None:
    """Return the last pooling module, if only single positions come after it."""
    pools = [i for i, (n, shape) in enumerate(net.order) if computes_as(net.modules[n], *POOLS) and is_one(shape)]
    if not pools or any(not is_one(shape) for _, shape in net.order[pools[-1] + 1 :]):
        return None  # none, or the last is of a channel attention: there are maps after it
    name = net.order[pools[-1]][0]
    after = {n for n, _ in net.order[pools[-1] + 1 :] if n in net.linear}
    calls = net.watch({name, *after})
    pool = next(call for call in reversed(calls) if call.name == name)
    if sum(call.name == name for call in calls) > 1:
        raise RecastError(f"{name} of {net.kind} pools more than once: it cannot be replaced")
    takes, averages = _layout(pool)
    dim = pool.input.shape[CHANNELS[takes]]
    if pool.output.numel() != dim * len(pool.output):
        raise RecastError(
            f"{name} of {net.kind} gives {pool.output[0].numel()} numbers for {dim} channels (average and "
            "maximum): attention pooling gives one a channel; build the network with global_pool='avg'"
        )
    if not net.all_comes_through(pool):
        return None  # it is a branch, and the network also pools in code
    gives: Layout = "flat" if pool.output.dim() == 2 else "NCHW" if pool.output.shape[1] == dim else "NHWC"
    return Place("module", name, dim, takes, gives, 0, net.classifier([d for d in calls if d.name in after]), averages)


def _layout(pool: ModuleCall) -> tuple[Layout, bool]:
    """Return the layout that a pooling takes, and whether it averages; else the layout follows from the channels."""
    for layout in ("NCHW", "NHWC"):
        if same(pool.input.mean(MEANS[layout]).flatten(), pool.output.flatten()):
            return layout, True
    is_last = pool.output[0].numel() == pool.input.shape[3] != pool.input.shape[1]
    return ("NHWC" if is_last else "NCHW"), False


def averages(pool: nn.Module, place: Place) -> bool | None:
    """Return True if the module at a place averages the positions of a channel; None if it is no such pooling."""
    sides = timm.layers.to_2tuple(getattr(pool, "kernel_size", 4))
    x = torch.rand(1, place.dim, *sides, generator=torch.Generator().manual_seed(0), device="cpu")
    x = x.permute(0, 2, 3, 1) if place.takes == "NHWC" else x
    try:
        output = pool.forward(x) if isinstance(pool, POOLS) else x  # without its hooks
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None
    return _layout(ModuleCall("", pool, x, output))[1] if output.numel() == place.dim else None


def _head(net: Probe) -> Place | None:
    """Return the head of a timm network whose `forward_head` pools: it gets one position in the features' layout.

    None if it has no such head, or one that cannot take a single position.
    """
    model: Any = net.model
    args, kwargs = arguments_of(net.example)
    if not callable(getattr(model, "forward_head", None)) or len(args) + len(kwargs) != 1:
        return None
    try:
        x = model.forward_features(*args, *kwargs.values())
        is_answer = same(model.forward_head(x), net.logits)
    except (AttributeError, TypeError, NotImplementedError):
        return None
    if is_answer and isinstance(x, tuple | list):
        raise RecastError(
            f"{net.kind} pools {len(x)} maps or sets of tokens, and attention pooling requires a single one"
        )
    if not is_answer or not isinstance(x, Tensor) or x.dim() not in (3, 4) or is_one(x.shape):
        return None
    answer = net.probe(model.forward_head, x)
    if answer is None:
        return None
    forms = _forms(net, x)
    width = getattr(model, "num_features", None)
    likeliest = next((form for form in forms if x.shape[CHANNELS[form[0]]] == width), forms[0])
    # a head that reads the class token, or pools otherwise, takes the pooled position all the same
    for (layout, prefix), averages in (*((form, True) for form in forms), (likeliest, False)):
        result = net.probe(model.forward_head, single(x, layout, prefix))
        if result is not None and (same(result[0], answer[0]) if averages else result[0].shape == answer[0].shape):
            dim = x.shape[CHANNELS[layout]]
            return Place("head", "", dim, layout, layout, prefix, net.classifier(answer[1]), averages)
    return None


def _forms(net: Probe, x: Tensor) -> list[tuple[Layout, int]]:
    """Return the layouts and numbers of leading tokens that features may have, the likeliest first."""
    if x.dim() == 4:
        return [("NCHW", 0), ("NHWC", 0)]
    stated = getattr(net.model, "num_prefix_tokens", None)
    patches = getattr(getattr(net.model, "patch_embed", None), "num_patches", None)
    derived = x.shape[1] - patches if isinstance(patches, int) else None
    likely = [n for n in (stated, derived) if isinstance(n, int) and 0 <= n <= min(MAX_PREFIX, x.shape[1] - 1)]
    return [("NLC", n) for n in dict.fromkeys([*likely, 0])]


def single(x: Tensor, layout: Layout, prefix: int = 0) -> Tensor:
    """Return the mean over positions as one position; for tokens, also in place of those before the patches."""
    mean = x[:, prefix:].mean(MEANS[layout], keepdim=True)
    return mean.expand(-1, prefix + 1, -1) if layout == "NLC" else mean


def _after_sequential(net: Probe) -> Place | None:
    """Return the nn.Sequential whose map, after a ReLU or not, can be averaged without changing the answer."""
    names = [n for n, s in net.order if len(s) == 4 and not is_one(s) and computes_as(net.modules[n], nn.Sequential)]
    for name in list(dict.fromkeys(reversed(names)))[:TRIED]:
        calls = net.watch({name})
        for relu in (False, True):
            x = calls[-1].output.relu() if relu else calls[-1].output
            result = net.answer_if(calls[-1].module, single(x, "NCHW"), net.example)
            is_answer = result is not None and net.answer is not None and same(result[0], net.answer[0])
            if result is not None and is_answer and len(calls) == 1 and net.all_comes_through(calls[0]):
                return Place("append", name, x.shape[1], "NCHW", "NCHW", 0, net.classifier(result[1]), True, relu)
    return None
