"""Images with labels in a table: a CSV or Parquet file with a row for each image."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recast.errors import RecastError, first_line, listed, shown
from recast.lab.config import DataConfig, Recipe
from recast.lab.data.datasets import ImageFiles, LabelledImages, RawData
from recast.lab.data.images import ARRAYS, PHOTO, is_hidden, is_image_name
from recast.lab.data.parts import choose_parts, part_word, parts_note
from recast.lab.data.trees import composed, find_file
from recast.lab.optional import optional_package
from recast.lab.recipe import override
from recast.lab.tables import Table, read_table

IMAGES = (
    "path file filename file_name filepath file_path image image_id image_index image_name image_path img img_path"
).split()
LABELS = "label labels class class_name category finding_labels tags".split()
PARTS = "split set subset partition".split()
"""Usual names of the columns, in lower case and with _ for a space."""
BITS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""Cells of one-hot columns, each of which is a class."""


@dataclass(frozen=True)
class Labels:
    """The rows of a table."""

    file: str
    images: list[str]
    labels: list[list[str]]
    classes: list[str]
    parts: list[str] | None
    """Names of the parts; None if no column has them."""
    how: str
    """The columns and the separator."""

    @property
    def several(self) -> int:
        """Return the number of images that have not exactly one label."""
        return sum(len(row) != 1 for row in self.labels)


def with_task(recipe: Recipe) -> Recipe:
    """Return the recipe with the task of its table: multi-label if requested or if an image has several labels."""
    if recipe.data.name != "csv" or recipe.task.kind not in ("classify", "multilabel"):
        return recipe
    if recipe.task.kind == "classify":
        if not (count := (table := read_labels(recipe.data)).several):
            return recipe
        warnings.warn(
            f"{table.file}: {count} of {len(table.images)} images have several labels or none: task.kind is "
            "multilabel, without the recipe's Mixup, CutMix and label smoothing",
            stacklevel=2,
        )
    return override(recipe, {"data": {"name": "csv_multilabel"}, "task": {"kind": "multilabel"}})


def read_labels(config: DataConfig, is_multi: bool = False) -> Labels:
    """Read `labels_file`; with `is_multi` a single column of 0 and 1 is one class.

    Raises RecastError for a missing or ambiguous column, an empty cell, and one-hot cells other than 0 and 1.
    """
    path = Path(config.labels_file or "").expanduser()
    table = _read(path)
    if not table.rows:
        raise RecastError(f"{path} has no rows: expected one for each image")
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    image = _column(path, table.columns, config.path_column, IMAGES, "--path-column")
    if any(isinstance(cell, dict) for cell in columns[image]):
        raise RecastError(f"{path} holds images, not paths, in column {image}: use --data hfds/{path.parent}")
    cells = {name: list(map(_text, column)) for name, column in columns.items()}
    label = config.label_column
    options = [label] if label is None or label in cells else [name.strip() for name in label.split(",")]
    names = [_column(path, table.columns, name, LABELS, "--label-column") for name in dict.fromkeys(options)]
    _check_filled(path, image, cells[image])
    if len(names) > 1 or (is_multi and set(cells[names[0]]) <= BITS.keys()):
        labels, classes = _one_hot(path, {name: cells[name] for name in names}), names
        how = "labels in a column for each class"
    else:
        (name,) = names
        _check_filled(path, name, cells[name])
        usual = next((mark for mark in "|;" if any(mark in cell for cell in cells[name])), "none")
        mark = config.label_separator or usual
        split = [[cell] if mark == "none" else cell.split(mark) for cell in cells[name]]
        if any(isinstance(cell, list) for cell in columns[name]):  # Parquet has lists
            mark, split = "none", [list(map(_text, cell or ())) for cell in columns[name]]
        labels = [list(dict.fromkeys(filter(None, map(str.strip, row)))) for row in split]
        _check_filled(path, name, labels)
        classes = sorted({label for row in labels for label in row})
        if all(label.isdecimal() for label in classes):
            classes.sort(key=int)
        how = f"labels in {name}" + ("" if mark == "none" else f" split at {shown(mark)}")
    parts = next((cells[name] for name in cells if name.strip().lower() in PARTS), None)
    return Labels(str(path), cells[image], labels, classes, parts, f"paths in {image}, {how}")


def _read(path: Path) -> Table:
    if path.suffix.lower() not in (".parquet", ".pq"):
        return read_table(path)
    parquet = optional_package("pyarrow.parquet", "pyarrow", f"{path} requires pyarrow; a CSV file does not")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise RecastError(f"cannot read {path}: {first_line(error)}") from None
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return Table(path.stem, tuple(table.column_names), tuple(rows))


def _text(cell: object) -> str:
    """Return a cell as text; empty for one that is missing, also if a program wrote NaN there."""
    text = "" if cell is None else composed(str(cell).strip())
    return "" if text.lower() == "nan" else text


def _column(path: Path, columns: Sequence[str], name: str | None, usual: Sequence[str], option: str) -> str:
    """Return the column `name`, by default the one with a usual name. Raises RecastError unless there is one."""
    if name is None:
        fitting = [column for column in columns if column.strip().lower().replace(" ", "_") in usual]
    else:
        fitting = [column for column in columns if column == name]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RecastError(f"{path} has the columns {' and '.join(fitting)}: choose one with {option}, or rename one")
    if name is None and any(map(is_image_name, columns)):
        raise RecastError(f"{path} must name its columns in the first line, got {listed(columns, 5)}")
    missing = f"no column {shown(name)}" if name is not None else f"no column named {listed(usual, 6)}"
    several = ", or several of 0 and 1 (a,b,c)," * (usual is LABELS)
    raise RecastError(f"{path} has {missing}: choose one{several} of {listed(columns, 20)} with {option}")


def _check_filled(path: Path, column: str, cells: Sequence[str | list[str]]) -> None:
    if empty := [number for number, cell in enumerate(cells, start=1) if not cell]:
        raise RecastError(
            f"{path}: column {column} is empty or NaN in {len(empty)} of {len(cells)} rows, the first is row "
            f"{empty[0]}: fill them in or remove the rows"
        )


def _one_hot(path: Path, columns: dict[str, list[str]]) -> list[list[str]]:
    """Return the labels of every row. Raises RecastError for a cell that is neither 0 nor 1."""
    is_signed = {cell for cells in columns.values() for cell in cells} == {"-1", "1"}  # CelebA's
    bits = {"-1": False, "1": True} if is_signed else BITS
    wrong = [
        (name, number, cell)
        for name, cells in columns.items()
        for number, cell in enumerate(cells, start=1)
        if cell.lower() not in bits
    ]
    if wrong:
        name, number, cell = wrong[0]
        raise RecastError(
            f"{path}: {len(wrong)} cells in the columns of classes are neither 0 nor 1, the first is {shown(cell)} in "
            f"column {name}, row {number}"
        )
    rows = zip(*columns.values(), strict=True)
    return [[name for name, cell in zip(columns, row, strict=True) if bits[cell.lower()]] for row in rows]


def find_csv(config: DataConfig) -> RawData:
    """Read images with one label each from a table."""
    table = read_labels(config)
    if table.several:
        raise RecastError(
            f"{table.file}: {table.several} of {len(table.images)} images have several labels or none: use recast "
            "train --task multilabel, or --label-separator none if each cell is one label"
        )
    labels = torch.tensor([table.classes.index(label) for (label,) in table.labels])
    return find_images(config, table, lambda items, rows: ImageFiles(labels[rows], PHOTO, items))


def find_images(config: DataConfig, table: Labels, make: Callable[[list[str], Tensor], LabelledImages]) -> RawData:
    """Find the files of a table below data_dir, by default the folder of the table, and make their data sets.

    make: paths, numbers of their rows → the images of a part.

    Raises RecastError for rows without a file, or with that of another row, and for an unknown part.
    """
    root = Path(config.data_dir or Path(table.file).parent).expanduser()
    if not root.is_dir():
        raise RecastError(f"no such data folder: {root}")
    files, unused = _locate(root, table)
    missing = [name for name, file in zip(table.images, files, strict=True) if file is None]
    if missing and (config.bad_image == "stop" or len(missing) == len(files)):
        raise RecastError(
            f"{len(missing)} of {len(files)} images of {table.file} are not in {root}: {listed(missing, 3)}; add them, "
            "correct --data-dir, or skip them with --bad-image skip"
        )
    if twice := [file for file, count in Counter(filter(None, files)).items() if count > 1]:
        raise RecastError(
            f"{table.file} has several rows for an image ({len(twice)}: {listed(twice, 3)}); keep one each"
        )
    rows = [row for row, file in enumerate(files) if file is not None]
    notes = [
        f"{table.file}: {table.how}, classes: {len(table.classes)} ({listed(table.classes, 5)}); images: {len(rows)}, "
        f"{unused} more in {root} have no row" + (f"; {len(missing)} images are missing" if missing else "")
    ]

    def part(name: str | None) -> LabelledImages | None:
        chosen = [row for row in rows if table.parts is None or table.parts[row] == name]
        return make([str(files[row]) for row in chosen], torch.tensor(chosen, dtype=torch.long))

    if table.parts is None:
        train, val = part(None), None
    else:
        names = Counter(table.parts)
        if unknown := [name for name in names if part_word(name) is None]:
            raise RecastError(
                f"{table.file}: {sum(names[name] for name in unknown)} rows have the split {listed(unknown, 3)}: "
                "expected train, val or test; rename the column if it is not a split"
            )
        chosen = choose_parts(names, table.file)
        train, val = (part(name) if name else None for name in chosen)
        notes += parts_note(table.file, *chosen, names)
    return RawData(root.resolve().name, train, val, table.classes, crop="random", notes=notes)


def _locate(root: Path, table: Labels) -> tuple[list[str | None], int]:
    """Return the file of every row (None: missing), and the number of images that have no row.

    A cell may have more folders than there are below `root`, or lack folders or the ending of a file. Raises
    RecastError if several files fit.
    """
    fitting, everything = defaultdict[str, list[str]](list), set[str]()
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        arrays = [name for name in sorted(names) if name.lower().endswith(ARRAYS) and not is_hidden(name)]
        for name in list(filter(is_image_name, sorted(names))) or arrays:
            path = Path(folder, name)
            everything.add(os.path.abspath(path))
            parts = composed(path.relative_to(root).as_posix()).split("/")
            for start in range(len(parts)):
                ending = "/".join(parts[start:])
                fitting[ending].append(str(path))
                fitting[os.path.splitext(ending)[0]].append(str(path))
    files, unclear = list[str | None](), dict[str, list[str]]()
    for name in table.images:
        parts = name.replace("\\", "/").split("/")
        exact = find_file(root, name)
        matches = [os.path.normpath(exact)] if exact else []
        for start in range(0 if exact is None else len(parts), len(parts)):
            if matches := fitting.get("/".join(parts[start:]), []):
                break
        if len(matches) > 1:
            unclear[name] = matches
        files.append(matches[0] if matches else None)
    if unclear:
        name, matches = next(iter(unclear.items()))
        raise RecastError(
            f"{len(unclear)} images of {table.file} match several files in {root}: {name} may be {listed(matches, 2)}; "
            "add folder and suffix in the table"
        )
    return files, len(everything.difference(map(os.path.abspath, filter(None, files))))
