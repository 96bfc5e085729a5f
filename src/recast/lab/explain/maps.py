"""Record the attention maps of a network for an image, in the form that a page stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recast.analysis.queries import Rows, rows_of
from recast.analysis.record import Attention, token_names, watched
from recast.analysis.transformers import NO_GRID
from recast.errors import RecastError, listed
from recast.lab.explain.inputs import likeliest
from recast.lab.explain.scene import GRAD_CAM, Floats, Layer, Maps, Outputs, Prediction, share_text
from recast.lab.pages.formats import plural
from recast.layers.attention_pool import attention_pools
from recast.layers.beside import AttentionBeside
from recast.layers.cmhsa import RecastLayer
from recast.layers.functional import Weights, expand_heads
from recast.layers.functional.beside import attention_map, query_pixels
from recast.layers.functional.maps import content_rows
from recast.layers.gpsa import GPSA
from recast.modes import in_eval
from recast.surgery.places import PassThrough

MAX_QUERIES, MAX_KEYS = 400, 1024  # stored queries and blocks of keys of a layer; early layers have thousands of each
MAX_NUMBERS = 2**18  # of one piece of the maps: what a CPU's cache holds, 1 MB in single precision
MAX_PIXELS = 128 * 128  # of a map without a query; there are few of them, so they may be larger
TOP_CLASSES = 3  # classes whose maps are shown, the likeliest of each image
NAMED = 6  # modules named in a note

Described = tuple[Layer, Maps]


def record_maps(
    model: nn.Module, image: Tensor, classes: Sequence[str] | None = None, outputs: Outputs | None = None
) -> tuple[Any, list[Described], list[str]]:
    """Run `model` on an image and record its attention: recast layers, transformers' attention, attention pools.

    The model runs in eval mode, without gradients, and is left unchanged. If a layer is called twice, the latest call
    counts. Maps over many tokens are never held in full, except those that transformers compute themselves.

    Args:
        image: (1, C, height, width).
        classes: names of the outputs, used for the maps of attention pools with one token per class.
        outputs: how the outputs are read, see `recast.lab.explain.inputs.read_outputs`.

    Returns:
        The output, (layer, maps) in the order of the first calls, and notes on layers without maps.

    Raises:
        RecastError: gates, positions or attention are not finite.
    """
    layers: dict[str, list[Described] | Attention] = {}
    pools = attention_pools(model)
    left_out: dict[str, str] = {}

    def record_recast(name: str, layer: RecastLayer, x: Tensor, output: Tensor) -> None:
        layers[name] = [recast_layer(name, layer, x, (output.shape[-2], output.shape[-1]))]

    def record_tokens(name: str, attention: Attention) -> None:
        if attention.grid is None:
            left_out[name] = NO_GRID
        elif not attention.mix.isfinite().all():
            raise RecastError(f"{name} has attention that is not finite: nothing can be drawn")
        elif name in pools:
            layers[name] = attention  # its maps depend on the likeliest classes, known at the end
        else:
            layers[name] = token_layers(name, attention, token_names(model, attention.num_prefix))

    with watched(model, record_recast, record_tokens, left_out.__setitem__), in_eval(model), torch.no_grad():
        output = model(image)
    best = likeliest(output, classes, TOP_CLASSES, outputs)
    described = []
    for name, layer in layers.items():
        described += [pool_layer(name, layer, pools[name].num_classes, best)] if isinstance(layer, Attention) else layer
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names_by_reason.setdefault(reason, []).append(name)
    notes = [f"No maps of {listed(names, NAMED)}: {reason}." for reason, names in names_by_reason.items()]
    return output, described, notes


@torch.no_grad()
def recast_layer(name: str, layer: RecastLayer, x: Tensor, size: tuple[int, int] | None = None) -> Described:
    """Return a recast layer for an input (1, C, height, width), and an output of `size` (default: by the geometry).

    The content maps of GPSA and of attention beside a convolution, or the maps of C-MHSA.
    """
    if isinstance(layer, AttentionBeside):
        return _beside(name, layer, x, size or layer.geometry.output_size(*x.shape[-2:]))
    geometry, (height, width) = layer.geometry, x.shape[-2:]
    padded, (at_rows, at_columns) = geometry.padded_size(height, width), geometry.pixels(height, width)
    queries = geometry.query_positions(height, width)
    if isinstance(layer, GPSA):
        weights = expand_heads(layer.weights())
        kind, gate, mix = "gpsa", f"{layer.config.gate} gate", _mix_of(name, layer, weights)
        maps_of: Rows = content_rows(x, weights)
    else:
        kind, gate, mix, maps_of = "maps", "C-MHSA", {}, rows_of(layer, x)
    keys = range(padded[0])[at_rows], range(padded[1])[at_columns]
    offsets = tuple(geometry.offsets())
    described = Layer(name, kind, f"{geometry}, {gate}", geometry.kernel, offsets, padded, keys, queries, **mix)

    def on_pixels(indices: Tensor) -> Tensor:
        return maps_of(indices.to(x.device))[0].float().unflatten(-1, padded)[..., at_rows, at_columns]

    chunk = MAX_NUMBERS // (layer.num_heads * padded[0] * padded[1])
    return described, _stored(on_pixels, (len(queries[0]), len(queries[1])), (height, width), chunk)


def _beside(name: str, layer: AttentionBeside, x: Tensor, size: tuple[int, int]) -> Described:
    """Return the content map beside a convolution; of an output with more rows than its input, a query per pixel."""
    keys, w = (x.shape[-2], x.shape[-1]), layer.weights()
    counts = [min(count, most) for count, most in zip(size, keys, strict=True)]
    pixels, gamma = query_pixels(x, *counts).flatten(2), _array(layer.gates()["gamma"])

    def maps_of(indices: Tensor) -> Tensor:
        maps = attention_map(x, pixels[:, :, indices.to(x.device), None], w)[0].float()
        if not (maps.isfinite().all() and np.isfinite(gamma).all()):
            raise RecastError(f"{name} has a gate or attention that is not finite: nothing can be drawn")
        return maps.unflatten(-1, keys)

    at = []
    for most, count in zip(keys, counts, strict=True):  # evenly spaced around the middle
        step = most // count
        first = (most - 1 - (count - 1) * step) // 2
        at.append(range(first, first + count * step, step))
    is_after = isinstance(layer.conv, PassThrough)
    text = f"content attention {'after the blocks' if is_after else f'beside {_kernel_of(layer.conv)}'}"
    grid = range(keys[0]), range(keys[1])
    if not gamma.any():
        text += "; closed: γ is 0, the map does not reach the output"
    described = Layer(name, "maps", text, (1, 1), (), keys, grid, (at[0], at[1]), ("content",), (("max |γ|", gamma),))
    return described, _stored(maps_of, (counts[0], counts[1]), keys, MAX_NUMBERS // (keys[0] * keys[1]))


def _kernel_of(conv: nn.Module) -> str:
    """Return "the 3×3 Conv2d"; of a module without a kernel size its class alone."""
    kernel = getattr(conv, "kernel_size", None)
    size = "×".join(map(str, kernel)) + " " if isinstance(kernel, tuple) else ""
    return f"the {size}{type(conv).__name__}"


def _mix_of(name: str, layer: GPSA, w: Weights) -> dict[str, Any]:
    """Return the fields of `Layer` that determine how a GPSA layer mixes its maps.

    Gates and spans of maps that a head lacks are NaN.
    """
    gates, parts = layer.gates(), {"shift": w.shift, "gaussian": w.gates.gaussian, "content": w.gates.content}
    values = parts | {"center": w.center, "alpha": w.alpha}
    if not all(bool(value.isfinite().all()) for value in values.values() if value is not None):
        raise RecastError(f"{name} has gates or positions that are not finite: nothing can be drawn")
    # the share of content first, then what else shapes the map
    if layer.config.gate == "sigmoid":
        symbols = {"1−σ(λ)": 1 - gates["sigma"], "1/α": layer.spans()}
    else:
        symbols = {"γ": gates["gamma"], "s": gates["s"], "1/α": layer.spans()}
    has_content, has_gaussian = (
        np.isin(range(layer.num_heads), heads) for heads in (layer.content_heads, layer.gaussian_heads)
    )
    shown = tuple(
        (symbol, np.where(has_gaussian if symbol in {"s", "1/α"} else has_content, _array(value), np.float32("nan")))
        for symbol, value in symbols.items()
    )
    return {"gates": shown} | {part: None if value is None else _array(value) for part, value in values.items()}


def token_layers(name: str, attention: Attention, names: Sequence[str]) -> list[Described]:
    """Return attention over tokens as layers of a page.

    The maps of the patches have a query. The maps of the tokens before them have none: "NAME (class token)", the mean
    over heads first. Registers are left out because the network reads nothing from them.
    """
    layers: list[Described] = []
    signed = bool((attention.mix < 0).any())
    heads, (height, width) = _heads(attention.mix.shape[1]), attention.tokens.shape[-2:]
    text = f"{plural(len(heads), 'head')} over {height}×{width} patches"
    text += f" and {plural(attention.num_prefix, 'token')} before them" if attention.num_prefix else ""
    text += ", weights of either sign" if signed else ""
    if attention.patches is not None:
        maps = attention.patches[0].float()
        height, width = maps.shape[-2:]
        stored = _stored(lambda indices: maps[:, indices], (height, width), (height, width), len(maps[0]), signed)
        layers.append((_layer(name, "maps", text, maps, heads), stored))
    for token, maps in zip(names, attention.tokens[0].float().unbind(1), strict=False):
        if not token.startswith("register"):
            shown = (token,) if len(maps) == 1 else ("mean", *heads)
            description = f"attention of the {token}: {text}"
            layers.append(_class_maps(f"{name} ({token})", description, _mean_first(maps), shown, signed=signed))
    return layers


def pool_layer(name: str, attention: Attention, num_classes: int | None, best: Sequence[Prediction]) -> Described:
    """Return an attention pool as a layer of a page: a map per head, or per likely class if it has a token per class.

    Maps of classes are means over heads. Attention that a token gives to itself is stated in the name of its map.
    """
    maps, on_token = attention.tokens[0].float(), attention.kept[0].float()  # (H, T, h, w), (H, T)
    text = f"attention pooling, {'one token' if num_classes is None else 'one token per class'}"
    text += ", which is among its own keys" if attention.num_prefix else ""
    text += "" if len(maps) == 1 else f", {len(maps)} heads{'' if num_classes is None else ' (their mean)'}"
    if num_classes is None:
        maps, on_token = _mean_first(maps[:, 0]), _mean_first(on_token[:, 0])
        names = image_names = ("pooled",) if len(maps) == 1 else ("mean", *_heads(len(maps) - 1))
    else:
        # outputs that are not one number per class have no ranking: show the first classes
        ranking = best if best and maps.shape[1] == num_classes else [Prediction("", 0, i) for i in range(num_classes)]
        top = ranking[:TOP_CLASSES]
        numbers = [prediction.number for prediction in top]
        maps, on_token = maps.mean(0)[numbers], on_token.mean(0)[numbers]
        names = tuple(f"likeliest class, {i + 1}" for i in range(len(top)))
        image_names = tuple(map(map_name, top))
    if attention.num_prefix:
        shares = zip(image_names, on_token.tolist(), strict=True)
        image_names = tuple(f"{name} ({share_text(share)} on the token itself)" for name, share in shares)
    return _class_maps(name, text, maps, names, image_names)


def cam_layer(maps: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> Described:
    """Return Grad-CAM (1, T, h, w) of the same classes in every arm, side by side; `names` of the maps by arm."""
    size = [max(cam.shape[axis] for cam in maps.values()) for axis in (-2, -1)]
    large = [nn.functional.interpolate(cam.float(), size, mode="bilinear")[0] for cam in maps.values()]
    labels = tuple(name for arm in maps for name in names[arm])
    sizes = " and ".join(dict.fromkeys("{}×{}".format(*cam.shape[-2:]) for cam in maps.values()))
    text = f"of the last map, {sizes}: evidence for a class, not attention"
    return _class_maps(GRAD_CAM, text, torch.cat(large), labels, labels)


def _stored(
    maps_of: Callable[[Tensor], Tensor],
    queries: tuple[int, int],
    keys: tuple[int, int],
    chunk: int,
    signed: bool = False,
) -> Maps:
    """Store maps with a query: every n-th query above `MAX_QUERIES`, sums over blocks of keys above `MAX_KEYS`.

    `maps_of` takes indices of queries (n,), at most `chunk`, and returns (H, n, h, w).
    """
    step, pool = _step(queries, MAX_QUERIES), _step(keys, MAX_KEYS)
    # start in the middle of the first group
    rows, columns = (tuple(range(min(step // 2, size - 1), size, step)) for size in queries)
    indices = torch.tensor([i * queries[1] + j for i in rows for j in columns])
    values = torch.cat([_pooled(maps_of(part), pool) for part in indices.split(max(1, chunk))], dim=1)
    return Maps.of(_array(values.unflatten(1, (len(rows), len(columns)))), rows, columns, pool, signed=signed)


def _class_maps(
    name: str, text: str, maps: Tensor, names: tuple[str, ...], image_names: tuple[str, ...] = (), signed: bool = False
) -> Described:
    """Store maps (K, h, w) without a query; `image_names` are their names for this image.

    Blocks at the border hold fewer pixels. They are scaled up to full blocks, or a uniform map would have an edge.
    """
    pool = _step(maps.shape[-2:], MAX_PIXELS)
    blocks = (_pooled(maps, pool) / _pooled(torch.ones_like(maps), pool) * pool**2)[:, None, None]
    stored = Maps.of(_array(blocks), (0,), (0,), pool, image_names, signed)
    return _layer(name, "classes", text, maps, names), stored


def _layer(name: str, kind: str, text: str, maps: Tensor, names: tuple[str, ...]) -> Layer:
    height, width = maps.shape[-2:]
    grid = range(height), range(width)
    return Layer(name, kind, text, (1, 1), (), (height, width), grid, grid, names)


def _mean_first(maps: Tensor) -> Tensor:
    """Return the mean over heads, then each head; a single head as it is."""
    return maps if len(maps) == 1 else torch.cat((maps.mean(0, keepdim=True), maps))


def map_name(prediction: Prediction) -> str:
    """Return the name of the map of a class: "tabby, 61 %"; a class without a name is given by its number."""
    if not prediction.name:
        return f"class {prediction.number}"
    prefix = "class " if prediction.name == str(prediction.number) else ""
    return f"{prefix}{prediction.name}, {prediction.value}"


def _heads(count: int) -> tuple[str, ...]:
    return tuple(f"head {i + 1}" for i in range(count))


def _step(grid: Sequence[int], most: int) -> int:
    """Return the smallest power of two that leaves at most `most` cells of a grid (rows, columns)."""
    step = 1
    while -(-grid[0] // step) * -(-grid[1] // step) > most:
        step *= 2
    return step


def _pooled(maps: Tensor, pool: int) -> Tensor:
    """Sum over blocks of keys: (…, Y, X) → (…, ⌈Y/pool⌉, ⌈X/pool⌉)."""
    down, right = (-size % pool for size in maps.shape[-2:])
    padded = nn.functional.pad(maps, (0, right, 0, down))
    return padded.unflatten(-1, (-1, pool)).unflatten(-3, (-1, pool)).sum((-3, -1))


def _array(values: Tensor) -> Floats:
    return values.detach().float().cpu().numpy()
