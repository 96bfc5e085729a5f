"""Attention pooling in every architecture of timm and torchvision: does the network compute what it did?

    python benchmarks/pooling_zoo.py                      # writes results/pooling_zoo.csv; goes on where it was stopped
    python benchmarks/pooling_zoo.py --only 'timm:resnet*' --out /tmp/resnets.csv
    python benchmarks/pooling_zoo.py --again failed

Random weights (norms in U(0.5, 1.5), no zero weights), small images, one process each. `attention_pool_` is applied
with a single token and with a token a class, both starting as an average:

    exact     the network averaged, and the logits are the same to 1e-4 (relative, fp32)
    moved     attention pooling is in and works, but the network did not average (class token, maximum, own classifier
              first): the logits are others
    failed    it cannot be put in; `cause` says why
    no logits the architecture gives no (batch, classes): detection, segmentation, encoders

`control`: how far the logits move when the query's weights are redrawn; a pool that nothing reads would not move them.
"""

from __future__ import annotations

import argparse
import copy
import csv
import resource
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn

import recast.layers.attention_pool
from recast.layers.attention_pool import attention_pools
from recast.run.config import PoolConfig
from recast.surgery.pooling.find import find_place
from recast.surgery.pooling.swap import put_pool_
from recast.zoo.architectures import architectures, instantiate, skeleton, spatial_convolutions

OUT = Path(__file__).parents[1] / "results" / "pooling_zoo.csv"
TOLERANCE = 1e-4
LARGE = 100_000_000
"""Parameters from which on a single token is looked at alone: a second copy takes memory and time."""


@dataclass
class Row:
    """What was found about one architecture; errors are relative, max|a − b| / max|b|."""

    model: str
    status: str = "failed"
    cause: str = ""
    is_convnet: bool = False
    """It holds a spatial convolution that is no patch embedding."""
    size: str = ""
    how: str = ""
    place: str = ""
    channels: int = 0
    positions: str = ""
    averages: bool | str = ""
    single_error: float | str = ""
    per_class_error: float | str = ""
    per_class_cause: str = ""
    control: float | str = ""
    seconds: float = 0.0


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@torch.no_grad()
def examine(name: str) -> Row:
    """One architecture; whatever goes wrong becomes the row's cause."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recast.layers.attention_pool.trunc_normal_ = _normal_
    begin, row = time.perf_counter(), Row(name)
    try:
        _examine(name, row)
    except Exception as found:
        row.status = "no logits" if "give (batch, classes)" in str(found) else "failed"
        row.cause = f"{type(found).__name__}: {' '.join(str(found).split())[:300]}"
    row.seconds = round(time.perf_counter() - begin, 1)
    return row


@torch.no_grad()
def _normal_(tensor: Tensor, std: float) -> Tensor:
    """Truncating takes most of the time in wide networks, and matters to none of the comparisons."""
    return tensor.normal_(std=std)


def _examine(name: str, row: Row) -> None:
    bare = skeleton(name)
    row.is_convnet = bool(spatial_convolutions(bare))
    parameters = sum(p.numel() for p in bare.parameters())
    del bare
    found = instantiate(name)
    x = found.inputs[0]
    row.size = "×".join(map(str, found.size))
    logits = found.model(x)
    torch.manual_seed(2)
    model = copy.deepcopy(found.model) if parameters < LARGE else found.model
    place = find_place(model, x)
    put_pool_(model, PoolConfig("single"), place)
    row.how, row.place, row.channels, row.averages = place.how, place.name, place.dim, place.averages
    row.positions = _positions(model, x)
    row.single_error = error(model(x), logits)
    row.control = _control(model, x)
    if place.classifier is None:
        row.per_class_cause = "the logits are not those of one linear layer"
    elif parameters < LARGE:
        del model
        put_pool_(found.model, PoolConfig("per_class"), place)
        row.per_class_error = error(found.model(x), logits)
    else:
        row.per_class_cause = "not tried, for its size"
    errors = [e for e in (row.single_error, row.per_class_error) if isinstance(e, float)]
    if not isinstance(row.control, float) or not row.control > 1e-6:
        raise RuntimeError(f"nothing reads the pooled features: other weights move the logits by {row.control}")
    row.status = "exact" if place.averages and max(errors) <= TOLERANCE else "moved"
    if row.status == "moved" and place.averages:
        row.status, row.cause = "failed", "the network averages, and its logits moved"


def _positions(model: nn.Module, x: Tensor) -> str:
    """How many positions are pooled."""
    (pool,) = attention_pools(model).values()
    seen: list[Tensor] = []
    handle = pool.register_forward_pre_hook(lambda _module, inputs: seen.append(pool.as_map(inputs[0])))
    model(x)
    handle.remove()
    return "×".join(map(str, seen[0].shape[-2:]))


def _control(model: nn.Module, x: Tensor) -> float:
    (pool,) = attention_pools(model).values()
    before = model(x)
    pool.attn.q.weight.normal_(std=0.5)
    pool.ls1.gamma.fill_(0.5)  # one position alone gets all the weight, whoever asks
    return error(model(x), before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["timm:*", "torchvision:*"], help="globs of names")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--again", help="run rows of this status again")
    options = parser.parse_args()
    known = {row["model"]: row for row in _read(options.out) if row["status"] != options.again}
    _write(options.out, list(known.values()))
    waiting = sorted((name for name in architectures(options.only) if name not in known), key=_expected_cost)
    context = get_context("forkserver")
    context.set_forkserver_preload(["recast.zoo.architectures", "recast.surgery.pooling.swap"])
    with ProcessPoolExecutor(options.workers, context, max_tasks_per_child=1) as processes:
        jobs = {processes.submit(examine, name): name for name in waiting}
        for number, job in enumerate(as_completed(jobs), 1):
            row = Row(jobs[job], cause=str(job.exception())) if job.exception() else job.result()
            with options.out.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(_plain(row))
            print(f"{number}/{len(waiting)} {row.model} {row.status} {row.cause}", file=sys.stderr, flush=True)
    rows = sorted(_read(options.out), key=lambda row: row["model"])
    _write(options.out, rows)
    for kind in ("True", "False"):
        found = [row for row in rows if row["is_convnet"] == kind]
        counts = Counter(row["status"] for row in found)
        split = sum(row["per_class_error"] != "" for row in found)
        print("convnets" if kind == "True" else "without a spatial convolution", dict(counts), f"per class: {split}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{sum(float(row['seconds']) for row in rows) / 60:.0f} minutes, at most {peak:.1f} GiB in a process")
    return 0


def _expected_cost(name: str) -> tuple[bool, int]:
    """Convnets first, the small ones first, as far as results/zoo.csv knows them."""
    row = _walked().get(name)
    return (row is None or row["spatial_convolutions"] == "0", 0 if row is None else int(row["parameters"]))


@cache
def _walked() -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in _read(OUT.with_name("zoo.csv"))}


COLUMNS = [field.name for field in fields(Row)]


def _plain(row: Row) -> dict[str, object]:
    return {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in asdict(row).items()}


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
