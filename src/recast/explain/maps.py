"""From a network and an image to the layers of a page and what they store: what attends to what, of some queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recast.analysis.queries import MAX_NUMBERS, content_of, rows_of
from recast.analysis.record import Attention, token_names, watched
from recast.analysis.transformers import NO_GRID
from recast.errors import RecastError
from recast.explain.inputs import ranked
from recast.explain.scene import Axis, Floats, Layer, Maps, Prediction, percent
from recast.layers.attention_pool import attention_pools
from recast.layers.cmhsa import RecastLayer
from recast.layers.functional import expand_heads
from recast.layers.gpsa import GPSA
from recast.tracing.hooks import in_eval

MAX_QUERIES, MAX_KEYS = 400, 1024
"""Queries and blocks of keys of a layer whose maps are stored: early layers have thousands of each."""
MAX_PIXELS = 128 * 128
"""Pixels of a map without a query: there are few of them, so they may be larger than others."""
TOP_CLASSES = 3
"""Classes of which a page shows the maps, the likeliest of each image."""
NAMED = 6
"""Modules that a note names, of many."""

Described = tuple[Layer, Maps]


class Recorded(NamedTuple):
    """What a network gave, its layers in the order of their calls, what they store, and what is said of the others."""

    output: Any
    layers: tuple[Layer, ...]
    maps: dict[str, Maps]
    notes: tuple[str, ...]


def record_maps(model: nn.Module, image: Tensor, classes: Sequence[str] | None = None) -> Recorded:
    """What `model` gives for one image (1, C, height, width), its layers that attend, and what these store of it.

    Recast layers, transformers' attention over tokens, attention pools (with one token a class: the likeliest classes,
    by the names in `classes`). Of a layer that is called twice it is the latest call. The model is run in eval mode,
    without gradients, and left as it was. Maps of many tokens are never held in full, but for transformers' own.
    """
    found: dict[str, list[Described]] = {}
    pools = attention_pools(model)
    of_pools: dict[str, Attention] = {}
    left_out: dict[str, str] = {}

    def put(name: str, described: list[Described]) -> None:
        found.pop(name, None)
        found[name] = described

    def see_recast(name: str, layer: RecastLayer, x: Tensor) -> None:
        put(name, [(describe(name, layer, *x.shape[-2:]), stored_maps(layer, x))])

    def keep(name: str, attention: Attention) -> None:
        if attention.grid is None:
            left_out[name] = NO_GRID
        elif name in pools:
            of_pools[name] = attention
            put(name, [])  # its place; which classes are the likeliest is known at the end
        else:
            put(name, token_layers(name, attention, token_names(model, attention.num_prefix)))

    with watched(model, see_recast, keep, left_out.__setitem__), in_eval(model), torch.no_grad():
        output = model(image)
    best = ranked(output, classes, TOP_CLASSES)
    for name, attention in of_pools.items():
        found[name] = [pool_layer(name, attention, pools[name].num_classes, best)]
    described = [one for several in found.values() for one in several]
    notes = []
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name, why in left_out.items() if why == reason]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        notes.append(f"Without maps: {', '.join(names[:NAMED])}{more} ({reason}).")
    layers = tuple(layer for layer, _ in described)
    return Recorded(output, layers, {layer.name: maps for layer, maps in described}, tuple(notes))


@torch.no_grad()
def describe(name: str, layer: RecastLayer, height: int, width: int) -> Layer:
    """A recast layer for inputs of a size. Raises `RecastError` for gates or positions that are not finite."""
    geometry = layer.geometry
    places = zip(geometry.pixels(height, width), (height, width), strict=True)
    grid: dict[str, Any] = {
        "name": name,
        "kernel": geometry.kernel,
        "offsets": tuple(geometry.offsets()),
        "padded": geometry.padded_size(height, width),
        "keys": tuple(Axis(at.start, at.step, size) for at, size in places),
        "queries": tuple(Axis(at.start, at.step, len(at)) for at in geometry.query_positions(height, width)),
    }
    if not isinstance(layer, GPSA):
        return Layer(kind="maps", description=f"{geometry}, C-MHSA", **grid)
    w, gates = expand_heads(layer.weights()), layer.gates()
    numbers = {**w.gates._asdict(), "center": w.center, "alpha": w.alpha}
    if not all(bool(values.isfinite().all()) for values in numbers.values() if values is not None):
        raise RecastError(f"{name} has gates or positions that are not finite: there is nothing to draw")
    # the share of content first, then what else shapes the map
    if layer.config.gate == "sigmoid":
        under = {"1−σ(λ)": 1 - gates["sigma"], "1/α": layer.spans()}
    else:
        under = {"γ": gates["gamma"], "s": gates["s"], "1/α": layer.spans()}
    grid |= {part: None if values is None else _array(values) for part, values in numbers.items()}
    shown = tuple((symbol, _array(values)) for symbol, values in under.items())
    return Layer(kind="gpsa", description=f"{geometry}, {layer.config.gate} gate", gates=shown, **grid)


@torch.no_grad()
def stored_maps(layer: RecastLayer, x: Tensor) -> Maps:
    """The content maps of a GPSA layer, the whole maps of a C-MHSA layer, for an input (1, C, height, width).

    Above `MAX_QUERIES` and `MAX_KEYS`, of every n-th query in each direction, and summed over blocks of keys.
    """
    height, width = x.shape[-2:]
    geometry = layer.geometry
    counts = [len(at) for at in geometry.query_positions(height, width)]
    step, pool = _step(counts[0], counts[1], MAX_QUERIES), _step(height, width, MAX_KEYS)
    rows, columns = (_spread(count, step) for count in counts)
    chosen = torch.tensor([i * counts[1] + j for i in rows for j in columns], device=x.device)
    maps_of = content_of(layer, x[:1]) if isinstance(layer, GPSA) else rows_of(layer, x[:1])
    size, (at_rows, at_columns) = geometry.padded_size(height, width), geometry.pixels(height, width)
    pieces = []
    for some in chosen.split(max(1, MAX_NUMBERS // (layer.num_heads * size[0] * size[1]))):
        maps = maps_of(some)[0].float().unflatten(-1, size)[..., at_rows, at_columns]
        pieces.append(_pooled(maps, pool))
    values = torch.cat(pieces, dim=1).unflatten(1, (len(rows), len(columns)))
    return Maps.of(values.cpu().numpy(), rows, columns, pool)


def token_layers(name: str, attention: Attention, names: Sequence[str]) -> list[Described]:
    """What a page shows of attention over tokens: the patches' maps, with a query, and those of the tokens before them,
    as "NAME (class token)", the mean over heads first. Registers are left out: the network reads nothing from them."""
    _check_finite(name, attention)
    found: list[Described] = []
    signed = bool((attention.mix < 0).any())
    heads, told = _heads(attention.mix.shape[1]), "a linear layer over patches, the same for every image"
    if attention.is_linear:
        heads = ("weights",)
    else:
        told = f"{_count(len(heads), 'head')} over {attention.tokens.shape[-2]}×{attention.tokens.shape[-1]} patches"
        told += f" and {_count(attention.num_prefix, 'token')} before them" if attention.num_prefix else ""
    told += ", weights of either sign" if signed else ""
    if (over_patches := attention.patches) is not None:
        found.append(_of_queries(name, told, over_patches[0].float(), heads, signed))
    for token, maps in zip(names, attention.tokens[0].float().unbind(1), strict=False):
        if not token.startswith("register"):
            shown = (token,) if len(maps) == 1 else ("mean", *heads)
            about = f"what the {token} attends to: {told}"
            found.append(_of_classes(f"{name} ({token})", about, _mean_first(maps), shown, signed=signed))
    return found


def pool_layer(name: str, attention: Attention, num_classes: int | None, best: Sequence[Prediction]) -> Described:
    """What a page shows of an attention pool: where its token looks, a map per head; with one token a class the maps of
    the likeliest classes, heads averaged. What the tokens kept for themselves is said in the maps' names."""
    _check_finite(name, attention)
    maps, kept = attention.tokens[0].float(), attention.kept[0].float()  # (H, T, h, w), (H, T)
    told = f"attention pooling, {'one token' if num_classes is None else 'one token a class'}"
    told += ", among its own keys" if attention.num_prefix else ""
    told += "" if len(maps) == 1 else f", {len(maps)} heads{'' if num_classes is None else ' (their mean)'}"
    if num_classes is None:
        maps, kept = _mean_first(maps[:, 0]), _mean_first(kept[:, 0])
        names = here = ("what is pooled",) if len(maps) == 1 else ("mean", *_heads(len(maps) - 1))
    else:
        # outputs that are not one number per class rank nothing: the first classes are as good as any
        known = best if best and maps.shape[1] == num_classes else [Prediction("", 0, i) for i in range(num_classes)]
        chosen = [one.number for one in known[:TOP_CLASSES]]
        maps, kept = maps.mean(0)[chosen], kept.mean(0)[chosen]
        names = tuple(f"likeliest class, {i + 1}" for i in range(len(chosen)))
        here = tuple(_called(one) for one in known[:TOP_CLASSES])
    if attention.num_prefix:
        here = tuple(f"{n} ({percent(p)} on the token itself)" for n, p in zip(here, kept.tolist(), strict=True))
    return _of_classes(name, told, maps, names, here)


def _of_queries(name: str, told: str, maps: Tensor, heads: tuple[str, ...], signed: bool) -> Described:
    """Maps (H, h·w, h, w) of all queries, of which some are stored, over blocks of keys."""
    height, width = maps.shape[-2:]
    step, pool = _step(height, width, MAX_QUERIES), _step(height, width, MAX_KEYS)
    rows, columns = _spread(height, step), _spread(width, step)
    chosen = maps.unflatten(1, (height, width))[:, list(rows)][:, :, list(columns)]
    stored = Maps.of(_array(_pooled(chosen, pool)), rows, columns, pool, signed=signed)
    return _layer(name, "maps", told, (height, width), heads), stored


def _of_classes(
    name: str, told: str, maps: Tensor, names: tuple[str, ...], here: tuple[str, ...] = (), signed: bool = False
) -> Described:
    """Maps (K, h, w) without a query; `here`: what they are called for this image. Blocks at the border hold fewer
    pixels: their mean counts for all, or an even map would have an edge."""
    height, width = maps.shape[-2:]
    pool = _step(height, width, MAX_PIXELS)
    blocks = (_pooled(maps, pool) / _pooled(torch.ones_like(maps), pool) * pool**2)[:, None, None]
    stored = Maps.of(_array(blocks), (0,), (0,), pool, names=here, signed=signed, from_least=True)
    return _layer(name, "classes", told, (height, width), names), stored


def _layer(name: str, kind: str, told: str, grid: tuple[int, int], names: tuple[str, ...]) -> Layer:
    axes = Axis(0, 1, grid[0]), Axis(0, 1, grid[1])
    return Layer(name, kind, told, (1, 1), (), grid, keys=axes, queries=axes, names=names)


def _check_finite(name: str, attention: Attention) -> None:
    if not attention.mix.isfinite().all():
        raise RecastError(f"{name} has attention that is not finite: there is nothing to draw")


def _mean_first(of_heads: Tensor) -> Tensor:
    """The mean over heads, then each; of one head alone itself."""
    return of_heads if len(of_heads) == 1 else torch.cat((of_heads.mean(0, keepdim=True), of_heads))


def _called(one: Prediction) -> str:
    """ "tabby 61 %"; classes without a name are called by their number."""
    if not one.name:
        return f"class {one.number}"
    return f"{'class ' if one.name == str(one.number) else ''}{one.name} {percent(one.probability)}"


def _heads(count: int) -> tuple[str, ...]:
    return tuple(f"head {i + 1}" for i in range(count))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _step(rows: int, columns: int, most: int) -> int:
    """The smallest power of two that leaves at most `most` of rows × columns."""
    step = 1
    while -(-rows // step) * -(-columns // step) > most:
        step *= 2
    return step


def _spread(count: int, step: int) -> tuple[int, ...]:
    """Every `step`-th of `count`, from the middle of the first group on."""
    return tuple(range(min(step // 2, count - 1), count, step))


def _pooled(maps: Tensor, pool: int) -> Tensor:
    """Sums over blocks of keys: (…, Y, X) → (…, ⌈Y/pool⌉, ⌈X/pool⌉)."""
    down, right = (-size % pool for size in maps.shape[-2:])
    padded = nn.functional.pad(maps, (0, right, 0, down))
    return padded.unflatten(-1, (-1, pool)).unflatten(-3, (-1, pool)).sum((-3, -1))


def _array(values: Tensor) -> Floats:
    return values.detach().float().cpu().numpy()
