"""Ways to compute content attention with values that all heads share and that are wider than the keys, by turns.

    python benchmarks/content.py               # writes results/content.csv (about 3 minutes on 2 cores)

Columns: side, channels, batch, way, kernel (what torch runs for `scaled_dot_product_attention`), median_ms, spread,
over_streamed (time over the streaming operator's). Forward passes of nine heads from queries, keys and values to the
layer's output, W_out included.

streamed: `layers.functional.streaming`, one head and a few thousand queries at a time; "whole rows": its long maps by
torch's softmax too, all keys of a query at a time. composed: one batched product,
a softmax, one product with the values, which holds the whole maps. sdpa: values expanded over the heads; "padded"
widens queries and keys to the values' width, which the flash kernel wants; "chunks of N" cuts the values to N channels
and pads the keys to them. flex: torch's `flex_attention`, compiled, on the same values. linear: `content="linear"`.
pooled: keys and values averaged to 7×7.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from timing import RESULTS, by_turns, machine, ratio, spread, write
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.profiler import ProfilerActivity, profile

from recast.layers.functional.streaming import attend, stream

RESULT = RESULTS / "content.csv"
MAPS = ((14, 512, 8), (28, 256, 4), (56, 128, 1))
HEADS, POOL, ROUNDS = 9, 7, 7


def ways_of(side: int, channels: int, batch: int) -> dict[str, Callable[[], object]]:
    """Every way on the same queries, keys and values."""
    torch.manual_seed(0)
    width, tokens = channels // HEADS, side * side
    values = torch.randn(batch, tokens, channels)
    query, key = torch.randn(batch, tokens, HEADS * width), torch.randn(batch, tokens, HEADS * width)
    weight, gates = torch.randn(HEADS, channels, channels), torch.ones(HEADS)

    def per_head(t: Tensor) -> Tensor:
        return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    out = weight.transpose(1, 2).reshape(HEADS * channels, channels)

    def project(gathered: Tensor) -> Tensor:
        """(B, heads, N, C) through W_out."""
        return gathered.transpose(1, 2).flatten(2) @ out

    def operator(query: Tensor, key: Tensor, linear: bool) -> object:
        image, nothing = values.view(batch, side, side, channels), values.new_empty(0, side, side)
        heads, window = list(range(HEADS)), [0, 0, side, side]
        return attend(
            image, query, key, nothing, nothing, None, gates, weight, None, heads, [], [], [1, 1], window, 1,
            linear, False,
        )  # fmt: skip

    def whole_rows() -> object:
        with mock.patch.object(stream, "LONG", side**2):
            return operator(query, key, False)

    def linear() -> object:
        return operator(
            torch.softmax(query.unflatten(-1, (HEADS, -1)), -1).flatten(2),
            torch.softmax(key, 1).transpose(1, 2) @ values,
            True,
        )

    def composed() -> object:
        maps = torch.softmax(per_head(query) @ per_head(key).transpose(-1, -2) * width**-0.5, -1)
        return project((maps.flatten(1, 2) @ values).unflatten(1, (HEADS, -1)))

    every = values[:, None].expand(-1, HEADS, -1, -1)
    flex = torch.compile(flex_attention, dynamic=False)

    def sdpa(chunk: int, padded: bool) -> Callable[[], object]:
        def run() -> object:
            q, k = per_head(query), per_head(key)
            if padded:
                q, k = F.pad(q, (0, chunk - width)), F.pad(k, (0, chunk - width))
            parts = [F.scaled_dot_product_attention(q, k, v, scale=width**-0.5) for v in every.split(chunk, -1)]
            return project(torch.cat(parts, -1) if len(parts) > 1 else parts[0])

        return run

    def pooled() -> object:
        def pool(t: Tensor) -> Tensor:
            return F.adaptive_avg_pool2d(t.transpose(1, 2).unflatten(2, (side, side)), POOL).flatten(2).transpose(1, 2)

        maps = torch.softmax(per_head(query) @ per_head(pool(key)).transpose(-1, -2) * width**-0.5, -1)
        return project((maps.flatten(1, 2) @ pool(values)).unflatten(1, (HEADS, -1)))

    ways: dict[str, Callable[[], object]] = {
        "streamed": lambda: operator(query, key, False),
        "streamed, whole rows": whole_rows,
        "composed": composed,
        "composed, compiled": torch.compile(composed),
        "sdpa": sdpa(channels, padded=False),
        "sdpa padded": sdpa(channels, padded=True),
        "flex": lambda: project(flex(per_head(query), per_head(key), every, scale=width**-0.5)),
        "linear": linear,
        "pooled": pooled,
    }
    for chunk in (64, 128, 256):
        if width <= chunk < channels:
            ways[f"sdpa chunks of {chunk}"] = sdpa(chunk, padded=True)
    return ways


def kernel_of(way: Callable[[], object]) -> str:
    """The attention kernel that torch dispatches to."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        way()
    names = {event.key for event in seen.key_averages() if "scaled_dot_product" in event.key}
    return " ".join(sorted(name for name in names if name != "aten::scaled_dot_product_attention"))


def main() -> None:
    """All maps to the file."""
    torch.set_num_threads(2)
    rows = []
    with torch.no_grad():
        for side, channels, batch in MAPS:
            ways = ways_of(side, channels, batch)
            seconds = by_turns(ways, ROUNDS)
            for name, way in ways.items():
                rows.append(
                    {
                        "side": side, "channels": channels, "batch": batch, "way": name,
                        "kernel": kernel_of(way) if name.startswith("sdpa") else "",
                        "median_ms": round(1e3 * statistics.median(seconds[name]), 2),
                        "spread": round(spread(seconds[name]), 3),
                        "over_streamed": round(ratio(seconds[name], seconds["streamed"]), 2),
                        "machine": machine(),
                    }
                )  # fmt: skip
                print(*list(rows[-1].values())[:-1], sep=",", flush=True)
    write(RESULT, rows)


if __name__ == "__main__":
    main()
