"""Which forms does `recast.tune_` choose, and are they faster when measured again?

    OMP_NUM_THREADS=1 python benchmarks/tune.py          # writes results/tune.csv (two minutes of the processor)

A row stands for the layers of a network, with open gates, that compute the same on inputs of the same shape, in
inference and in training (forward and backward). Columns: network; heads (with content: one, or all nine, with
Gaussians and W_val); those of `recast.surgery.tuning.Timed`; again (time of the chosen form over that of the form
before, from a second call of `tune_`); machine. With one thread a busy machine does not disturb the times.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import timm
import torch
from timing import RESULTS, machine, open_gates, write

import recast
import recast.papers.networks
from recast.layers.config import PAPERS_LAYER

NETWORKS: dict[str, tuple[int, int, Any]] = {
    "cifar_resnet20": (32, 32, None),
    "resnet18": (128, 8, None),
    "resnet26t": (256, 4, None),
    "resnet50": (224, 2, ["layer[34].*.conv2"]),
}
"""Network → side of an image, images, layers (None: the config's own)."""
HEADS: dict[str, dict[str, Any]] = {
    "beside": {},
    "one": {"gate": "linear", "content_heads": 1},
    "all": {"gate": "linear", **PAPERS_LAYER},
}


def measure(
    name: str, heads: str, device: torch.device, seconds: float, images: int | None = None
) -> Iterator[dict[str, Any]]:
    """Tune a network twice, and yield a row per kind of layer."""
    torch.manual_seed(0)
    size, batch, where = NETWORKS[name]
    x = torch.randn(images or batch, 3, size, size, device=device)
    model, config = timm.create_model(name), recast.RecastConfig(**HEADS[heads])
    model = open_gates(recast.recast_(model, recast.plan(model, x[:1].cpu(), config, where=where))).to(device)
    first, second = recast.tune_(model, x, seconds=seconds), recast.tune_(model, x, seconds=seconds)
    print(name, heads, first, sep="\n", flush=True)
    for row, repeated in zip(first, second, strict=True):
        again = getattr(repeated, f"{row.chosen}_ms") / getattr(repeated, f"{row.before}_ms")
        values = {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(row).items()}
        yield {"network": name, "heads": heads, **values, "again": round(again, 3), "machine": machine()}


def main() -> None:
    """Measure every network; write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="time per form")
    seconds = parser.parse_args().seconds
    rows: list[dict[str, Any]] = []
    for name, heads in (*((name, "beside") for name in NETWORKS), ("resnet50", "one"), ("resnet50", "all")):
        rows += measure(name, heads, torch.device("cpu"), seconds)
        write(RESULTS / "tune.csv", rows)


if __name__ == "__main__":
    main()
