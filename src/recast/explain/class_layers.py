"""Layers of a page whose maps are not made of taps: transformers' attention, their class tokens, attention pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recast.analysis.record import PoolMaps
from recast.analysis.tokens import TokenMaps
from recast.errors import RecastError
from recast.explain.coarse import MAX_KEYS, MAX_QUERIES, pooled, spread, step_of
from recast.explain.predictions import Ranked, percent
from recast.explain.scene import Axis, Layer, Maps

TOP_CLASSES = 3
"""Classes of which a page shows the maps, the likeliest of each image."""
MAX_PIXELS = 128 * 128
"""Pixels of a map without a query: there are few of them, so they may be larger than others."""

Described = tuple[Layer, Maps]


def token_layers(name: str, maps: TokenMaps, token_names: Sequence[str]) -> list[Described]:
    """What a page shows of attention over tokens: the patches' maps, with a query, and those of the tokens before them,
    as "NAME (class token)", the mean over heads first. Registers are left out: the network reads nothing from them."""
    _check_finite(name, maps.weights)
    found: list[Described] = []
    signed = bool((maps.weights < 0).any())
    heads, (height, width) = _heads(maps.weights.shape[1]), maps.grid
    told = f"{_count(len(heads), 'head')} over {height}×{width} patches"
    if maps.num_prefix:
        told += f" and {_count(maps.num_prefix, 'token')} before them"
    either = ", weights of either sign" if signed else ""
    if (over_patches := maps.patches) is not None:
        if maps.is_linear:
            heads, told = ("weights",), "a linear layer over patches, the same for every image"
        layer = _layer(name, "maps", told + either, maps.grid, heads)
        found.append((layer, _of_queries(over_patches[0].float(), signed)))
    for i, token in enumerate(token_names[: maps.prefix.shape[2]]):
        if token.startswith("register"):
            continue
        shown = maps.prefix[0, :, i].float()
        names = (token,) if len(shown) == 1 else ("mean", *heads)
        shown = _mean_first(shown)
        layer = _layer(f"{name} ({token})", "classes", f"what the {token} attends to: {told}{either}", maps.grid, names)
        found.append((layer, _of_classes(shown, signed=signed)))
    return found


def pool_layer(name: str, maps: PoolMaps, num_classes: int | None, best: Sequence[Ranked]) -> Described:
    """What a page shows of an attention pool: where its token looks, a map per head; with one token a class the maps of
    the likeliest classes, heads averaged. What the tokens kept for themselves is said in the maps' names."""
    _check_finite(name, maps.weights)
    weights = maps.weights[0].float()  # (H, T, h, w)
    kept = None if maps.tokens is None else maps.tokens[0].float()  # (H, T)
    told = f"attention pooling, {'one token' if num_classes is None else 'one token a class'}"
    told += "" if kept is None else ", among its own keys"
    told += "" if len(weights) == 1 else f", {len(weights)} heads{'' if num_classes is None else ' (their mean)'}"
    if num_classes is None:
        shown, kept = _mean_first(weights[:, 0]), None if kept is None else _mean_first(kept[:, 0])
        names = here = ("what is pooled",) if len(weights) == 1 else ("mean", *_heads(len(weights)))
    else:
        # outputs that are not one number per class rank nothing: the first classes are as good as any
        known = best if best and weights.shape[1] == num_classes else [Ranked(i, "", 0) for i in range(num_classes)]
        known = known[:TOP_CLASSES]
        chosen = [one.number for one in known]
        shown, kept = weights.mean(0)[chosen], None if kept is None else kept.mean(0)[chosen]
        names = tuple(f"likeliest class, {i + 1}" for i in range(len(known)))
        here = tuple(_called(k) for k in known)
    if kept is not None:
        here = tuple(f"{n} ({percent(p)} on the token itself)" for n, p in zip(here, kept.tolist(), strict=True))
    layer = _layer(name, "classes", told, (shown.shape[-2], shown.shape[-1]), names)
    return layer, _of_classes(shown, here)


def _check_finite(name: str, weights: Tensor) -> None:
    if not weights.isfinite().all():
        raise RecastError(f"{name} has attention that is not finite: there is nothing to draw")


def _mean_first(of_heads: Tensor) -> Tensor:
    """The mean over heads, then each; of one head alone itself."""
    return of_heads if len(of_heads) == 1 else torch.cat((of_heads.mean(0, keepdim=True), of_heads))


def _of_queries(maps: Tensor, signed: bool) -> Maps:
    """Maps (H, h·w, h, w) of all queries, of which some are stored, over blocks of keys."""
    height, width = maps.shape[-2:]
    step, pool = step_of(height, width, MAX_QUERIES), step_of(height, width, MAX_KEYS)
    rows, columns = spread(height, step), spread(width, step)
    chosen = maps.unflatten(1, (height, width))[:, list(rows)][:, :, list(columns)]
    return Maps.of(pooled(chosen, pool).cpu().numpy(), rows, columns, pool, signed=signed)


def _of_classes(maps: Tensor, names: tuple[str, ...] = (), signed: bool = False) -> Maps:
    """Maps (K, h, w) without a query. Blocks at the border hold fewer pixels: their mean counts for all, or an even map
    would have an edge."""
    pool = step_of(maps.shape[-2], maps.shape[-1], MAX_PIXELS)
    maps = pooled(maps, pool) / pooled(torch.ones_like(maps), pool) * pool**2
    return Maps.of(maps[:, None, None].cpu().numpy(), (0,), (0,), pool, names=names, signed=signed, from_least=True)


def _layer(name: str, kind: str, description: str, grid: tuple[int, int], names: tuple[str, ...]) -> Layer:
    axes = Axis(0, 1, grid[0]), Axis(0, 1, grid[1])
    return Layer(name, kind, description, (1, 1), (), grid, keys=axes, queries=axes, names=names)


def _called(one: Ranked) -> str:
    """ "tabby 61 %"; classes without a name are called by their number."""
    if not one.name:
        return f"class {one.number}"
    return f"{'class ' if one.name == str(one.number) else ''}{one.name} {percent(one.probability)}"


def _heads(count: int) -> tuple[str, ...]:
    return tuple(f"head {i + 1}" for i in range(count))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
