"""Wakefulness: how far content attention is at work in every layer, and whether an optimizer trains it.

A content map that is uniform gives every query the global mean, whatever its gate says: such a head sleeps, and a run
whose heads sleep says nothing about attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from recast.analysis.queries import logits_and_bias
from recast.analysis.thresholds import AWAKE, UNIFORM
from recast.config import typed
from recast.errors import RecastError, listed
from recast.layers.attention_pool import attention_pools
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer, recast_layers
from recast.layers.config import GaussianGate
from recast.layers.functional import expand_heads
from recast.layers.functional.beside import attention_map, query_pixels
from recast.layers.functional.maps import content_rows, real_keys
from recast.layers.functional.operands import block_diagonal
from recast.layers.gpsa import GPSA
from recast.modes import in_eval
from recast.surgery.parameters import LINEAR_GATE_LR_RATIO
from recast.surgery.wake import relative_entropy
from recast.surgery.wrappers import whole
from recast.tracing.batches import read_batches
from recast.tracing.examples import run_example
from recast.tracing.hooks import hooked

MAX_QUERIES = 32
PART = 8
"""Images whose maps are held at a time."""
DIGITS = 6
"""Significant ones, of sums in single precision."""
TINY = 1e-30

NAMES = ("entropy", "distance", "content_share", "attention_share")


@dataclass(frozen=True)
class LayerAwake:
    """Content attention of a layer, and its parameters by what keeps them from training."""

    heads: int
    """Heads that have a content map."""
    attending: int
    """Of these, heads that make at least 1 % of the layer's output beyond what a global mean would make."""
    open_gates: int
    """Of these, heads whose gate is not 0; C-MHSA has no gates, and all are open."""
    entropy: float
    """Of the content maps over its maximum, in the mean over the heads; 1: uniform."""
    added: float
    """Share of the layer's output that content makes, of the head with the largest: ‖γ C X W‖ / ‖y − b‖."""
    outside: tuple[str, ...] = ()
    """Parameters that could be trained, and are in no group of the optimizer."""
    frozen: tuple[str, ...] = ()
    """Parameters that do not require a gradient."""
    without_gradient: tuple[str, ...] = ()
    """Parameters in the optimizer that got no gradient, while others of the network have one."""


class Awake(dict[str, LayerAwake]):
    """Recast layers by name, with what attends in each; printed, what there is to know in a few sentences."""

    gates_as_slow: str = ""
    """The layer whose gates learn no faster than its kernel, if an optimizer trains them so."""
    pool_outside: str = ""
    """The attention pooling with trainable parameters that are in no group of the optimizer."""

    @property
    def heads(self) -> int:
        """Heads that have a content map."""
        return sum(layer.heads for layer in self.values())

    @property
    def attending(self) -> int:
        """Heads that attend."""
        return sum(layer.attending for layer in self.values())

    def __repr__(self) -> str:
        with_content = [layer for layer in self.values() if layer.heads]
        opened, added = sum(layer.open_gates for layer in with_content), max((x.added for x in with_content), default=0)
        text = [
            f"{self.attending} of {self.heads} heads attend ({opened} of {self.heads} gates open, attention makes at "
            f"most {added:.2g} of a layer's output)"
        ]
        if self.attending < self.heads and fmean(layer.entropy for layer in with_content) >= UNIFORM:
            text.append("the maps are nearly uniform: recast.wake_(model, images) starts them from images")
        for kind, what in (
            ("outside", "in no optimizer group: build the optimizer after recast_, or use recast_during_training_"),
            ("frozen", "frozen"),
            ("without_gradient", "without gradient"),
        ):
            parameters = {name: names for name, layer in self.items() if (names := getattr(layer, kind))}
            if parameters:
                count, of = sum(map(len, parameters.values())), listed([name or "the model" for name in parameters], 1)
                text.append(f"{count} parameter{'s' * (count > 1)} of {of} {'are' if count > 1 else 'is'} {what}")
        if self.gates_as_slow:
            text.append(
                f"gates learn no faster than the kernel ({self.gates_as_slow}): recast.param_groups gives them "
                f"{LINEAR_GATE_LR_RATIO:.0f} times its rate"
            )
        if self.pool_outside:
            text.append(f"{self.pool_outside} is in no optimizer group: build the optimizer after attention_pool_")
        return "; ".join(text)


@typed("model", "optimizer")
def awake(model: nn.Module, images: Tensor | Iterable[Any], optimizer: Optimizer | None = None) -> Awake:
    """Measure whether content attention is at work in every recast layer, and whether an optimizer trains it.

    A head attends if ‖γ (C − 1/M) X W‖ ≥ 0.01 ‖y − b‖: it does more than average the image (`wakefulness`). The model
    runs in eval mode and is left as it was. Call it before `zero_grad`, to see which parameters got a gradient.

    Args:
        model: a recast network.
        images: normalised images (B, C, H, W), or other batches as `wake_` takes them; 32 suffice.
        optimizer: the one that trains the network.

    Returns:
        `Awake`, layer name → `LayerAwake`; printed, the result in a few sentences.

    Raises:
        RecastError: for a model without recast layers, layers that the images do not reach, and values that are not
            finite.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> images = torch.randn(4, 3, 8, 8)
        >>> model = recast.recast_(model, recast.plan(model, images))
        >>> found = recast.awake(model, images, optimizer)
        >>> found.attending, found["0"].outside
        (0, ('query', 'key', 'content', 'gamma'))
    """
    model = whole(model)
    if not (layers := recast_layers(model)):
        raise RecastError(f"{type(model).__name__} has no recast layer")
    measured, result = wakefulness(model, images), Awake()
    rates: dict[int, float] = {}
    if optimizer is not None:
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    is_backward_done = any(p.grad is not None for p in model.parameters())
    for name, layer in layers.items():
        shares = measured.get(name)
        if shares is None and layer.content_heads:
            raise RecastError(f"{name or 'the layer'} got no images: pass at least one batch")
        of = {key: [v for v in values if v is not None] for key, values in (shares or {}).items()}
        if not all(map(math.isfinite, of.get("attention_share", ()))):
            raise RecastError(f"{name} got NaN or infinite values: check the images, and the weights before it")
        parameters = dict(layer.named_parameters()) if optimizer is not None else {}
        trained = {key: p for key, p in parameters.items() if p.requires_grad}
        outside = tuple(key for key, p in trained.items() if id(p) not in rates)
        frozen = tuple(key for key, p in parameters.items() if not p.requires_grad)
        idle = tuple(key for key, p in trained.items() if is_backward_done and id(p) in rates and p.grad is None)
        counts = len(layer.content_heads), sum(share >= AWAKE for share in of.get("attention_share", ())), _open(layer)
        entropy, share = fmean(of.get("entropy", [1.0])), max(of.get("content_share", [0.0]))
        result[name] = LayerAwake(*counts, entropy, share, outside, frozen, idle)
        gate = None if isinstance(layer, CMHSA) else layer._parameters.get("gamma")
        kernel = max(trained.values(), key=Tensor.numel, default=None)
        if gate is not None and kernel is not None and 0 < rates.get(id(gate), 0) <= rates.get(id(kernel), 0):
            result.gates_as_slow = result.gates_as_slow or name or "the model"
    for name, pool in attention_pools(model).items() if optimizer is not None else ():
        if any(p.requires_grad and id(p) not in rates for p in pool.parameters()):
            result.pool_outside = name or "the model"
    return result


def _open(layer: RecastLayer) -> int:
    """Return the number of heads whose content gate is not 0."""
    if isinstance(layer, GPSA):
        return len(layer.open_maps()[1])
    return len(layer.content_heads) if isinstance(layer, CMHSA) else int((layer.gate_sizes() > 0).sum())


@torch.no_grad()
def wakefulness(
    model: nn.Module, images: Tensor | Iterable[Any], queries: int = MAX_QUERIES
) -> dict[str, dict[str, list[float | None]]]:
    """Measure every recast layer and head, in the mean over images and evenly spaced queries, in eval mode:

        entropy          −Σ_k C_qk ln C_qk / ln M      of the content map C over the M pixels: 1 where it is uniform
        distance         ½ Σ_k |C_qk − 1/M|            total variation from the uniform map, 0 to 1
        content_share    ‖γ C X W_val W_out^h‖ / ‖y − b‖          what content makes of the layer's output
        attention_share  ‖γ (C − 1/M) X W_val W_out^h‖ / ‖y − b‖  what a global mean would not have made

    Beside a convolution W_con stands for W_val W_out^h, and b is 0: the bias is the convolution's own.

    ‖·‖ is the root of the mean square over images, queries and channels. C-MHSA has one softmax of content and bias:
    both shares are those of softmax(QKᵀ/√D + B) − softmax(B) there. None stands for a head without a content map.
    """
    layers = {name: layer for name, layer in recast_layers(model).items() if layer.content_heads}
    sums = {name: torch.zeros(4, layer.num_heads, dtype=torch.float64) for name, layer in layers.items()}
    outputs, counts = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0)

    def see(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(layer, RecastLayer)
        for x, y in zip(inputs[0].split(PART), output.split(PART), strict=True):
            measured, norm = of_batch(layer, x, y, queries)
            sums[name] += measured
            outputs[name] += norm
            counts[name] += len(y)

    device = next(model.parameters(), torch.empty(0)).device
    with in_eval(model), hooked(layers.items(), after=see):
        for batch, _ in read_batches(model, images):
            run_example(model, tree_map_only(Tensor, lambda tensor: tensor.to(device), batch))
    return {
        name: summary(layers[name], total, outputs[name], counts[name]) for name, total in sums.items() if counts[name]
    }


def summary(layer: RecastLayer, sums: Tensor, outputs: float, images: int) -> dict[str, list[float | None]]:
    """Return the means of `wakefulness` from what `of_batch` gives for that many images, added up."""
    means = torch.cat([sums[:2] / images, (sums[2:] / max(outputs, TINY)).sqrt()])
    values = [
        [float(f"{value:.{DIGITS}g}") if head in layer.content_heads else None for head, value in enumerate(row)]
        for row in means.tolist()
    ]
    return dict(zip(NAMES, values, strict=True))


def of_batch(layer: RecastLayer, x: Tensor, output: Tensor, queries: int) -> tuple[Tensor, float]:
    """Return sums over images of entropy, distance and squared shares by head, (4, H), and of squared outputs."""
    if isinstance(layer, AttentionBeside):
        return _beside(layer, x, output, queries)
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    outputs = output.flatten(2).transpose(1, 2)
    at = torch.arange(0, outputs.shape[1], math.ceil(outputs.shape[1] / queries), device=x.device)
    attends = isinstance(layer.config, GaussianGate) and layer.config.attend_padding
    visible = real_keys(geometry, height, width, x.device) | attends
    uniform = visible / visible.sum()
    if isinstance(layer, CMHSA):
        logits, bias = (part(at) for part in logits_and_bias(layer, x))
        fine = torch.promote_types(logits.dtype, torch.float32)  # half precision rounds a bias's sum with content
        logits, bias = logits.to(fine), bias.to(fine)
        content, gamma = logits.softmax(-1), torch.ones(layer.num_heads, device=x.device)
        added = [(logits + bias).softmax(-1) - bias.softmax(-1)] * 2
    else:
        weights = expand_heads(layer.weights())
        content, gamma = content_rows(x, weights)(at), weights.gates.content
        added = [content, content - uniform]
    pixels = content[..., visible]
    pixels = pixels / pixels.sum(-1, keepdim=True)  # C-MHSA sees padding, too
    tokens = geometry.pad(x).flatten(2).transpose(1, 2)
    parts = [_squares(layer, tokens, gamma[:, None, None] * maps) for maps in added]
    distance = (pixels - 1 / pixels.shape[-1]).abs().sum(-1).mean(-1) / 2
    totals = torch.stack([values.sum(0) for values in (relative_entropy(pixels), distance, *parts)]).double().cpu()
    outputs = outputs[:, at] if layer.bias is None else outputs[:, at] - layer.bias
    return totals, float(outputs.square().mean((1, 2)).sum())


def _beside(layer: AttentionBeside, x: Tensor, output: Tensor, queries: int) -> tuple[Tensor, float]:
    """Return `of_batch` of attention beside a convolution."""
    w, outputs = layer.weights(), output.flatten(2).transpose(1, 2)
    at = torch.arange(0, outputs.shape[1], math.ceil(outputs.shape[1] / queries), device=x.device)
    content = attention_map(x, query_pixels(x, *output.shape[2:]).flatten(2)[:, :, at, None], w)
    distance = (content - 1 / content.shape[-1]).abs().sum(-1).mean(-1) / 2
    values = x.flatten(2).transpose(1, 2) @ (w.gamma[:, None] * block_diagonal(w.content, w.groups)).T
    parts = [
        (maps[:, 0] @ values).square().mean((1, 2))[:, None] for maps in (content, content - 1 / content.shape[-1])
    ]
    totals = torch.stack([part.sum(0) for part in (relative_entropy(content), distance, *parts)]).double().cpu()
    return totals, float(outputs[:, at].square().mean((1, 2)).sum())


def _squares(layer: GPSA | CMHSA, tokens: Tensor, maps: Tensor) -> Tensor:
    """Mean square over queries and outputs of A_h X W_val W_out^h: tokens (B, M, C), maps (B, H, n, M) → (B, H)."""

    def times(tokens: Tensor, matrix: Tensor) -> Tensor:  # maps may be of a finer dtype
        return tokens.to(maps) @ block_diagonal(matrix, layer.groups).T.to(maps)

    values = tokens.to(maps) if layer.value is None else times(tokens, layer.value)
    parts = [times(maps[:, h] @ values, W_out) for h, W_out in enumerate(layer.weight.flatten(2).unbind(-1))]
    return torch.stack([part.square().mean((1, 2)) for part in parts], 1)
