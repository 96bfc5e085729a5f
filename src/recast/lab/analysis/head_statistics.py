"""Statistics of the heads on images: distance, span, entropy, and whether they still are a convolution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.lab.analysis.blocks import Images, body_of, device_of, each_batch
from recast.lab.analysis.queries import pieces
from recast.lab.analysis.records import HeadLine
from recast.lab.tables import Table
from recast.layers.cmhsa import RecastLayer, recast_layers
from recast.layers.functional import expand_heads
from recast.layers.functional.maps import positions, under_taps
from recast.layers.gpsa import GPSA
from recast.modes import in_eval
from recast.tracing.hooks import hooked

TOLERANCE = 1e-3
"""Share of its attention that a head may give to others than its tap, and still be a convolution."""
MAX_QUERIES = 128


def head_statistics(model: nn.Module, images: Images, *, queries: int = MAX_QUERIES, seed: int = 0) -> list[HeadLine]:
    """Measure gate, span, attention distance, non-locality and entropy of every recast head, over images.

        distance     d_h = ⟨ Σ_k |A_qk| ‖k − q‖ / Σ_k |A_qk| ⟩      ⟨⟩ the mean over queries q and images
        non-locality D_h = ⟨ Σ_k A_qk ‖k − q‖ ⟩; of a layer: the mean over its heads
                     (d'Ascoli et al. 2021, ConViT, section 4: D_loc)
        entropy      H_h = ⟨ −Σ_k p_qk ln p_qk ⟩ with p = |A| / Σ|A|, in nats: 0 for one pixel, ln n for n alike

    A is the head's gated mix of maps, as the layer uses it; k runs over the padded input, for a shift or a Gaussian may
    lie on padding. ‖k − q‖ is Euclidean, in pixels of the layer's input (ConViT's patches). A head still is a
    convolution where at least 1 − 0.001 of |A| is on its tap. Its gate is the share of content, its span 1/α.

    With a sigmoid gate or C-MHSA A ≥ 0, its rows sum to one, and both are the same. A linear gate may be negative, and
    then so may A: a head that looks away from its surroundings. Distance and entropy take |A| as attention; the
    non-locality keeps the sign, so it can fall below 0.

    images: what the model takes, a batch or an iterable of batches. At most `queries` queries of an image are looked
    at: all, or, in a layer that has more, a sample drawn from `seed`, the same for all images. Maps are made in small
    pieces whatever the layer's size (`queries.pieces`). Layers are in the order of the network, named without
    wrappers around it. Raises `RecastError` for a model without recast layers, and if queries < 1.
    """
    if queries < 1:
        raise RecastError(f"queries must be at least 1, got {queries}")
    name = type(model).__name__
    if not recast_layers(model):
        raise RecastError(f"{name} has no recast layer, so it has no heads to measure")
    return _measure({name: model}, images, queries, seed)


def tabulate_heads(
    models: Mapping[str, nn.Module],
    batches: Callable[[], Images],
    epochs: Iterable[tuple[str, int, Callable[[], nn.Module]]] = (),
) -> Table:
    """Return RUN/analysis/heads.csv, a row per head of several models; models without recast layers have no rows.

    batches: starts a pass over the images.
    epochs: (model's name, epoch, function that loads the model as it was then), for checkpoints that were stored; they
    are loaded and measured one after the other, and the rows of `models` themselves have no epoch. A checkpoint from
    before its layers were recast has no rows.
    """
    lines = []
    for name, epoch, load in epochs:
        lines += [replace(head, epoch=epoch) for head in _measure({name: load()}, batches())]
    return Table.of("heads", HeadLine, lines + _measure(models, batches()))


@torch.no_grad()
def _measure(
    models: Mapping[str, nn.Module], images: Images, queries: int = MAX_QUERIES, seed: int = 0
) -> list[HeadLine]:
    """Measure the heads of all models in one pass in eval mode."""
    sums = {
        name: {layer: _Sums(module, queries, seed) for layer, module in recast_layers(body_of(model)[1]).items()}
        for name, model in models.items()
    }
    measured = [(model, sums[name]) for name, model in models.items() if sums[name]]
    for batch in each_batch(images) if measured else ():
        for model, layers in measured:
            with in_eval(model), ExitStack() as hooks:
                for name, layer_sums in layers.items():
                    hooks.enter_context(hooked([(name, layer_sums.layer)], before=layer_sums.see))
                model(batch.to(device_of(model)))
    return [
        head for name, layers in sums.items() for layer, added in layers.items() for head in added.heads(name, layer)
    ]


class _Sums:
    """Sums over the maps of a recast layer, batch by batch."""

    def __init__(self, layer: RecastLayer, queries: int, seed: int) -> None:
        self.layer, self._most, self._seed = layer, queries, seed
        self._sums = torch.zeros(4, layer.num_heads, dtype=torch.float64)
        self.images = self._queries = 0

    def see(self, _name: str, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the maps of the heads on the layer's input (B, C, H, W)."""
        x: Tensor = inputs[0]
        geometry, (height, width) = self.layer.geometry, x.shape[-2:]
        queries_at, keys_at = positions(geometry, height, width, x.device)
        chosen = torch.arange(len(queries_at))
        if len(chosen) > self._most:
            generator = torch.Generator().manual_seed(self._seed)
            chosen = torch.randperm(len(chosen), generator=generator)[: self._most].sort().values
        scale = torch.tensor(geometry.upsample, device=x.device)
        columns = geometry.padded_size(height, width)[1]
        sums = torch.zeros_like(self._sums)
        rows = 0
        for at, maps in pieces(self.layer, x, chosen.to(x.device)):
            # half precision has too few digits for sums over a map
            maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
            distance = ((keys_at - queries_at[at][:, None]) / scale).norm(dim=-1).to(maps.dtype)
            at_tap = under_taps(geometry, queries_at[at], columns)[None, ..., None].expand(len(maps), -1, -1, 1)
            attention = maps.abs()
            mass = attention.sum(-1)
            measured = torch.stack(
                [
                    (attention * distance).sum(-1) / mass,
                    (maps * distance).sum(-1),
                    # −Σ p ln p with p = |A|/m is ln m − Σ |A| ln |A| / m: no map of p is made
                    mass.log() + torch.special.entr(attention).sum(-1) / mass,
                    attention.gather(-1, at_tap).squeeze(-1) / mass,
                ]
            )
            sums += measured.sum(dim=(1, 3)).cpu().double()
            rows += len(maps) * len(at)
        # maps that are the same for all images were given once
        self._sums += sums * (len(x) * len(chosen) / rows)
        self.images += len(x)
        self._queries = len(chosen)

    def heads(self, model: str, name: str) -> list[HeadLine]:
        """Return every head, in the mean over images and queries; none for a layer that did not run."""
        if not self.images:
            return []
        layer = self.layer
        gates: list[float | None] = [None] * layer.num_heads
        spans = gates
        if isinstance(layer, GPSA):
            gates = expand_heads(layer.weights()).gates.content.tolist()
            spans = [s if h in layer.gaussian_heads else None for h, s in enumerate(layer.spans().tolist())]
        means = (self._sums / (self.images * self._queries)).T.tolist()
        heads = []
        for head, (tap, (far, signed, entropy, on_tap)) in enumerate(zip(layer.geometry.offsets(), means, strict=True)):
            measured = gates[head], spans[head], far, signed, entropy
            heads.append(HeadLine(model, None, name, head, *tap, *measured, on_tap >= 1 - TOLERANCE, self.images))
        return heads
