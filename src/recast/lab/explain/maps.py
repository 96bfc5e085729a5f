"""From a network and an image to the layers of a page and what they store: what attends to what, of some queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recast.analysis.queries import MAX_NUMBERS, content_of, rows_of
from recast.analysis.record import Attention, token_names, watched
from recast.analysis.transformers import NO_GRID
from recast.errors import RecastError, listed
from recast.lab.explain.inputs import likeliest
from recast.lab.explain.scene import GRAD_CAM, Floats, Layer, Maps, Outputs, Prediction, share_text
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


def record_maps(
    model: nn.Module, image: Tensor, classes: Sequence[str] | None = None, outputs: Outputs | None = None
) -> tuple[Any, list[Described], list[str]]:
    """What `model` gives for one image (1, C, height, width), its layers that attend, each with what it stores, and
    notes on those without maps.

    Recast layers, transformers' attention over tokens, attention pools (with one token a class: the likeliest classes,
    by the names in `classes`, as `outputs` reads them), in the order of their calls. Of a layer that is called twice it
    is the latest call. The model is run in eval mode, without gradients, and left as it was. Maps of many tokens are
    never held in full, but for transformers' own. Raises `RecastError` for gates, positions or attention that are not
    finite.
    """
    found: dict[str, list[Described] | Attention] = {}
    pools = attention_pools(model)
    left_out: dict[str, str] = {}

    def put(name: str, seen: list[Described] | Attention) -> None:
        found.pop(name, None)
        found[name] = seen

    def see_recast(name: str, layer: RecastLayer, x: Tensor) -> None:
        put(name, [recast_layer(name, layer, x)])

    def keep(name: str, attention: Attention) -> None:
        if attention.grid is None:
            left_out[name] = NO_GRID
        elif not attention.mix.isfinite().all():
            raise RecastError(f"{name} has attention that is not finite: there is nothing to draw")
        elif name in pools:
            put(name, attention)  # which classes are the likeliest is known at the end
        else:
            put(name, token_layers(name, attention, token_names(model, attention.num_prefix)))

    with watched(model, see_recast, keep, left_out.__setitem__), in_eval(model), torch.no_grad():
        output = model(image)
    best = likeliest(output, classes, TOP_CLASSES, outputs)
    described = []
    for name, seen in found.items():
        described += [pool_layer(name, seen, pools[name].num_classes, best)] if isinstance(seen, Attention) else seen
    notes = []
    for reason in dict.fromkeys(left_out.values()):
        names = [name for name, why in left_out.items() if why == reason]
        notes.append(f"Without maps: {listed(names, NAMED)} ({reason}).")
    return output, described, notes


@torch.no_grad()
def recast_layer(name: str, layer: RecastLayer, x: Tensor) -> Described:
    """A recast layer for an input (1, C, height, width), with the content maps of GPSA, the whole ones of C-MHSA."""
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    padded, (at_rows, at_columns) = geometry.padded_size(height, width), geometry.pixels(height, width)
    queries = geometry.query_positions(height, width)
    if isinstance(layer, GPSA):
        kind, words, mixed, maps_of = "gpsa", f"{layer.config.gate} gate", _mix_of(name, layer), content_of(layer, x)
    else:
        kind, words, mixed, maps_of = "maps", "C-MHSA", {}, rows_of(layer, x)
    keys = range(padded[0])[at_rows], range(padded[1])[at_columns]
    described = Layer(
        name, kind, f"{geometry}, {words}", geometry.kernel, tuple(geometry.offsets()), padded, keys, queries, **mixed
    )

    def on_pixels(at: Tensor) -> Tensor:
        return maps_of(at.to(x.device))[0].float().unflatten(-1, padded)[..., at_rows, at_columns]

    most = MAX_NUMBERS // (layer.num_heads * padded[0] * padded[1])
    return described, _stored(on_pixels, (len(queries[0]), len(queries[1])), (height, width), most)


def _mix_of(name: str, layer: GPSA) -> dict[str, Any]:
    """The fields of `Layer` that say how a GPSA layer mixes its maps."""
    w, gates = expand_heads(layer.weights()), layer.gates()
    numbers = {**w.gates._asdict(), "center": w.center, "alpha": w.alpha}
    if not all(bool(values.isfinite().all()) for values in numbers.values() if values is not None):
        raise RecastError(f"{name} has gates or positions that are not finite: there is nothing to draw")
    # the share of content first, then what else shapes the map
    if layer.config.gate == "sigmoid":
        under = {"1−σ(λ)": 1 - gates["sigma"], "1/α": layer.spans()}
    else:
        under = {"γ": gates["gamma"], "s": gates["s"], "1/α": layer.spans()}
    shown = tuple((symbol, _array(values)) for symbol, values in under.items())
    return {"gates": shown} | {part: None if values is None else _array(values) for part, values in numbers.items()}


def token_layers(name: str, attention: Attention, names: Sequence[str]) -> list[Described]:
    """What a page shows of attention over tokens: the patches' maps, with a query, and those of the tokens before them,
    as "NAME (class token)", the mean over heads first. Registers are left out: the network reads nothing from them."""
    found: list[Described] = []
    signed = bool((attention.mix < 0).any())
    heads, told = _heads(attention.mix.shape[1]), "a linear layer over patches, the same for every image"
    if attention.is_linear:
        heads = ("weights",)
    else:
        told = f"{_count(len(heads), 'head')} over {attention.tokens.shape[-2]}×{attention.tokens.shape[-1]} patches"
        told += f" and {_count(attention.num_prefix, 'token')} before them" if attention.num_prefix else ""
    told += ", weights of either sign" if signed else ""
    if attention.patches is not None:
        maps = attention.patches[0].float()
        height, width = maps.shape[-2:]
        stored = _stored(lambda at: maps[:, at], (height, width), (height, width), len(maps[0]), signed)
        found.append((_layer(name, "maps", told, maps, heads), stored))
    for token, maps_of in zip(names, attention.tokens[0].float().unbind(1), strict=False):
        if not token.startswith("register"):
            shown = (token,) if len(maps_of) == 1 else ("mean", *heads)
            about = f"what the {token} attends to: {told}"
            found.append(_of_classes(f"{name} ({token})", about, _mean_first(maps_of), shown, signed=signed))
    return found


def pool_layer(name: str, attention: Attention, num_classes: int | None, best: Sequence[Prediction]) -> Described:
    """What a page shows of an attention pool: where its token looks, a map per head; with one token a class the maps of
    the likeliest classes, heads averaged. What the tokens kept for themselves is said in the maps' names."""
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
        here = tuple(called(one) for one in known[:TOP_CLASSES])
    if attention.num_prefix:
        here = tuple(f"{n} ({share_text(p)} on the token itself)" for n, p in zip(here, kept.tolist(), strict=True))
    return _of_classes(name, told, maps, names, here)


def cam_layer(maps: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> Described:
    """Grad-CAM (1, T, h, w) of the same classes in every arm, side by side; names: those of its maps, by arm."""
    size = [max(of.shape[axis] for of in maps.values()) for axis in (-2, -1)]
    large = [nn.functional.interpolate(of.float(), size, mode="bilinear")[0] for of in maps.values()]
    here = tuple(name for arm in maps for name in names[arm])
    told = f"of the last map, {' and '.join(dict.fromkeys('{}×{}'.format(*of.shape[-2:]) for of in maps.values()))}"
    return _of_classes(GRAD_CAM, f"{told}: what raises a class's logit, not attention", torch.cat(large), here, here)


def _stored(
    maps_of: Callable[[Tensor], Tensor], queries: tuple[int, int], keys: tuple[int, int], most: int,
    signed: bool = False,
) -> Maps:  # fmt: skip
    """What is kept of maps that have a query: `maps_of` gives those of queries (n,) as (H, n, h, w), `most` at a time.

    Above `MAX_QUERIES` and `MAX_KEYS`, of every n-th query in each direction, and summed over blocks of keys.
    """
    step, pool = _step(queries, MAX_QUERIES), _step(keys, MAX_KEYS)
    # from the middle of the first group on
    rows, columns = (tuple(range(min(step // 2, count - 1), count, step)) for count in queries)
    chosen = torch.tensor([i * queries[1] + j for i in rows for j in columns])
    values = torch.cat([_pooled(maps_of(at), pool) for at in chosen.split(max(1, most))], dim=1)
    return Maps.of(_array(values.unflatten(1, (len(rows), len(columns)))), rows, columns, pool, signed=signed)


def _of_classes(
    name: str, told: str, maps: Tensor, names: tuple[str, ...], here: tuple[str, ...] = (), signed: bool = False
) -> Described:
    """Maps (K, h, w) without a query; `here`: what they are called for this image. Blocks at the border hold fewer
    pixels: their mean counts for all, or an even map would have an edge."""
    pool = _step(maps.shape[-2:], MAX_PIXELS)
    blocks = (_pooled(maps, pool) / _pooled(torch.ones_like(maps), pool) * pool**2)[:, None, None]
    stored = Maps.of(_array(blocks), (0,), (0,), pool, names=here, signed=signed, from_least=True)
    return _layer(name, "classes", told, maps, names), stored


def _layer(name: str, kind: str, told: str, maps: Tensor, names: tuple[str, ...]) -> Layer:
    height, width = maps.shape[-2:]
    grid = range(height), range(width)
    return Layer(name, kind, told, (1, 1), (), (height, width), grid, grid, names)


def _mean_first(of_heads: Tensor) -> Tensor:
    """The mean over heads, then each; of one head alone itself."""
    return of_heads if len(of_heads) == 1 else torch.cat((of_heads.mean(0, keepdim=True), of_heads))


def called(one: Prediction) -> str:
    """ "tabby 61 %"; classes without a name are called by their number."""
    if not one.name:
        return f"class {one.number}"
    return f"{'class ' if one.name == str(one.number) else ''}{one.name} {one.value}"


def _heads(count: int) -> tuple[str, ...]:
    return tuple(f"head {i + 1}" for i in range(count))


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _step(grid: Sequence[int], most: int) -> int:
    """The smallest power of two that leaves at most `most` of a grid's rows × columns."""
    step = 1
    while -(-grid[0] // step) * -(-grid[1] // step) > most:
        step *= 2
    return step


def _pooled(maps: Tensor, pool: int) -> Tensor:
    """Sums over blocks of keys: (…, Y, X) → (…, ⌈Y/pool⌉, ⌈X/pool⌉)."""
    down, right = (-size % pool for size in maps.shape[-2:])
    padded = nn.functional.pad(maps, (0, right, 0, down))
    return padded.unflatten(-1, (-1, pool)).unflatten(-3, (-1, pool)).sum((-3, -1))


def _array(values: Tensor) -> Floats:
    return values.detach().float().cpu().numpy()
