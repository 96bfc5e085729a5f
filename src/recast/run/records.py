"""What a run writes down, one definition for those who write and those who read it. Imports no torch.

metrics.jsonl           Epoch, one a line
schedule.json           Switching, with a Switch for every swap and a Probe for every look at the gates
evaluation.json         Evaluation, with a Provenance for every suite
rows.csv                Row                     differences.csv     Difference
analysis/fourier.csv    FourierLine             analysis/heads.csv  HeadLine
analysis/cka.csv        SimilarityLine          analysis/agreement.csv  a column for every arm
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from recast.errors import RecastError
from recast.run.fields import read_fields
from recast.run.files import replaced
from recast.run.schedule import Schedule

T = TypeVar("T")
Cell = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What is known after an epoch of training; epoch 0 is measured before any."""

    epoch: int
    train_loss: float | None = None
    val_loss: float
    val_top1: float
    """In percent."""
    lr: float | None = None
    gate_lr: float | None = None
    seconds: float | None = None
    images_per_second: float | None = None
    data_wait: float | None = None
    """Share of the time that was spent waiting for data."""
    bad_images: int = 0
    """Images that could not be read."""
    bad_val_images: int = 0
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of every GPSA layer: gate, backend, the gates of every head and their spans 1/α."""


@dataclass(frozen=True)
class Measured:
    """The network on the validation images."""

    val_loss: float
    val_top1: float
    """In percent."""


@dataclass
class Switch:
    """Layers that became attention before `epoch`; validation right before and right after it, before any training."""

    epoch: int
    layers: tuple[str, ...]
    before: Measured
    after: Measured | None = None
    """None: not measured yet."""


@dataclass
class Probe:
    """What a learned schedule compared after an epoch, as falls of the training loss in one epoch."""

    epoch: int
    train_loss: float | None
    delivered: float | None
    """By how much the training loss fell in this epoch; None where the one before was not measured."""
    promised: dict[str, float]
    """Layer that is a convolution → fall of the loss that its gates promise for an epoch."""
    chosen: list[str]
    """The layers that become attention next."""


SWITCHING_VERSION = 1
"""Of schedule.json."""


@dataclass(kw_only=True)
class Switching:
    """A schedule and what came of it. Epochs count from 1; a date is the first epoch in which a layer is attention."""

    schedule: Schedule
    """As far as it is decided."""
    epochs: int
    """Of the whole training."""
    switches: list[Switch]
    """Those that have happened."""
    probes: list[Probe]

    def to_dict(self) -> dict[str, Any]:
        """The content of schedule.json: the schedule's fields stand beside the others."""
        others = asdict(self)
        del others["schedule"]
        return {"version": SWITCHING_VERSION, **self.schedule.to_dict(), **others}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], source: str) -> Switching:
        """The inverse of `to_dict`. Raises RecastError that names `source` and the key that is wrong or missing."""
        if found["version"] != SWITCHING_VERSION:
            raise RecastError(
                f"{source} is of version {found['version']}: this recast reads version {SWITCHING_VERSION}"
            )
        read_fields(Schedule, found, source, strict=False)  # names its keys as the file does
        return read_fields(cls, {**found, "schedule": found}, source, strict=False)

    @property
    def switched(self) -> list[str]:
        """The layers that have become attention, in that order."""
        return [layer for switch in self.switches for layer in switch.layers]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """How the numbers of one suite were made."""

    command: str
    date: str
    seconds: float
    together_with: list[str] = field(default_factory=list)
    """Suites of the same pass over the images, which share its seconds."""
    dataset: str
    images: int
    options: dict[str, Any]
    device: str
    machine: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Evaluation:
    suites: dict[str, Provenance]


@dataclass(frozen=True)
class Row:
    """One measured number."""

    run: str
    model: str
    """parent, finetuned or recast."""
    suite: str
    """clean, fgsm, pgd, basic, cost, ..."""
    dataset: str
    metric: str
    """top1 and the like are in percent; `top1@E` is under an attack with ε = E/255."""
    value: float
    n: int
    """Images behind the number."""
    low: float | None = None
    """The 95 % interval of the value over images, from `low` to `high`. None: there is none."""
    high: float | None = None


@dataclass(frozen=True)
class Difference:
    """value = what `model` has more than `against`, measured on the same images, with its paired 95 % interval."""

    run: str
    model: str
    against: str
    suite: str
    dataset: str
    metric: str
    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class FourierLine:
    """One point of a block's curve (PRS, Fig. 2)."""

    model: str
    block: str
    index: int
    depth: float
    """0 for the first block, 1 for the last."""
    frequency: float
    """In units of π: 1 is the fastest change that the feature map can hold."""
    delta_log_amplitude: float
    """Minus that of the constant part."""
    mode: str
    n: int


@dataclass(frozen=True)
class HeadLine:
    """What one head does, measured on `n` images."""

    model: str
    epoch: int | None
    """None: the network as it is now."""
    layer: str
    head: int
    tap_row: int
    tap_column: int
    gate: float | None
    """Share of content attention; None where there is no gate."""
    span: float | None
    """1/α; None where it is infinite or there is none."""
    distance: float | None
    """Mean attention distance in pixels of the layer's input."""
    nonlocality: float | None
    entropy: float | None
    """In nats."""
    is_convolution: bool
    n: int


@dataclass(frozen=True)
class SimilarityLine:
    """Linear CKA between a layer of one model and one of another; None where one is the same for all images."""

    model_a: str
    layer_a: str
    model_b: str
    layer_b: str
    cka: float | None
    n: int


@dataclass(frozen=True)
class Table:
    """Named columns and their rows; None is an empty cell."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, name: str, kind: type[Any], lines: Iterable[Any]) -> Table:
        """The table of records of one kind: their fields are its columns."""
        return cls(name, _columns(kind), tuple(astuple(line) for line in lines))

    @property
    def images(self) -> int:
        """How many images are behind it: the largest `n`, or a row each."""
        return max((int(str(n)) for n in self.column("n")), default=0) if "n" in self.columns else len(self.rows)

    def column(self, name: str) -> list[Cell]:
        """The cells of one column."""
        return [row[self.columns.index(name)] for row in self.rows]


def write_table(folder: str | Path, table: Table) -> Path:
    """Write FOLDER/NAME.csv whole or not at all: floats with 6 digits, "true" and "false"; returns its path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.csv"
    _write(path, table.columns, ([_short(cell) for cell in row] for row in table.rows))
    return path


def read_table(path: str | Path) -> Table:
    """The table of a CSV file, its cells as text. Raises `RecastError` if it is missing or its rows are not even."""
    path = Path(path)
    columns, lines = _cells(path)
    if not columns:
        raise RecastError(f"{path} is no table: expected a line of columns, then rows with as many cells")
    return Table(path.stem, tuple(columns), tuple(tuple(cells) for _, cells in lines))


def read_records(path: str | Path, kind: type[T]) -> list[T]:
    """The records of a CSV file. Raises RecastError with file and line when it is missing or not a table of these."""
    path, names, hints = Path(path), _columns(kind), get_type_hints(kind)
    columns, lines = _cells(path)
    if tuple(columns) != names:
        raise RecastError(
            f"{path} must start with the columns {','.join(names)}, got {','.join(columns)!r}: move it away, and "
            "recast evaluate writes a new one"
        )
    return [
        kind(*(_value(hints[name], cell, f"{where}: {name}") for name, cell in zip(names, cells, strict=True)))
        for where, cells in lines
    ]


def write_records(path: str | Path, kind: type[Row] | type[Difference], records: Iterable[Row | Difference]) -> None:
    """Put rows or differences into a run's CSV file: those of a suite replace all older ones of that suite.

    So what stands there of a suite was measured together. The records that stay get the new ones' name of the run: the
    folder may have been renamed. An existing file that is no table of this kind is left alone: RecastError.
    """
    path, new = Path(path), list(records)
    measured = {record.suite for record in new}
    older = [one for one in (read_records(path, kind) if path.exists() else []) if one.suite not in measured]
    kept = [replace(one, run=new[0].run) for one in older] if new else older
    _write(path, _columns(kind), map(astuple, (*kept, *new)))


def _columns(kind: type[Any]) -> tuple[str, ...]:
    return tuple(column.name for column in fields(kind))


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def _cells(path: Path) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The columns of a CSV file, and (its place, its cells) of every other line that is not empty."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            lines = [(f"{path} line {reader.line_num}", cells) for cells in reader if cells]
    except FileNotFoundError:
        raise RecastError(f"no such file of results: {path}. Write one with `recast evaluate`") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecastError(f"cannot read {path}: {error}") from None
    columns = lines[0][1] if lines else []
    for where, cells in lines:
        if len(cells) != len(columns):
            raise RecastError(f"{where}: expected {len(columns)} cells ({','.join(columns)}), got {len(cells)}")
    return columns, lines[1:]


def _value(hint: Any, text: str, where: str) -> Cell:
    """A cell as the type that `hint` names; empty for None."""
    try:
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        if hint is str:
            return text
        if not text and hint not in (int, float):
            return None
        return int(text) if hint in (int, int | None) else float(text)
    except (ValueError, KeyError):
        what = {bool: "true or false", int: "an integer", int | None: "an integer"}.get(hint, "a number")
        raise RecastError(f"{where} must be {what}, got {text!r}") from None


def _short(cell: Cell) -> str:
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
