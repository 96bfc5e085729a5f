import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import DataConfig, Recipe
from recast.lab.config.text import override
from recast.lab.data import Data, load_data
from recast.lab.data.columns import order_classes
from recast.lab.data.datasets import ImageFiles
from recast.lab.task import task_named
from recast.lab.training.prepare import with_task

pytestmark = pytest.mark.filterwarnings("ignore:.*labels[.]")
Rows = Sequence[Sequence[str]]
PLAIN = [[f"photos/{'ab'[i % 2]}/{i}.png", ("cat", "dog", "dog")[i % 3]] for i in range(12)]
Write = Callable[..., DataConfig]


@pytest.fixture
def table(tmp_path: Path) -> Write:
    """Twelve images in photos/a and photos/b, and a CSV of some rows."""
    for i in range(12):
        path = tmp_path / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)).save(path)

    def write(header: str, rows: Rows, **settings: Any) -> DataConfig:
        with (tmp_path / "labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header.split(","), *rows])
        values = {"name": "csv", "data_dir": str(tmp_path / "photos"), "labels_file": str(tmp_path / "labels.csv")}
        return DataConfig(**values | settings)

    return write


def labelled(data: Data) -> dict[str, str]:
    return {
        Path(part.items[index]).stem: data.classes[part.labels[index]]
        for part in (data.train, data.val)
        if isinstance(part, ImageFiles)
        for index in range(len(part))
    }


@pytest.mark.parametrize("header", ["path,label", "Image Index,Finding Labels", "image_id,class,,"])
def test_columns_are_found_and_files_by_what_is_sure_of_them(table: Write, header: str) -> None:
    more = [""] * (len(header.split(",")) - 2)
    for cell in (str, lambda path: Path(path).name, lambda path: Path(path).stem, lambda path: f"/elsewhere/{path}"):
        data = load_data(table(header, [[cell(path), label, *more] for path, label in PLAIN]))
        assert labelled(data) == {Path(path).stem: label for path, label in PLAIN}
        assert data.classes == ["cat", "dog"]
        assert task_named(data.val.task).name == "classify"


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_line_says_what_was_chosen(
    is_absolute: bool, table: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [[str(tmp_path / path) if is_absolute else path, label] for path, label in PLAIN[:10]]
    with pytest.warns(
        UserWarning, match=r"columns: path as path, label as label; classes: 2 \(cat, dog\).*: 10, 2 more"
    ) as warned:
        load_data(table("path,label", rows, data_dir="."))
    assert len(warned) == 1


def test_a_column_of_splits_is_followed(table: Write) -> None:
    splits = ["train"] * 6 + ["valid"] * 4 + ["test"] * 2
    rows = [[*row, part] for row, part in zip(PLAIN, splits, strict=True)]
    rows[6][1] = "emu"
    data = load_data(table("path,label,split", rows))
    assert (len(data.train), len(data.val)) == (6, 4)
    notes = list(task_named(data.val.task).notes(Recipe(), data))
    assert notes == ["1 of 3 classes have no training images: emu"]
    data = load_data(
        table("path,label,split", [[path, name, "val" if name == "cat" else "train"] for path, name in PLAIN])
    )
    assert [note.split(" have ")[1] for note in task_named(data.val.task).notes(Recipe(), data)] == [
        "no training images: cat",
        "no validation images: dog",
    ]


def test_numbers_are_classes_in_their_order(table: Write) -> None:
    rows = [[path, str(i % 3 * 5)] for i, (path, _) in enumerate(PLAIN)]
    assert load_data(table("path,label", rows)).classes == ["0", "5", "10"]


def write_parquet(path: Path, /, **columns: Sequence[Any]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({name: list(values) for name, values in columns.items()}), path)


def test_a_table_may_be_parquet_and_lie_among_the_images(table: Write, tmp_path: Path) -> None:
    paths, labels = zip(*PLAIN, strict=True)
    write_parquet(tmp_path / "labels.parquet", path=paths, label=labels)
    data = load_data(DataConfig("csv", labels_file=str(tmp_path / "labels.parquet")))
    assert labelled(data) == {Path(path).stem: label for path, label in PLAIN}


def test_a_column_of_embeddings_is_not_read(table: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.reading.LARGEST", 2**16)
    paths, labels = zip(*PLAIN, strict=True)
    write_parquet(tmp_path / "labels.parquet", path=paths, clip=[[0.1 * i] * 2**12 for i in range(12)], label=labels)
    with pytest.warns(UserWarning, match="not used: clip"):
        data = load_data(DataConfig("csv", labels_file=str(tmp_path / "labels.parquet")))
    assert labelled(data) == {Path(path).stem: label for path, label in PLAIN}


def test_a_folder_of_parquet_files(table: Write, tmp_path: Path) -> None:
    """As Spark writes them, with a column in the names of folders."""
    for label in dict(PLAIN).values():
        part = tmp_path / "labels.parquet" / f"label={label}" / "part-0.parquet"
        part.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(part, path=[path for path, of in PLAIN if of == label])
    (tmp_path / "labels.parquet" / "_SUCCESS").touch()
    data = load_data(DataConfig("csv", data_dir=str(tmp_path), labels_file=str(tmp_path / "labels.parquet")))
    assert labelled(data) == {Path(path).stem: label for path, label in PLAIN}


def test_parquet_that_unpacks_to_more_than_the_limit(
    table: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recast.reading.LARGEST", 2**16)
    arrow, path = pytest.importorskip("pyarrow"), tmp_path / "labels.parquet"
    once = ["x" * 2**12] * 64  # stored once
    for labels in (once, arrow.array(once).dictionary_encode(), [None] * 2**13, [[None] * 2**13]):
        write_parquet(path, path=["a.png"] * len(labels), label=labels)
        assert path.stat().st_size < 2**15
        with pytest.raises(RecastError, match=r"labels.parquet: unpacked it is larger than .* use --data hfds/"):
            load_data(DataConfig("csv", labels_file=str(path)))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecastError, match="a pipe or a device"):
        load_data(DataConfig("csv", labels_file=str(path)))


def test_lists_in_parquet_are_several_labels_and_pictures_are_refused(table: Write, tmp_path: Path) -> None:
    paths, path = [path for path, _ in PLAIN], tmp_path / "labels.parquet"
    config = table("path,label", PLAIN, name="csv_multilabel", labels_file=str(path))
    for names in (["a", "b"], ["a|c", "b;d"]):
        write_parquet(path, path=paths, label=[names[: 1 + i % 2] for i in range(12)])
        assert load_data(config).classes == names
    write_parquet(path, path=paths, label=[1.0, float("nan")] * 6)
    with pytest.raises(RecastError, match="label is empty or NaN in 6 of 12"):
        load_data(config)
    write_parquet(path, image=[{"bytes": b"\xff" * 999, "path": None}] * 12, label=paths)
    with pytest.raises(RecastError, match=r"column image: use --data hfds/.{,200}$"):
        load_data(config)


@pytest.mark.parametrize(("mark", "encoding"), [(";", "utf-8"), ("\t", "utf-8-sig")])
def test_cells_may_be_separated_by_semicolons_or_tabs(table: Write, tmp_path: Path, mark: str, encoding: str) -> None:
    config, lines = table("path,label", PLAIN), [["path", "label"], *([path, f"a, {label}"] for path, label in PLAIN)]
    (tmp_path / "labels.csv").write_text("\r\n".join(map(mark.join, lines)), encoding=encoding)
    assert load_data(config).classes == ["a, cat", "a, dog"]
    table("path,label", [[path, f"{label};x"] for path, label in PLAIN])  # several labels, as before
    assert load_data(config.replace(name="csv_multilabel")).classes == ["cat", "dog", "x"]


def test_a_name_of_a_column_may_hold_a_mark(table: Write) -> None:
    config = table("path,label,a;b;c;d", [[path, label, "1;2"] for path, label in PLAIN])
    assert load_data(config).classes == ["cat", "dog"]
    with pytest.raises(RecastError, match="line 2: expected 2 cells"):
        load_data(table("path,label", [[path, label, "1"] for path, label in PLAIN]))


BITS = [[path, str(i % 2), str(i % 3 % 2)] for i, (path, _) in enumerate(PLAIN)]


def test_what_a_table_holds_decides_the_task(table: Write) -> None:
    def kind(config: DataConfig, **task: Any) -> str:
        recipe = Recipe(data=config)
        return with_task(override(recipe, {"task": task}) if task else recipe).task.kind

    assert kind(table("path,label", PLAIN)) == "classify"
    several = [*PLAIN[:-1], [PLAIN[-1][0], "cat;dog"]]
    assert kind(table("path,label", several)) == "multilabel"
    assert kind(table("path,label", several, label_separator="none")) == "classify"
    exclusive = [[path, a, str(1 - int(a))] for path, a, _ in BITS]
    assert kind(table("path,a,b", exclusive, label_column="a,b")) == "classify"
    assert kind(table("path,a,b", BITS, label_column="a,b")) == "multilabel"
    assert kind(table("path,a,b", BITS, label_column="a"), kind="multilabel") == "multilabel"
    assert load_data(table("path,a,b", BITS, name="csv_multilabel", label_column="a,b,a")).classes == ["a", "b"]


@pytest.mark.parametrize(
    ("header", "rows", "settings", "counts"),
    [
        ("path,label", [*PLAIN, ["x.png", "cat"], ["y.png", "cat"]], {}, "2 of 14"),
        ("path,label", [*PLAIN[:-2], [PLAIN[-2][0], ""], ["", "cat"]], {}, "path is empty or NaN in 1 of 12 .* row 12"),
        ("path,label", [*PLAIN[:-1], [PLAIN[-1][0], " "]], {}, "label is empty or NaN in 1 of 12 .* row 12"),
        ("path,label", [*PLAIN[:-1], [PLAIN[-1][0], "NaN"]], {}, "label is empty or NaN in 1 of 12 .* row 12"),
        ("path,label", [*PLAIN, ["0.png", "cat"]], {}, r"several rows for an image \(1: .*0\.png\)"),
        ("a.png,cat", PLAIN, {}, "name its columns in the first line, got a.png, cat"),
        ("path,label", [], {}, "no rows"),
        ("x,y", PLAIN, {}, "x, y with --path-column"),
        ("path,y", PLAIN, {}, "path, y with --label-column"),
        ("path,label", PLAIN, {"label_column": "y"}, "'y'.* path, label"),
        ("path,label,class", [[*row, "1"] for row in PLAIN], {}, "label and class"),
        ("path,label,label", [[*row, "cat"] for row in PLAIN], {}, "label and label"),
        ("path,label,label", [[*row, "cat"] for row in PLAIN], {"label_column": "label"}, "label and label"),
        ("path,label,split", [[*row, "fold3"] for row in PLAIN], {}, "12 rows .* fold3"),
        ("path,label", [*PLAIN[:-1], [PLAIN[-1][0], "cat|dog"]], {}, "1 of 12"),
        ("path,a,b", [*BITS[:-1], [BITS[-1][0], "-1", ""]], {"label_column": "a,b"}, "2 cells .* '-1' in .* a, row 12"),
        ("path,label", PLAIN, {"data_dir": "nowhere"}, "nowhere"),
    ],
)
def test_mistakes_are_counted(table: Write, header: str, rows: Rows, settings: dict[str, str], counts: str) -> None:
    with pytest.raises(RecastError, match=counts) as error:
        load_data(table(header, rows, **settings))
    assert "\n" not in str(error.value)


def test_a_name_that_fits_several_files_is_refused(table: Write, tmp_path: Path) -> None:
    (tmp_path / "photos/b/0.png").write_bytes((tmp_path / "photos/a/0.png").read_bytes())
    assert len(load_data(table("path,label", PLAIN)).train)
    with pytest.raises(RecastError, match=r"1 images .* 0\.png may be"):
        load_data(table("path,label", [["0.png", "cat"], *PLAIN[1:]]))


def test_missing_images_can_be_left_out(table: Write) -> None:
    data = load_data(table("path,label", [*PLAIN, ["x.png", "cat"]], bad_image="skip"))
    assert len(data.train) + len(data.val) == 12


def test_settings_of_tables_are_for_tables() -> None:
    for settings in ({"name": "csv"}, {"name": "folder", "labels_file": "x.csv"}, {"label_column": "x"}):
        with pytest.raises(RecastError, match=r"labels_file|label_column"):
            DataConfig(**settings)


def said(config: DataConfig, recwarn: pytest.WarningsRecorder) -> str:
    """The notes of a table."""
    recwarn.clear()
    load_data(config)
    return "\n".join(str(warning.message) for warning in recwarn)


def column(table: Write, cells: Sequence[str], **settings: Any) -> DataConfig:
    """A table whose labels are these cells over and over."""
    return table("path,label", [[path, cells[i % len(cells)]] for i, (path, _) in enumerate(PLAIN)], **settings)


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        (["0.0", "2.0", "10.0"], ["0", "2", "10"]),
        (["-1", "0", "10", "2"], ["-1", "0", "2", "10"]),
        (["-1.", "1", "1.0"], ["-1", "1"]),
        (["0.5", "10", "2.5"], ["0.5", "2.5", "10"]),
        (["1.0", "10.0", "2.0", "v3"], ["1.0", "10.0", "2.0", "v3"]),
    ],
)
def test_numbers_are_sorted_as_numbers_and_whole_ones_named_so(
    table: Write, cells: list[str], classes: list[str]
) -> None:
    data = load_data(column(table, cells))
    assert data.classes == classes
    names = dict(zip(cells, cells if cells[-1] == "v3" else [f"{float(cell):g}" for cell in cells], strict=True))
    assert labelled(data) == {Path(path).stem: names[cells[i % len(cells)]] for i, (path, _) in enumerate(PLAIN)}


@pytest.mark.parametrize(("start", "step", "is_noted"), [(0, 1, False), (1, 1, False), (18, 1, True), (0, 3, True)])
def test_many_whole_numbers_that_are_no_numbers_of_classes_are_noted(start: int, step: int, is_noted: bool) -> None:
    rows = [[str(start + step * (i % 12))] for i in range(240)]
    labels, classes, notes = order_classes(Path("a.csv"), "age", rows)
    assert (labels, len(classes)) == (rows, 12)
    assert any("12 different whole numbers" in note and "without an order" in note for note in notes) == is_noted
    assert order_classes(Path("a.csv"), "age", rows[:60])[2]  # 5 rows each


@pytest.mark.parametrize("age", ["{}.5", "0.{}1", "{}e-2"])
def test_a_number_to_predict_is_no_class(table: Write, age: str) -> None:
    with pytest.raises(RecastError, match=r"label holds 12 different decimals .*only classes are supported"):
        load_data(column(table, [age.format(i) for i in range(12)]))


@pytest.mark.parametrize(
    ("name", "train", "held", "parts"),
    [
        ("is_valid", "False", "True", "train: 8, valid: 4"),
        ("isTrain", "1", "0", "train: 8, val: 4"),
        ("in_test", "0.0", "1.0", "train: 8, test: 4"),
        ("fold", "training", "validation", "training: 8, validation: 4"),
        ("usage", "Train", "Test", "Train: 8, Test: 4"),
        ("of", "trainset", "dev", "trainset: 8, dev: 4"),
    ],
)
def test_a_split_is_read_under_other_names(
    table: Write, recwarn: pytest.WarningsRecorder, name: str, train: str, held: str, parts: str
) -> None:
    rows = [[*row, held if i % 3 == 0 else train, "8"] for i, row in enumerate(PLAIN)]
    config = table(f"path,label,{name},width", rows)
    assert f"{name} as split ({parts}); not used: width;" in said(config, recwarn)
    data = load_data(config)
    assert isinstance(data.val, ImageFiles)
    assert {Path(item).stem for item in data.val.items} == {"0", "3", "6", "9"}
    assert not data.is_held_out


@pytest.mark.parametrize(("name", "cells"), [("fold", "012"), ("valid", "01"), ("phase", "ab"), ("image set", "xyz")])
def test_what_may_be_a_split_is_named(table: Write, recwarn: pytest.WarningsRecorder, name: str, cells: str) -> None:
    config = table(f"path,label,{name}", [[*row, cells[i % len(cells)]] for i, row in enumerate(PLAIN)])
    assert f"column {name} looks like a split" in said(config, recwarn)
    split = table(f"path,label,split,{name}", [[*row, ["train", "val"][i < 4], "0"] for i, row in enumerate(PLAIN)])
    text = said(split, recwarn)
    assert f"split as split (train: 8, val: 4); not used: {name};" in text
    assert "looks like" not in text


def test_parts_that_contradict_each_other_or_hold_out_nothing(table: Write, recwarn: pytest.WarningsRecorder) -> None:
    rows = [[*row, ["train", "val"][i < 4], ["0", "1"][i < 3]] for i, row in enumerate(PLAIN)]
    with pytest.raises(RecastError, match="split and is_valid state different parts in 1 rows"):
        load_data(table("path,label,split,is_valid", rows))
    text = said(table("path,label,split", [[*row, "train"] for row in PLAIN]), recwarn)
    assert "no row is for validation: a random share" in text


LISTS = [["['a', 'b']", "['c']", "[]"], ['["a", "b"]', '["c"]'], ["{'a', 'b'}", "['c',]"]]


@pytest.mark.parametrize("cells", LISTS)
def test_lists_of_python_and_json_are_several_labels(
    table: Write, recwarn: pytest.WarningsRecorder, cells: list[str]
) -> None:
    config = column(table, cells, name="csv_multilabel")
    assert load_data(config).classes == ["a", "b", "c"]
    text = said(config, recwarn)
    assert "label as labels (lists)" in text
    assert ("label is empty in 4 of 12 rows" in text) == ("[]" in cells)
    assert load_data(column(table, cells, label_separator="none")).classes == sorted(cells)
    assert load_data(column(table, ["[1, 0]", "[2]"], name="csv_multilabel")).classes == ["0", "1", "2"]


SEVERAL = {
    "tags of photos": (
        ["haze primary", "clear primary agriculture", "clear primary", "agriculture clear primary"],
        " ",
    ),
    "each alone too": (["cat", "dog", "cat dog"], " "),
    "in quotes": (["cat,dog", "dog", "cat"], ","),
    "a plus": (["rust + scab", "rust", "scab"], "+"),
    "few words": (["a b", "b c", "a c", "a b c"], " "),
    "numbers": (["0,1", "1,2", "2"], ","),
}


@pytest.mark.parametrize(("cells", "mark"), SEVERAL.values(), ids=SEVERAL)
def test_combinations_of_a_few_words_are_no_classes(table: Write, cells: list[str], mark: str) -> None:
    with pytest.raises(RecastError, match=r"label look like several labels .*--label-separator") as error:
        load_data(column(table, cells))
    assert f"--label-separator {mark!r} splits them" in str(error.value)
    assert load_data(column(table, cells, label_separator="none")).classes == sorted(cells)
    split = load_data(column(table, cells, label_separator=mark, name="csv_multilabel"))
    assert split.classes == sorted({word.strip() for cell in cells for word in cell.split(mark)})


@pytest.mark.parametrize(
    "names",
    [
        ["brown bear", "polar bear", "bear"],
        ["Canis lupus", "Canis lupus familiaris", "Canis latrans"],
        ["mild dr", "severe dr", "no dr"],
        ["tench, Tinca tinca", "goldfish, Carassius auratus"],
        ["animal/cat", "animal/dog", "plant/rose"],
    ],
)
def test_names_of_several_words_are_classes(table: Write, names: list[str]) -> None:
    assert load_data(column(table, names)).classes == sorted(names)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["['a' 'b']", "['c']"], "6 cells of label are no lists .*row 1"),
        (["['a', 'b']", "cat"], "6 cells of label are no lists .*'cat' in row 2"),
        (["[cat, dog]", "[cat]"], "12 cells of label are no lists"),
        (["[0, 1, 0]", "[1, 1, 0]"], "lists of 0 and 1: write a column"),
    ],
)
def test_other_lists_are_refused(table: Write, cells: list[str], message: str) -> None:
    with pytest.raises(RecastError, match=message):
        load_data(column(table, cells))


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("", "{} {}"),
        ("file class\n", "{}  {}"),
        ("sep=;\n", "{};{}"),
        ('"sep=,"\r\n', "{},{}"),
    ],
)
def test_lists_of_paths_and_labels_are_read(table: Write, tmp_path: Path, head: str, line: str) -> None:
    config = table("path,label", PLAIN)
    rows = [line.format("path", "label")] * ("sep" in head) + [line.format(*row) for row in PLAIN]
    (tmp_path / "labels.csv").write_text(head + "\n".join(rows) + "\n", newline="")
    assert labelled(load_data(config)) == {Path(path).stem: label for path, label in PLAIN}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\nSmiling Young\n0.png 1 -1\n", "cells must be separated by commas, semicolons or tabs"),
        ("path|label\n0.png|cat\n", "cells must be separated by commas, .*got 'path|label'"),
        ("0.png 0\n1.png\n", "line 2: expected PATH LABEL"),
        ("0.png 0,1\n1.png 1\n2.png 0\n", "look like several labels"),
        ('path,label\n0.png,"cat\n1.png,dog\n2.png,dog\n', "line 2: .*quotation mark"),
        ('path,label\n0.png,cat\n1.png,"dog\n2.png,cat\n3.png,dog"\n4.png,cat\n', "quotation mark .* row 2"),
        ('path,label,note\n0.png,cat,"5 in\n1.png,dog,"\n2.png,cat,\n', "quotation mark .* note of row 1"),
        ('path,label\n0.png,"cat" x\n1.png,dog\n', "line 2: .*quotation mark"),
    ],
)
def test_the_separator_or_the_mark_is_blamed(table: Write, tmp_path: Path, text: str, message: str) -> None:
    config = table("path,label", PLAIN)
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(RecastError, match=message) as error:
        load_data(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("other", ["Cat", "c\u200bat", "cat_", "\uff43at"])
def test_names_that_hardly_differ_are_named(table: Write, recwarn: pytest.WarningsRecorder, other: str) -> None:
    text = said(column(table, ["cat", "dog", other, "dog"]), recwarn)
    assert "names that hardly differ are classes of their own" in text
    assert "'cat'" in text
    assert "hardly differ" not in said(column(table, ["cat", "dog"]), recwarn)
    assert "hardly differ" not in said(column(table, ["-1", "1"]), recwarn)


@pytest.mark.parametrize("word", ["NA", "None", "null", "<NA>"])
def test_a_word_for_a_missing_value_is_named(table: Write, recwarn: pytest.WarningsRecorder, word: str) -> None:
    assert f"{word!r} is a class (4 rows)" in said(column(table, ["0", "1", word]), recwarn)


def test_an_image_of_another_folder_is_not_taken(
    table: Write, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    rows = [[f"{'ab'[i % 2]}/{i}.png", label] for i, (_, label) in enumerate(PLAIN)]
    (tmp_path / "photos/a/4.png").rename(tmp_path / "photos/b/4.png")
    (tmp_path / "photos/b/a").mkdir()
    (tmp_path / "photos/b/a/4.png").write_bytes((tmp_path / "photos/b/4.png").read_bytes())
    for prefix in ("", "photos/", "/elsewhere/photos/", str(tmp_path / "photos") + "/"):
        with pytest.raises(RecastError, match=r"1 of 12 images .*a/4\.png"):
            load_data(table("path,label", [[prefix + path, label] for path, label in rows]))
    (tmp_path / "photos/b/a/4.png").unlink()
    assert "in 2 folders: b (7), a (5)" in said(
        table("path,label", [[Path(path).name, label] for path, label in rows]), recwarn
    )
    (tmp_path / "photos").rename(tmp_path / "test")
    for path in (tmp_path / "test").glob("*/*.png"):
        path.rename(tmp_path / "test" / path.name)
    config = table("path,label", [[f"train/{i}.png", "ab"[i % 2]] for i in range(12)], data_dir=str(tmp_path / "test"))
    with pytest.raises(RecastError, match=r"12 images .* are of another part"):
        load_data(config)
    (tmp_path / "test").rename(tmp_path / "photos")
    assert "12 images are in" in said(config.replace(data_dir=str(tmp_path / "photos")), recwarn)


def test_a_link_to_the_image_of_another_row_is_a_second_row(table: Write, tmp_path: Path) -> None:
    (tmp_path / "photos/a/x.png").symlink_to(tmp_path / "photos/a/0.png")
    with pytest.raises(RecastError, match="several rows for an image"):
        load_data(table("path,label", [*PLAIN, ["photos/a/x.png", "dog"]]))


def test_images_of_a_group_stay_together(table: Write, recwarn: pytest.WarningsRecorder) -> None:
    rows = [[*row, f"p{i // 2}"] for i, row in enumerate(PLAIN)]
    config = table("path,label,patient id", rows, val_fraction=0.3)
    assert "looks like groups (6 in 12 rows): --group-column 'patient id'" in said(config, recwarn)
    assert load_data(config.replace(name="csv_multilabel")).is_held_out
    for name in ("csv", "csv_multilabel"):
        data = load_data(config.replace(group_column="patient id", name=name))
        assert data.is_held_out
        train, val = (
            {int(Path(item).stem) // 2 for item in part.items}
            for part in (data.train, data.val)
            if isinstance(part, ImageFiles)
        )
        assert train.isdisjoint(val)
        assert 2 <= len(data.val) <= 6
        assert data.train.labels.unique().tolist() == data.val.labels.unique().tolist() == [0, 1]
    text = said(config.replace(group_column="patient id"), recwarn)
    assert "patient id as group" in text
    assert "looks like groups" not in text
    split = [[*row, ["train", "val"][i in (0, 4, 5)]] for i, row in enumerate(rows)]
    config = table("path,label,patient id,split", split, group_column="patient id")
    assert "1 groups have training and validation images: p0" in said(config, recwarn)
    assert not load_data(config).is_held_out
    with pytest.raises(RecastError, match="cannot hold out whole groups"):
        load_data(table("path,label,user", [[*row, row[1]] for row in PLAIN], group_column="user"))
    with pytest.raises(RecastError, match="no column 'x'"):
        load_data(config.replace(group_column="x"))
