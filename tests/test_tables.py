from dataclasses import replace
from pathlib import Path

import pytest

from recast.errors import RecastError
from recast.lab.records import Difference, Row, write_records
from recast.lab.tables import read_records

HEAD = "run,model,suite,dataset,metric,value,n,low,high\n"
ROW = Row("runs/a, b", "recast", "clean", "digits", "top1", 100 / 3, 500)
OTHERS = [
    replace(ROW, metric="loss", value=0.1),
    replace(ROW, model="pärent", value=float("inf"), n=7, low=-0.5, high=1e-300),
]


def test_round_trip_is_exact(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.csv", Row, [ROW, *OTHERS])
    assert read_records(tmp_path / "rows.csv", Row) == [ROW, *OTHERS]
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").startswith(HEAD)


def test_differences(tmp_path: Path) -> None:
    path = tmp_path / "differences.csv"
    first = Difference("r", "recast", "parent", "clean", "digits", "top1", 1 / 3, -0.1, 0.7, 50)
    write_records(path, Difference, [first, replace(first, against="finetuned")])
    write_records(path, Difference, [replace(first, suite="pgd")])
    assert read_records(path, Difference) == [first, replace(first, against="finetuned"), replace(first, suite="pgd")]
    path.write_text(path.read_text(encoding="utf-8").replace("0.7", "", 1), encoding="utf-8")
    with pytest.raises(RecastError, match=r"line 2: (value|low|high) must be a number"):
        read_records(path, Difference)


def test_what_stands_of_a_suite_was_measured_together_and_is_of_one_run(tmp_path: Path) -> None:
    """Else a curve could join points of 300 and of 40 images, or a renamed folder have every line twice."""
    pgd = replace(ROW, suite="pgd", metric="top1@1")
    write_records(tmp_path / "rows.csv", Row, [ROW, *OTHERS, pgd])
    new = replace(ROW, run="renamed", value=1.0, n=3)
    write_records(tmp_path / "rows.csv", Row, [new])
    assert read_records(tmp_path / "rows.csv", Row) == [replace(pgd, run="renamed"), new]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    write_records(tmp_path / "rows.csv", Row, [])
    assert len(read_records(tmp_path / "rows.csv", Row)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must start with the columns run,model"),
        ("a,b\n1,2\n", "must start with the columns .* got 'a,b'"),
        (HEAD + "r,m,s,d\n", "line 2: expected 9 cells"),
        (HEAD + "r,m,s,d,t,high,3,,\n", "line 2: (value|low|high) must be a number"),
        (HEAD + "r,m,s,d,t,1.5,3.5,,\n", "line 2: n must be a whole number, got '3.5'"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecastError, match=message):
        read_records(path, Row)
    with pytest.raises(RecastError, match=message):
        write_records(path, Row, [ROW])
    assert path.read_text(encoding="utf-8") == text


def test_failed_write_keeps_the_old_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    write_records(tmp_path / "rows.csv", Row, [ROW])
    monkeypatch.setattr("recast.files.os.replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_records(tmp_path / "rows.csv", Row, OTHERS)
    assert read_records(tmp_path / "rows.csv", Row) == [ROW]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
