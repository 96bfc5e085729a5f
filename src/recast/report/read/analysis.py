"""RUN/analysis/*.csv: Fourier curves, heads, similarity of layers, and on which images the arms agree."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from recast.errors import RecastError

T = TypeVar("T")


@dataclass(frozen=True)
class FourierPoint:
    """One point of a block's curve: log amplitude minus that of the constant part (PRS, Fig. 2)."""

    model: str
    block: str
    index: int
    depth: float
    """0 for the first block, 1 for the last."""
    frequency: float
    """In units of π: 1 is the fastest change that the feature map can hold."""
    delta: float
    mode: str
    n: int


@dataclass(frozen=True)
class Head:
    """What one head does, measured on `n` images."""

    model: str
    epoch: int | None
    layer: str
    head: int
    tap: tuple[int, int] | None
    gate: float
    """Share of content attention."""
    span: float
    """1/α; NaN where it is infinite or there is none."""
    distance: float
    """Mean attention distance in pixels of the layer's input."""
    nonlocality: float
    entropy: float
    """In nats."""
    is_convolution: bool
    n: int


@dataclass(frozen=True)
class Similarity:
    """Linear CKA between a layer of one model and a layer of another."""

    model_a: str
    layer_a: str
    model_b: str
    layer_b: str
    cka: float
    n: int


@dataclass(frozen=True)
class Prediction:
    """What the arms say to one image, by class name."""

    index: int
    image: str
    label: str
    arms: dict[str, str]


@dataclass(frozen=True)
class Analysis:
    """The tables of RUN/analysis; an empty list where there is no file."""

    fourier: list[FourierPoint] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    cka: list[Similarity] = field(default_factory=list)
    agreement: list[Prediction] = field(default_factory=list)


def read_analysis(folder: Path) -> Analysis:
    """Raises RecastError with file and line for a table that is cut off or has other columns."""
    return Analysis(
        fourier=_read(folder / "fourier.csv", FOURIER, _fourier),
        heads=_read(folder / "heads.csv", HEADS, _head),
        cka=_read(folder / "cka.csv", CKA, _similarity),
        agreement=_read(folder / "agreement.csv", AGREEMENT, _prediction),
    )


FOURIER = ("model", "block", "index", "depth", "frequency", "delta_log_amplitude", "mode", "n")
NUMBERS = ("gate", "span", "distance", "nonlocality", "entropy")
HEADS = ("model", "epoch", "layer", "head", "tap_row", "tap_column", *NUMBERS, "is_convolution", "n")
CKA = ("model_a", "layer_a", "model_b", "layer_b", "cka", "n")
AGREEMENT = ("index", "image", "label")
"""The columns that must be there, in any order."""


def _read(path: Path, columns: tuple[str, ...], parse: Callable[[dict[str, str]], T]) -> list[T]:
    if not path.is_file():
        return []
    found: list[T] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise RecastError(f"{path} lacks the column {', '.join(missing)}: write it again with recast evaluate")
            for cells in reader:
                if None in cells or None in cells.values():
                    raise RecastError(f"{path} line {reader.line_num}: expected {len(reader.fieldnames or ())} cells")
                try:
                    found.append(parse(cells))
                except ValueError as error:
                    raise RecastError(f"{path} line {reader.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecastError(f"cannot read {path}: {error}") from None
    return found


def _number(text: str) -> float:
    return float(text) if text.strip() else math.nan


def _fourier(cells: dict[str, str]) -> FourierPoint:
    depth, frequency, delta = (_number(cells[name]) for name in ("depth", "frequency", "delta_log_amplitude"))
    model, block, mode = cells["model"], cells["block"], cells["mode"]
    return FourierPoint(model, block, int(cells["index"]), depth, frequency, delta, mode, int(cells["n"]))


def _head(cells: dict[str, str]) -> Head:
    row, column = cells["tap_row"].strip(), cells["tap_column"].strip()
    return Head(
        model=cells["model"],
        epoch=int(cells["epoch"]) if cells["epoch"].strip() else None,
        layer=cells["layer"],
        head=int(cells["head"]),
        tap=(int(row), int(column)) if row and column else None,
        gate=_number(cells["gate"]),
        span=_number(cells["span"]),
        distance=_number(cells["distance"]),
        nonlocality=_number(cells["nonlocality"]),
        entropy=_number(cells["entropy"]),
        is_convolution=cells["is_convolution"].strip().lower() in {"true", "1", "yes"},
        n=int(cells["n"]),
    )


def _similarity(cells: dict[str, str]) -> Similarity:
    cka, n = _number(cells["cka"]), int(cells["n"])
    return Similarity(cells["model_a"], cells["layer_a"], cells["model_b"], cells["layer_b"], cka, n)


def _prediction(cells: dict[str, str]) -> Prediction:
    arms = {arm: cells[arm] for arm in ("parent", "finetuned", "recast") if cells.get(arm)}
    return Prediction(int(cells["index"]), cells["image"], cells["label"], arms)
