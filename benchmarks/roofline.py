"""What keeps a layer from its bound: every step of a content head, per pair of a query and a key, by turns.

    python benchmarks/roofline.py              # writes results/roofline.csv (a minute on 2 cores)

Columns: side, channels, pass (forward, backward), step, library (what computes it), macs (multiply-accumulates of a
pair, 0 where it is no product), picoseconds (of a pair), spread, gmacs (10⁹ multiply-accumulates a second), share (of
the 3×3 convolution's speed at this map), machine.
`convolution` is that convolution, per pixel and not per pair. A head has a ninth of the channels in queries and keys,
and all of them in the values; a tensor of pairs holds what the operator holds at a time (`MAP_NUMBERS`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import RESULTS, by_turns, machine, spread, write
from torch import Tensor

from recast.layers.functional.streaming.stream import LONG, MAP_NUMBERS, TILE

RESULT = RESULTS / "roofline.csv"
MAPS = {(14, 512): 8, (28, 256): 4, (56, 128): 2, (112, 64): 1}
"""Side and channels of a map: images of the convolution."""
HEADS, ROUNDS = 9, 15


def held(side: int) -> tuple[int, int]:
    """Queries and keys of the tensor of pairs that the operator holds at a time."""
    keys = side * side if side * side <= LONG else TILE
    return max(side, min(side * side, MAP_NUMBERS["cpu"] // keys // side * side)), keys


def steps_of(side: int, channels: int) -> dict[tuple[str, str, str], tuple[int, Callable[[], object]]]:
    """Pass, step, library: its multiply-accumulates a pair, and a call on one tensor of pairs."""
    torch.manual_seed(0)
    (rows, keys), width = held(side), channels // HEADS
    query, d, values = torch.randn(rows, width), torch.randn(rows, channels), torch.randn(keys, channels)
    key, d_rows, q_rows = torch.randn(width, keys), d.T.contiguous(), query.T.contiguous()
    logits, d_map = torch.randn(rows, keys), torch.randn(rows, keys)
    attention, space = torch.softmax(logits, -1), torch.empty(rows, keys)
    inner = d_map.sum(-1, keepdim=True)
    is_long = keys < side * side

    def to_weights() -> None:
        if is_long:
            torch.exp(logits, out=space)
            space.sum(-1, keepdim=True)
        else:
            torch.softmax(logits, -1, out=space)

    def by_mkl(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
        out = torch.empty(len(a), b.shape[1])
        return {"MKL": lambda: torch.mm(a, b, out=out)}

    def to_logits() -> None:
        space.copy_(d_map)
        if is_long:
            space.sub_(inner).mul_(attention)
            return
        space.mul_(attention)
        space.sum(-1, keepdim=True)
        space.addcmul_(attention, inner, value=-1)

    products = {
        ("forward", "Q Kᵀ"): (width, by_mkl(query, key)),
        ("forward", "A V"): (channels, by_mkl(attention, values)),
        ("backward", "dA = dY Vᵀ"): (channels, by_mkl(d, values.T)),
        ("backward", "dV = dYᵀ A"): (channels, by_mkl(d_rows, attention)),
        ("backward", "dQ = dL K"): (width, by_mkl(d_map, key.T)),
        ("backward", "dK = Qᵀ dL"): (width, by_mkl(q_rows, d_map)),
    }
    found = {(*name, library): (macs, f) for name, (macs, ways) in products.items() for library, f in ways.items()}
    found["forward", "softmax", "torch"] = (0, to_weights)
    found["backward", "softmax", "torch"] = (0, to_logits)
    return found


def measure(side: int, channels: int, images: int) -> list[dict[str, Any]]:
    """Rows of one map."""
    steps = steps_of(side, channels)
    x, kernel = torch.randn(images, channels, side, side), torch.randn(channels, channels, 3, 3)
    conv = ("forward", "convolution", "oneDNN")
    # not by turns: the memory that its output gives back to the system would be asked for again by the next step
    seconds = by_turns({conv: lambda: F.conv2d(x, kernel, padding=1)}, ROUNDS)
    seconds |= by_turns({name: f for name, (_, f) in steps.items()}, ROUNDS)
    macs = {conv: 9 * channels**2, **{name: count for name, (count, _) in steps.items()}}
    pairs = dict.fromkeys(steps, math.prod(held(side)))
    pairs[conv] = images * side * side
    each = {name: statistics.median(of) / pairs[name] for name, of in seconds.items()}
    speed = macs[conv] / each[conv]
    rows = []
    for name, of in seconds.items():
        here = dict(zip(("pass", "step", "library"), name, strict=True))
        rows.append(
            {
                "side": side, "channels": channels, **here, "macs": macs[name],
                "picoseconds": round(1e12 * each[name], 1), "spread": round(spread(of), 3),
                "gmacs": round(macs[name] / each[name] / 1e9, 1) if macs[name] else "",
                "share": round(macs[name] / each[name] / speed, 3) if macs[name] else "", "machine": machine(),
            }
        )  # fmt: skip
        print(*list(rows[-1].values())[:-1], sep=",", flush=True)
    return rows


if __name__ == "__main__":
    torch.set_num_threads(2)
    with torch.no_grad():
        write(RESULT, [row for at, images in MAPS.items() for row in measure(*at, images)])
