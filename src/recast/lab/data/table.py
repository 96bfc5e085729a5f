"""Images with labels in a table: a CSV or Parquet file with a row for each image."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recast.errors import RecastError, listed, shown
from recast.lab.config import DataConfig
from recast.lab.data.columns import (
    BITS,
    IMAGES,
    LABELS,
    described,
    find_column,
    find_groups,
    find_parts,
    order_classes,
    split_labels,
)
from recast.lab.data.datasets import ImageFiles, LabelledImages, RawData
from recast.lab.data.images import ARRAYS, PHOTO, is_hidden, is_image_name
from recast.lab.data.parts import choose_parts, part_word, parts_note
from recast.lab.data.seeding import hold_out
from recast.lab.data.table_files import read_file
from recast.lab.data.trees import check_one_row, composed, find_file

MISSING = ("na", "n/a", "#n/a", "<na>", "none", "null")
"""Words that R, pandas and databases write for a missing value, in lower case; they may also name a class."""
NOWHERE = ("", ".", "..")
"""Parts of a path that are no names."""


@dataclass(frozen=True)
class Labels:
    """The rows of a table."""

    file: str
    images: list[str]
    labels: list[list[str]]
    classes: list[str]
    parts: list[str] | None
    """Names of the parts; None if no column has them."""
    groups: list[str] | None
    """The group of every image; None without `group_column`."""
    how: str
    """How each column is used."""
    notes: list[str]
    """What a user may not expect."""

    @property
    def several(self) -> int:
        """Return the number of images that have not exactly one label."""
        return sum(len(row) != 1 for row in self.labels)


def read_labels(config: DataConfig, is_multi: bool = False) -> Labels:
    """Read `labels_file`; with `is_multi` a single column of 0 and 1 is one class.

    Raises RecastError for a missing or ambiguous column, an empty cell, and cells that are not what the column is.
    """
    path = Path(config.labels_file or "").expanduser()
    table = read_file(path)
    if not table.rows:
        raise RecastError(f"{path} has no rows: expected one for each image")
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    image = find_column(path, table.columns, config.path_column, IMAGES, "--path-column")
    if any(isinstance(cell, dict) for cell in columns[image]):
        raise RecastError(f"{path} holds images, not paths, in column {image}: use --data hfds/{path.parent}")
    cells = {name: list(map(_text, column)) for name, column in columns.items()}
    label = config.label_column
    options = [label] if label is None or label in cells else [name.strip() for name in label.split(",")]
    names = [find_column(path, table.columns, name, LABELS, "--label-column") for name in dict.fromkeys(options)]
    _check_quotes(path, cells, {image, *names})
    _check_filled(path, image, cells[image])
    if len(names) > 1 or (is_multi and set(cells[names[0]]) <= BITS.keys()):
        labels, classes, notes = _one_hot(path, {name: cells[name] for name in names}), names, list[str]()
        use = {listed(names, 5): "classes of 0 and 1"}
    else:
        (name,) = names
        if any(isinstance(cell, list) for cell in columns[name]):  # Parquet has lists
            split, how = [list(map(_text, cell or ())) for cell in columns[name]], "lists"
        else:
            split, how = split_labels(path, name, cells[name], config.label_separator)
        labels, classes, notes = _one_column(path, name, split, how)
        use = {name: f"labels ({how})" if how else "label"}
    group = config.group_column and find_column(path, table.columns, config.group_column, (), "--group-column")
    if group:
        _check_filled(path, group, cells[group])
    others = {name: column for name, column in cells.items() if name not in {image, *names, group}}
    part, parts, unclear = find_parts(path, others)
    if not (part or group):
        unclear += find_groups(path, others)
    use = {image: "path", **use}
    if group:
        use[group] = "group"
    if part and parts:
        use[part] = f"split ({_counts(parts)})"
    how = described(use, [*use, *others])
    groups = cells[group] if group else None
    return Labels(str(path), cells[image], labels, classes, parts, groups, how, notes + unclear)


def _one_column(
    path: Path, name: str, cells: Sequence[Sequence[str]], how: str
) -> tuple[list[list[str]], list[str], list[str]]:
    """Return the labels of every row, the classes in order, and notes, from the cells of a column, split as `how` says.

    Raises RecastError for empty cells that hold one label each, for lists of 0 and 1, and if there is no label.
    """
    labels = [list(dict.fromkeys(filter(None, map(str.strip, row)))) for row in cells]
    if how == "lists":
        _check_no_bits(path, name, cells)
    if not how:
        _check_filled(path, name, labels)
    labels, classes, notes = order_classes(path, name, labels)
    if not classes:
        raise RecastError(f"{path}: column {name} holds no labels")
    for word in (name for name in classes if name.casefold() in MISSING):
        count = sum(word in row for row in labels)
        notes.append(f"{path}: {shown(word)} is a class ({count} rows): if it means a missing label, remove the rows")
    if empty := sum(not row for row in labels):
        notes.append(f"{path}: column {name} is empty in {empty} of {len(labels)} rows: images without a label")
    return labels, classes, notes


def _counts(cells: Sequence[str]) -> str:
    return listed([f"{value}: {count}" for value, count in Counter(cells).most_common()], 4)


def _text(cell: object) -> str:
    """Return a cell as text; empty for one that is missing, also if a program wrote NaN there."""
    text = "" if cell is None else composed(str(cell).strip())
    return "" if text.lower() == "nan" else text


def _check_quotes(path: Path, cells: dict[str, list[str]], used: set[str]) -> None:
    """Raise RecastError for a cell that goes on over the next rows: in a used column, or with the name of an image."""
    for name, column in cells.items():
        for number, cell in enumerate(column, start=1):
            if "\n" in cell and (name in used or any(map(is_image_name, re.split(r"[,;\t\n]", cell)))):
                raise RecastError(
                    f"{path}: a quotation mark opens column {name} of row {number} and takes in the lines after it: "
                    f"{shown(cell)}; remove it"
                )


def _check_no_bits(path: Path, column: str, rows: Sequence[Sequence[str]]) -> None:
    lengths = set(map(len, rows))
    if len(lengths) == 1 and lengths.pop() > 1 and all(cell in BITS for row in rows for cell in row):
        raise RecastError(
            f"{path}: column {column} holds lists of 0 and 1: write a column of 0 and 1 for each class, and name them "
            "with --label-column a,b,c"
        )


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
    files, unused, moved = locate(root, table.file, table.images)
    missing = [name for name, file in zip(table.images, files, strict=True) if file is None]
    if missing and (config.bad_image == "stop" or len(missing) == len(files)):
        raise RecastError(
            f"{len(missing)} of {len(files)} images of {table.file} are not in {root}: {listed(missing, 3)}; add them, "
            "correct --data-dir, or skip them with --bad-image skip"
        )
    check_one_row(table.file, filter(None, files))
    rows = [row for row, file in enumerate(files) if file is not None]
    notes = [
        f"{table.file}: {table.how}; classes: {len(table.classes)} ({listed(table.classes, 5)}); images: {len(rows)}, "
        f"{unused} more in {root} have no row" + (f"; {len(missing)} images are missing" if missing else ""),
        *table.notes,
        *moved,
    ]

    def part(name: str | None) -> LabelledImages | None:
        chosen = [row for row in rows if table.parts is None or table.parts[row] == name]
        return make([str(files[row]) for row in chosen], torch.tensor(chosen, dtype=torch.long))

    is_held_out = False
    if table.parts is None:
        train, val = part(None), None
        if table.groups and train:
            groups = [table.groups[row] for row in rows]
            train, val = map(train.subset, hold_out(train.labels, config.val_fraction, groups))
            is_held_out = True
            notes.append(f"{table.file}: held out are {len(val)} images, all those of their groups")
    else:
        chosen, remarks = _choose_parts(table, table.parts)
        train, val = (part(name) if name else None for name in chosen)
        notes += remarks
    return RawData(root.resolve().name, train, val, table.classes, crop="random", is_held_out=is_held_out, notes=notes)


def _choose_parts(table: Labels, parts: Sequence[str]) -> tuple[tuple[str | None, str | None], list[str]]:
    """Return the names of the training and validation part, and notes. Raises RecastError for an unknown name."""
    names = Counter(parts)
    if unknown := [name for name in names if part_word(name) is None]:
        shares = listed([name or "(empty)" for name in unknown], 3)
        raise RecastError(
            f"{table.file}: {sum(names[name] for name in unknown)} rows have the split {shares}: "
            "expected train, val or test; rename the column if it is not a split"
        )
    chosen = choose_parts(names, table.file)
    notes = parts_note(table.file, *chosen, names)
    pairs = set(zip(table.groups or (), parts, strict=False))
    sides = [{group for group, name in pairs if name == side} for side in chosen]
    if both := sorted(set.intersection(*sides)):
        notes.append(f"{table.file}: {len(both)} groups have training and validation images: {listed(both, 3)}")
    if chosen[0] and not chosen[1]:
        notes.append(f"{table.file}: no row is for validation: a random share of the training images is held out")
    return chosen, notes


def locate(root: Path, source: str, images: Sequence[str]) -> tuple[list[str | None], int, list[str]]:
    """Return the file of every image that `source` names (None: missing), the number of other images, and notes.

    A name may lack folders or the ending of a file; or it may have more folders than there are below `root`, which is
    then where they end. A file in another folder than the name's is not its image. Raises RecastError if several files
    fit, or if the folder that a name adds is another part than `root`.
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
    moved, places = dict[str, str](), Counter[str]()
    for name in images:
        parts = name.replace("\\", "/").split("/")
        exact = find_file(root, name)  # also an absolute path
        matches = [os.path.normpath(exact)] if exact else []
        for start in range(0 if exact is None else len(parts), len(parts)):
            matches = fitting.get("/".join(parts[start:]), [])
            is_there = start + 1 < len(parts) and parts[start] not in NOWHERE and (root / parts[start]).is_dir()
            if is_there or start:  # in no other folder: an image of the same name there is not this one
                matches = [match for match in matches if len(Path(match).relative_to(root).parts) == len(parts) - start]
            if matches and start and parts[start - 1] not in (*NOWHERE, root.resolve().name):
                moved[name] = parts[start - 1]
            if matches or is_there:
                break
        if matches and not exact and len(parts) == 1:
            places[os.path.relpath(os.path.dirname(matches[0]), root)] += 1
        if len(matches) > 1:
            unclear[name] = matches
        files.append(matches[0] if matches else None)
    if unclear:
        name, matches = next(iter(unclear.items()))
        raise RecastError(
            f"{len(unclear)} images of {source} match several files in {root}: {name} may be {listed(matches, 2)}; "
            "add folder and suffix in the table"
        )
    here = part_word(root.resolve().name)
    if other := [name for name, folder in moved.items() if here and part_word(folder) not in (None, here)]:
        raise RecastError(
            f"{len(other)} images of {source} are of another part than {root}: {listed(other, 3)}; correct --data-dir"
        )
    notes = list[str]()
    if moved:
        text = f"{len(moved)} images are in {root} itself, not in the table's folders: {listed(list(moved), 3)}"
        notes.append(f"{source}: {text}")
    if len(places) > 1:
        counts = [f"{folder} ({count})" for folder, count in places.most_common()]
        notes.append(f"{source}: names without a folder are of images in {len(places)} folders: {listed(counts, 5)}")
    return files, len(everything.difference(map(os.path.abspath, filter(None, files)))), notes
