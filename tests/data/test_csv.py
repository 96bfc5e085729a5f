import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from recast.errors import RecastError
from recast.lab.config import DataConfig, Recipe
from recast.lab.data import Data, load_data
from recast.lab.data.datasets import ImageFiles
from recast.lab.data.table import with_task
from recast.lab.recipe import override

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
        assert data.task.name == "classify"


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_line_says_what_was_chosen(
    is_absolute: bool, table: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [[str(tmp_path / path) if is_absolute else path, label] for path, label in PLAIN[:10]]
    with pytest.warns(UserWarning, match=r"paths in path, labels in label.*2 \(cat, dog\).*: 10, 2 more") as warned:
        load_data(table("path,label", rows, data_dir="."))
    assert len(warned) == 1


def test_a_column_of_splits_is_followed(table: Write) -> None:
    splits = ["train"] * 6 + ["valid"] * 4 + ["test"] * 2
    rows = [[*row, part] for row, part in zip(PLAIN, splits, strict=True)]
    rows[6][1] = "emu"
    data = load_data(table("path,label,split", rows))
    assert (len(data.train), len(data.val)) == (6, 4)
    assert list(data.task.notes(Recipe(), data)) == ["1 of 3 classes have no training images: emu"]


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


def test_a_name_of_a_column_may_hold_a_mark(table: Write, tmp_path: Path) -> None:
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
)  # fmt: skip
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
