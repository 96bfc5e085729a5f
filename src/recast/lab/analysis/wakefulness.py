"""Wakefulness: distance of every head's content map from a uniform one, and its share in the output.

A content map that is uniform gives every query the global mean, whatever its gate says: such a head sleeps, and a run
whose heads sleep says nothing about attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from recast.lab.analysis.blocks import Images, device_of, each_batch
from recast.lab.analysis.queries import logits_and_bias
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import CMHSA, RecastLayer, recast_layers
from recast.layers.config import GaussianGate
from recast.layers.functional import expand_heads
from recast.layers.functional.beside import content_map, query_pixels
from recast.layers.functional.maps import content_rows, real_keys
from recast.layers.functional.operands import block_diagonal
from recast.layers.gpsa import GPSA
from recast.modes import in_eval
from recast.surgery.wake import relative_entropy
from recast.tracing.hooks import hooked

MAX_QUERIES = 32
PART = 8
"""Images whose maps are held at a time."""
DIGITS = 6
"""Significant ones, of sums in single precision."""
TINY = 1e-30

NAMES = ("entropy", "distance", "content_share", "attention_share")


@torch.no_grad()
def wakefulness(
    model: nn.Module, images: Images, queries: int = MAX_QUERIES
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
            measured, norm = _of_batch(layer, x, y, queries)
            sums[name] += measured
            outputs[name] += norm
            counts[name] += len(y)

    with in_eval(model), hooked(layers.items(), after=see):
        for batch in each_batch(images):
            model(batch.to(device_of(model), copy=True))  # a network may write into its input
    measured = {}
    for name, total in sums.items():
        if counts[name]:
            total[2:] = (total[2:] / max(outputs[name], TINY)).sqrt()
            total[:2] /= counts[name]
            content = layers[name].content_heads
            values = [
                [float(f"{value:.{DIGITS}g}") if head in content else None for head, value in enumerate(row)]
                for row in total.tolist()
            ]
            measured[name] = dict(zip(NAMES, values, strict=True))
    return measured


def _of_batch(layer: RecastLayer, x: Tensor, output: Tensor, queries: int) -> tuple[Tensor, float]:
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
    """Return `_of_batch` of attention beside a convolution."""
    w, outputs = layer.weights(), output.flatten(2).transpose(1, 2)
    at = torch.arange(0, outputs.shape[1], math.ceil(outputs.shape[1] / queries), device=x.device)
    content = content_map(x, query_pixels(x, *output.shape[2:]).flatten(2)[:, :, at, None], w)
    distance = (content - 1 / content.shape[-1]).abs().sum(-1).mean(-1) / 2
    values = x.flatten(2).transpose(1, 2) @ (w.gamma * block_diagonal(w.content, w.groups)).T
    parts = [
        (maps[:, 0] @ values).square().mean((1, 2))[:, None] for maps in (content, content - 1 / content.shape[-1])
    ]
    totals = torch.stack([part.sum(0) for part in (relative_entropy(content), distance, *parts)]).double().cpu()
    return totals, float(outputs[:, at].square().mean((1, 2)).sum())


def _squares(layer: GPSA | CMHSA, tokens: Tensor, maps: Tensor) -> Tensor:
    """Mean square over queries and outputs of A_h X W_val W_out^h: tokens (B, M, C), maps (B, H, n, M) → (B, H)."""
    values = tokens if layer.value is None else tokens @ block_diagonal(layer.value, layer.groups).T
    kernels = layer.weight.flatten(2).unbind(-1)
    parts = [maps[:, h] @ values @ block_diagonal(W_out, layer.groups).T for h, W_out in enumerate(kernels)]
    return torch.stack([part.square().mean((1, 2)) for part in parts], 1)
