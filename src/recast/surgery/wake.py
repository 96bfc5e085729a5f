"""`wake_`: a start from which content attention can learn, with queries and keys from a layer's inputs.

With a gate at 0 the layer is exactly its convolution for any queries and keys, so their start is free. With W_key = 0
every content map is uniform, and a gate can first only learn whether a global mean helps. This start gives every head a
map that depends on the image.

    W_qry^h = W_key^h = a · R_h U        U (K, C): leading principal components of the layer's input, in the complement
                                         of its mean; R_h (D, K): a different rotation for every head

Beside a convolution queries and keys have a rotation each, unless query_key="similar". With one rotation for both,
pixels begin by reading pixels like them, and photographs were compared far less well (studies/beside.py).

The mean is projected out because queries and keys have no bias: the constant W μ would draw every query to the same
keys. a sets the standard deviation of a query's logits over its keys to `logit_std`, averaged over queries and images.
(With one rotation, W_qry W_keyᵀ is close to a multiple of the identity on the features' subspace, the mimetic start of
Trockman & Kolter 2023, arXiv:2305.09828, fitted to the data.)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from recast.config import Positive, Seed, typed
from recast.errors import RecastError, listed, suggest
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import RecastLayer, recast_layers
from recast.layers.config import GaussianGate
from recast.layers.functional.maps import query_tokens
from recast.modes import in_eval
from recast.surgery.wrappers import whole
from recast.tracing.batches import read_batches
from recast.tracing.examples import run_example
from recast.tracing.hooks import hooked

VARIANCE = 0.99
"""Share of the variance that the principal components in use explain."""
SAMPLE = 16
"""Images of a layer's input that are kept to measure the logits on."""
MAX_QUERIES = 128
ALIKE = 1 - 1e-4
"""Entropy of content maps over its maximum above which nothing distinguishes a layer's pixels."""
TINY = 1e-12
LEAST_SIZE = 1 / 8
"""Least root mean square of W_qry and W_key beside a convolution. One update of Adam moves a weight by about the rate,
however small the weight is: those of many or large inputs, which are small, would be gone in a few updates."""


class _Moments:
    """Mean and covariance of a layer's tokens, and a few of its inputs, one batch for each size."""

    def __init__(self) -> None:
        self.images, self.count, self.sum, self.products = 0, 0, torch.zeros(()), torch.zeros(())
        self.sample: dict[torch.Size, Tensor] = {}

    def add(self, x: Tensor) -> None:
        tokens = x.flatten(2).transpose(1, 2).flatten(0, 1).double()
        self.images += len(x)
        self.count += len(tokens)
        self.sum = self.sum + tokens.sum(0).cpu()
        self.products = self.products + (tokens.T @ tokens).cpu()
        missing = SAMPLE - sum(len(images) for images in self.sample.values())
        if missing > 0:
            parts = [self.sample[size]] if (size := x.shape[1:]) in self.sample else []
            self.sample[size] = torch.cat([*parts, x[:missing]])  # a copy: a view would hold the whole batch

    def components(self, least: int) -> Tensor:
        """Return the leading principal components (K, C) orthogonal to the mean, at least `least` if possible."""
        mean = self.sum / self.count
        covariance = self.products / self.count - mean.outer(mean)
        if (length := mean.norm()) > 0:
            away = torch.eye(len(mean), dtype=mean.dtype) - mean.outer(mean) / length**2
            covariance = away @ covariance @ away
        variances, vectors = torch.linalg.eigh(covariance)
        variances, vectors = variances.flip(0).clamp_min(0), vectors.flip(1)
        used = int((variances.cumsum(0) < VARIANCE * variances.sum()).sum()) + 1
        return vectors[:, : max(used, min(least, len(mean) - 1), 1)].T


@dataclass(frozen=True)
class Woken:
    """Entropy of a layer's content maps over its maximum, before and after waking, averaged over the heads."""

    layer: str
    entropy_before: float
    entropy_after: float


def waking_summary(woken: Sequence[Woken]) -> str:
    """Return the result of waking in one line."""
    before, after = (fmean(getattr(layer, f"entropy_{when}") for layer in woken) for when in ("before", "after"))
    return (
        f"queries and keys from the images: entropy of the content maps {before:.3f} → {after:.3f} of its maximum "
        f"(mean over {len(woken)} layer{'' if len(woken) == 1 else 's'})"
    )


@typed("model", "batches", "logit_std", "seed", "layers")
@torch.no_grad()
def wake_(
    model: nn.Module,
    batches: Tensor | Iterable[Any],
    logit_std: Positive = 1.5,
    seed: Seed = 0,
    layers: Collection[str] | None = None,
    *,
    averages: Iterable[nn.Module] = (),
) -> list[Woken]:
    """Set queries and keys of recast layers from images, in place.

        W_qry^h = W_key^h = a · R_h U      U: principal components of the layer's input, R_h: a random rotation per head

    Beside a convolution W_qry and W_key have a rotation each, unless query_key="similar", and a factor `qk_scale` makes
    up for entries that would be smaller than `LEAST_SIZE` on average.
    A layer whose gates are 0 stays exactly its convolution. C-MHSA, without gates, does not: content shares the softmax
    with position, and the weight on pixels other than the head's grows at least a hundredfold. The same images and seed
    give the same result. Do not wake one network from several threads.

    Args:
        model: a recast network.
        batches: normalised images (B, C, H, W), another example as `plan` takes it, or a list or loader of examples,
            with labels or without. A pair is (images, labels) unless the network takes two arguments and the second is
            not an integer tensor.
        logit_std: standard deviation of a query's logits over its keys.
        seed: of the rotations.
        layers: names of the layers to wake. Default: all.
        averages: running averages of the weights (timm's `ModelEmaV3.module`, torch's AveragedModel), which get the
            same queries and keys.

    Returns:
        One `Woken` per layer, in the order of the network: the entropy of its content maps before and after.

    Raises:
        RecastError: before any change, for a model or an average without such layers, averages with others, layers
            whose content maps were all pruned or whose queries or keys are parametrised, no images, and images that
            are not finite.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> images = torch.randn(4, 3, 8, 8)
        >>> model = recast.recast_(model, recast.plan(model, images))
        >>> [woken.layer for woken in recast.wake_(model, images)]
        ['0']
    """
    model = whole(model)
    chosen = _layers_to_wake(model, layers)
    copies = [_layers_to_wake(whole(average), chosen) for average in averages]
    if other := [name for name in chosen for copy in copies if _shapes(copy[name]) != _shapes(chosen[name])]:
        raise RecastError(f"{other[0]} of an average is another layer than the network's: pass copies of the network")
    moments = _input_moments(model, chosen, batches)
    warn_if_frozen(chosen.values())
    if learnt := [name for name, layer in chosen.items() if _has_learnt(layer)]:
        advice = "to keep those of some layers name the others, layers=[...]"
        warnings.warn(f"wake_ replaces trained queries and keys ({listed(learnt, 3)}): {advice}", stacklevel=4)
    generator = torch.Generator().manual_seed(int(seed))
    woken = []
    for name, layer in chosen.items():
        # the network may have its own autocast
        inputs = [x.to(layer.query.dtype) for x in moments[name].sample.values()]
        before = content_entropy(layer, inputs)
        _set_queries_and_keys(layer, moments[name].components(layer.head_dim), inputs, logit_std, generator)
        woken.append(Woken(name, before, content_entropy(layer, inputs)))
        for copy in copies:
            for own, copied in zip(_set_tensors(layer), _set_tensors(copy[name]), strict=True):
                copied.copy_(own)
    several = {name for name in chosen if any(x.shape[2:].numel() > 1 for x in moments[name].sample.values())}
    uniform = [layer.layer for layer in woken if layer.entropy_after > ALIKE and layer.layer in several]
    if max(m.images for m in moments.values()) < 2:
        warnings.warn("wake_ got one image, which queries and keys then fit: pass 16 or more", stacklevel=4)
    elif uniform:
        reason = "the pixels of their inputs are alike (constant images?)"
        warnings.warn(f"content maps stay uniform in {listed(uniform, 3)}: {reason}", stacklevel=4)
    return woken


def _layers_to_wake(model: nn.Module, names: Collection[str] | None) -> dict[str, RecastLayer]:
    """Return the recast layers of these names, or all. Raises `RecastError` for none, and for pruned ones."""
    layers = recast_layers(model)
    if unknown := [name for name in names or () if name not in layers]:
        name = str(unknown[0])
        raise RecastError(f"no layer {name!r} of {type(model).__name__} was recast.{suggest(name, layers)}")
    chosen = {name: layer for name, layer in layers.items() if names is None or name in names}
    if not chosen:
        raise RecastError(f"{type(model).__name__} has no recast layer to wake")
    if pruned := [name for name, layer in chosen.items() if not layer.content_heads]:
        raise RecastError(f"{pruned[0] or 'the layer'} has no content map (all pruned): drop it from layers")
    if computed := [name for name, layer in chosen.items() if not {"query", "key"} <= layer._parameters.keys()]:
        reason = "its queries or keys are computed by other code (a parametrization): wake the layer before, or drop it"
        raise RecastError(f"{computed[0] or 'the layer'} cannot be woken: {reason}")
    return chosen


def _set_tensors(layer: RecastLayer) -> list[Tensor]:
    """Return the tensors that waking sets."""
    return [layer.query, layer.key, *([layer.qk_scale] if isinstance(layer, AttentionBeside) else ())]


def _shapes(layer: RecastLayer) -> list[torch.Size]:
    return [tensor.shape for tensor in _set_tensors(layer)]


def _input_moments(model: nn.Module, layers: dict[str, RecastLayer], batches: Any) -> dict[str, _Moments]:
    """Return the moments of the inputs of every layer. Raises `RecastError` for missing and infinite inputs."""
    moments = {name: _Moments() for name in layers}
    with in_eval(model), hooked(layers.items(), before=lambda name, _layer, inputs: moments[name].add(inputs[0])):
        for batch, _ in read_batches(model, batches):
            run_example(model, batch)
    for name, layer_moments in moments.items():
        if not layer_moments.count:
            raise RecastError(f"{name} got no images: pass at least one batch")
        if not layer_moments.products.isfinite().all():
            raise RecastError(f"{name} got NaN or infinite values: check the images, and the weights before it")
    return moments


def warn_if_frozen(layers: Iterable[RecastLayer]) -> None:
    """Warn if no parameter of the recast layers requires a gradient: then no attention is trained."""
    parameters = [p for layer in layers for p in layer.parameters()]
    if parameters and not any(p.requires_grad for p in parameters):
        warnings.warn(
            "every recast layer is frozen, as its convolution was: no attention is trained; call requires_grad_(True) "
            "on them",
            stacklevel=4,
        )


def _has_learnt(layer: RecastLayer) -> bool:
    """Return True if the gate γ is not where it started."""
    gamma = getattr(layer, "gamma", None)
    return gamma is not None and bool((gamma != getattr(layer.config, "gamma_init", 0.0)).any())


def _set_queries_and_keys(
    layer: RecastLayer, components: Tensor, inputs: Sequence[Tensor], logit_std: float, generator: torch.Generator
) -> None:
    """Set W_qry = W_key = a · R_h U for every head that has a content map; beside a convolution, a rotation each."""
    depth, heads = layer.head_dim, len(layer.query) // layer.head_dim

    def drawn() -> Tensor:
        return torch.cat([rotation(len(components), depth, generator) @ components for _ in range(heads)])

    layer.query.copy_(drawn())
    differ = False
    if isinstance(layer, AttentionBeside):
        layer.qk_scale.fill_(1.0)
        differ = layer.config.query_key != "similar"
    layer.key.copy_(drawn() if differ else layer.query)
    if _is_linear(layer):  # softmax over a head's width for queries, over the tokens for keys
        projections = [_projections(layer, x) for x in inputs]
        for at, (weight, axis) in enumerate(((layer.query, -1), (layer.key, -2))):
            variances = [pair[at].var(axis, correction=0) for pair in projections]
            _scale_heads_(weight, logit_std / _deviation(variances, logit_std))
        return
    variances = [_logits(layer, x).var(-1, correction=0) for x in inputs]
    scale = (logit_std / _deviation(variances, logit_std)).sqrt()
    for weight in (layer.query, layer.key):
        _scale_heads_(weight, scale)
    if isinstance(layer, AttentionBeside):
        size = torch.cat([layer.query, layer.key]).float().square().mean().sqrt()
        layer.qk_scale.copy_((size / LEAST_SIZE).clamp(torch.finfo(layer.qk_scale.dtype).tiny, 1))
        for weight in (layer.query, layer.key):
            weight.div_(layer.qk_scale)


def _is_linear(layer: RecastLayer) -> bool:
    return isinstance(layer.config, GaussianGate) and layer.config.content == "linear"


def _deviation(variances: Sequence[Tensor], where_none: float) -> Tensor:
    """Return the standard deviation of every head, (H,), over images and queries, from variances (B, H, ·) each."""
    images, mean = sum(map(len, variances)), torch.zeros((), device=variances[0].device)
    for part in variances:
        mean = mean + part.mean((0, 2)) * (len(part) / images)
    return mean.sqrt().masked_fill(mean < TINY, where_none)


def rotation(dim: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return the first `rows` rows of a random orthogonal matrix of `dim`, with rows of zeros below if it has fewer."""
    full = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=generator))[0]
    return torch.cat([full[:rows], full.new_zeros(max(0, rows - dim), dim)])


def _scale_heads_(weight: nn.Parameter, scale: Tensor) -> None:
    weight.copy_((weight.unflatten(0, (len(scale), -1)) * scale.to(weight)[:, None, None]).flatten(0, 1))


def _projections(layer: RecastLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries of some output pixels (B, H, n, D), and keys of all pixels (B, H, M, D), in fp32."""
    tokens = query_tokens(x, layer.geometry).flatten(2).transpose(1, 2)
    tokens = tokens[:, :: math.ceil(tokens.shape[1] / MAX_QUERIES)]
    pixels = x.flatten(2).transpose(1, 2)
    factor: Any = layer.qk_scale if isinstance(layer, AttentionBeside) else 1.0
    q, k = ((t @ (factor * weight).T).float() for t, weight in ((tokens, layer.query), (pixels, layer.key)))
    return tuple(t.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for t in (q, k))


def _logits(layer: RecastLayer, x: Tensor) -> Tensor:
    """Return the logits of content alone of some queries over the image's pixels, (B, H, n, M)."""
    q, k = _projections(layer, x)
    return q @ k.transpose(-1, -2) / layer.head_dim**0.5


@torch.no_grad()
def content_entropy(layer: RecastLayer, inputs: Sequence[Tensor]) -> float:
    """Return the `relative_entropy` of the content maps, averaged over all heads."""
    entropy, images = 0.0, sum(map(len, inputs))
    for x in inputs:
        if _is_linear(layer):
            q, k = _projections(layer, x)
            maps = q.softmax(-1) @ k.softmax(-2).transpose(-1, -2)
        else:
            maps = _logits(layer, x).softmax(-1)
        entropy += float(relative_entropy(maps).mean()) * (len(x) / images)
    return entropy


def relative_entropy(maps: Tensor) -> Tensor:
    """Return the entropy of maps (…, N, M) over its maximum ln M, averaged over the queries.

    0 for one pixel of several, 1 for uniform maps and for maps of a single pixel.
    """
    entropy, most = torch.special.entr(maps).sum(-1).mean(-1), math.log(maps.shape[-1])
    return entropy / most if most else torch.ones_like(entropy)
