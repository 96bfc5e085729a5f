"""What the columns of a table of labels are: paths, labels, the part, or not used; and what a cell of labels holds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from recast.errors import RecastError, listed, shown
from recast.lab.data.images import is_image_name
from recast.lab.data.parts import TRAINING, part_word

IMAGES = (
    "path file filename file_name filepath file_path image image_id image_index image_name image_path img img_path"
).split()
LABELS = "label labels class class_name category finding_labels tags".split()
PARTS = "split set subset partition".split()
"""Usual names of the columns, in lower case and with _ for a space."""
BITS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
"""Cells of one-hot columns, each of which is a class."""
MOST_DECIMALS = 10
"""Different decimals that are still taken for classes (grades of 0.5 to 5), if each is in two rows on average."""
FEW_ROWS = 10
"""Rows of a class on average, below which many whole numbers seem to be values such as ages."""
MOST_COMPARED = 500
"""Cells that are compared with each other."""

_PART_BITS = re.compile(r"(?:is|in)_?([a-z]+?)(?:_?(?:set|split|data|fold|sample|image))?")
"""is_valid, isTrain, in_test: which part the True rows are."""
_LIKE_PARTS = {*PARTS, "splits", "fold", "folds", "kfold", "phase", "usage"}
_TRUE = BITS | {"yes": True, "y": True, "t": True, "no": False, "n": False, "f": False}
_GROUPS = set("patient subject participant person user video clip slide scene session specimen animal group".split())
_ITEM = r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[-+]?[\d.]+)"""
_LIST = re.compile(rf"[\[{{]\s*(?:{_ITEM}(?:\s*,\s*{_ITEM})*\s*,?\s*)?[\]}}]")
_BRACKETS = re.compile(r"[\[({].*[\])}]")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE)
_WHOLE = re.compile(r"([+-]?\d{1,18})\.?0*")


def usual(name: str) -> str:
    """Return the name of a column in lower case and with _ for a space."""
    return name.strip().lower().replace(" ", "_")


def find_column(path: Path, columns: Sequence[str], name: str | None, names: Sequence[str], option: str) -> str:
    """Return the column `name`, by default the one with a usual name. Raises RecastError unless there is one."""
    if len(columns) == 1:
        raise RecastError(
            f"{path}: cells must be separated by commas, semicolons or tabs, and the first line must name the columns "
            f"(path,label); got {shown(columns[0])}"
        )
    if name is None:
        fitting = [column for column in columns if usual(column) in names]
    else:
        fitting = [column for column in columns if column == name]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RecastError(f"{path} has the columns {' and '.join(fitting)}: choose one with {option}, or rename one")
    if name is None and any(map(is_image_name, columns)):
        raise RecastError(f"{path} must name its columns in the first line, got {listed(columns, 5)}")
    missing = f"no column {shown(name)}" if name is not None else f"no column named {listed(names, 6)}"
    several = ", or several of 0 and 1 (a,b,c)," * (names is LABELS)
    raise RecastError(f"{path} has {missing}: choose one{several} of {listed(columns, 20)} with {option}")


def find_parts(path: Path, cells: Mapping[str, list[str]]) -> tuple[str | None, list[str] | None, list[str]]:
    """Return the column that states the part of every row, its parts, and notes on columns that may.

    A column is read if its name is usual, if it is one of True and False named as a part (is_valid), or if its cells
    are the words of two parts or more. Raises RecastError for columns that contradict each other.
    """
    plain, named, unclear = dict[str, list[str]](), dict[str, list[str]](), list[str]()
    for name, column in cells.items():
        key, values = usual(name), Counter(column)
        words = [part_word(value) for value in values]
        bits = {_TRUE.get(value.lower()) for value in values}
        is_bits = bits == {False, True}
        word = part_word(match[1]) if (match := _PART_BITS.fullmatch(key)) else None
        if word and is_bits:
            other = "val" if word in TRAINING else "train"
            plain[name] = [word if _TRUE[cell.lower()] else other for cell in column]
        elif None not in words and (key in PARTS or 1 < len(words) == len(set(words))):
            plain[name] = column
        elif key in PARTS:
            named[name] = column
        elif word or not _LIKE_PARTS.isdisjoint(re.findall("[a-z]+", key)) or (is_bits and part_word(key)):
            value, count = values.most_common()[-1]
            unclear.append(
                f"column {name} looks like a split ({shown(value)} in {count} of {len(column)} rows) and is not used: "
                "if it is one, write train, val or test in a column split"
            )
    if not (found := plain or named):
        return None, None, [f"{path}: {text}" for text in unclear]
    name, parts = next(iter(found.items()))
    for other, column in found.items():
        trains = ([part_word(part) in TRAINING for part in parts_] for parts_ in (parts, column))
        if wrong := sum(a != b for a, b in zip(*trains, strict=True)):
            raise RecastError(f"{path}: columns {name} and {other} state different parts in {wrong} rows; keep one")
    return name, parts, []


def find_groups(path: Path, cells: Mapping[str, list[str]]) -> list[str]:
    """Return a line about a column whose equal cells seem to be images of one patient or video."""
    for name, column in cells.items():
        if not _GROUPS.isdisjoint(re.findall("[a-z]+", usual(name))) and 1 < len(set(column)) < len(column):
            text = f"column {name} looks like groups ({len(set(column))} in {len(column)} rows)"
            return [f"{path}: {text}: --group-column {shown(name)} holds out whole ones, without it images are"]
    return []


def split_labels(path: Path, name: str, cells: Sequence[str], mark: str | None) -> tuple[list[list[str]], str]:
    """Return the labels of every cell of a column, and how they were split ("" if a cell is one label).

    mark: the separator, or "none"; None: lists as Python and JSON write them, else | or ;. Raises RecastError for
    lists that cannot be read and for cells that look like several labels with another separator.
    """
    if mark != "none":
        lists = [_items(cell) for cell in cells]
        if any(items is not None for items in lists) or all(map(_BRACKETS.fullmatch, cells)):
            wrong = [row for row, cell in enumerate(cells) if cell and lists[row] is None]
            if wrong:
                raise RecastError(
                    f"{path}: {len(wrong)} cells of {name} are no lists like ['a', 'b'], the first is "
                    f"{shown(cells[wrong[0]])} in row {wrong[0] + 1}: correct them, or --label-separator none makes "
                    "each cell one label"
                )
            return [items or [] for items in lists], "lists"
        mark = mark or next((mark for mark in "|;" if any(mark in cell for cell in cells)), None)
        if mark is None:
            _check_one(path, name, cells)
    if mark is None or mark == "none":
        return [[cell] if cell else [] for cell in cells], ""
    return [cell.split(mark) for cell in cells], f"split at {shown(mark)}"


def _items(cell: str) -> list[str] | None:
    """Return the texts and numbers in a list that Python or JSON wrote; None if it is none."""
    if not _LIST.fullmatch(cell):
        return None
    try:
        return [
            json.loads(item) if item[0] == '"' else re.sub(r"\\(.)", r"\1", item[1:-1]) if item[0] == "'" else item
            for item in re.findall(_ITEM, cell)
        ]
    except ValueError:  # JSON has fewer escapes than Python
        return None


def _check_one(path: Path, name: str, cells: Sequence[str]) -> None:
    """Raise RecastError if cells look like several labels: combinations of the same few words.

    They do if there are more different cells than words, if all words of a cell are cells too, or if the words of a
    cell are scattered in another one. Names of classes ("brown bear", "polar bear", "bear") share words as well, but
    seldom so.
    """
    for mark in ",+&/ ":
        rows = {cell: list(filter(None, map(str.strip, cell.split(mark)))) for cell in dict.fromkeys(cells)}
        several = [words for words in rows.values() if len(words) > 1]
        count = Counter(word for cell in cells for word in set(rows[cell]))
        compared = several[:MOST_COMPARED]
        if several and (
            len(count) < len(rows)
            or (mark == "," and not any(", " in cell for cell in rows))
            or (usual(name).endswith("tags"))
            or any(set(words) <= rows.keys() for words in several)
            or any(_is_scattered(a, b) for a in compared for b in compared)
        ):
            word = max({word for words in several for word in words}, key=lambda word: (count[word], word))
            raise RecastError(
                f"{path}: cells of {name} look like several labels ({shown(word)} is in {count[word]} of {len(cells)}, "
                f"one is {shown(mark.join(several[0]))}): --label-separator {shown(mark)} splits them, "
                "--label-separator none makes each cell one label"
            )


def _is_scattered(words: Sequence[str], others: Sequence[str]) -> bool:
    """Return True if all the words are among the others, but not side by side in this order."""
    length = len(words)
    return set(words) <= set(others) and not any(
        list(others[start : start + length]) == words for start in range(len(others) - length + 1)
    )


def order_classes(path: Path, name: str, labels: list[list[str]]) -> tuple[list[list[str]], list[str], list[str]]:
    """Return the labels, their classes in order and notes: numbers in their order, 1.0 as 1; else as text.

    Raises RecastError for many different decimals.
    """
    classes = sorted({label for row in labels for label in row})
    if classes and all(map(_NUMBER.fullmatch, classes)):
        whole = {label: str(int(match[1])) for label in classes if (match := _WHOLE.fullmatch(label))}
        if len(whole) == len(classes):
            if any("." in label for label in classes):  # pandas makes floats of a column that had an empty cell
                labels = [list(dict.fromkeys(whole[label] for label in row)) for row in labels]
                classes = list({whole[label] for label in classes})
            classes.sort(key=lambda label: (int(label), label))
            return labels, classes, _numbers_note(path, name, classes, len(labels))
        if len(classes) > MOST_DECIMALS or 2 * len(classes) > len(labels):
            raise RecastError(
                f"{path}: column {name} holds {len(classes)} different decimals ({listed(classes, 3)}): classes, or a "
                "number to predict? only classes are supported; write them as words or whole numbers"
            )
        classes.sort(key=float)
    return labels, classes, []


def _numbers_note(path: Path, name: str, classes: Sequence[str], rows: int) -> list[str]:
    """Return a line about many whole numbers that are not numbers of classes, 0 or 1 and on, or are in few rows."""
    first, last, count = int(classes[0]), int(classes[-1]), len(classes)
    is_numbered = first in (0, 1) and last - first + 1 == count
    if count <= MOST_DECIMALS or (is_numbered and rows >= FEW_ROWS * count):
        return []
    text = f"column {name} holds {count} different whole numbers ({first} to {last}) in {rows} rows"
    return [f"{path}: {text}: each is a class of its own, without an order; numbers such as ages are not predicted"]


def described(used: Mapping[str, str], columns: Iterable[str]) -> str:
    """Return a line on how every column is used: `used` has column → use."""
    unused = [name or "one without a name" for name in dict.fromkeys(columns) if name not in used]
    chosen = ", ".join(f"{name} as {use}" for name, use in used.items())
    return f"columns: {chosen}" + (f"; not used: {listed(unused, 10)}" if unused else "")
