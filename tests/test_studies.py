import csv
import importlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of studies/ by name, out of the way of others of that name."""
    modules = ("claims", "measure", "studies", "tables")

    def forget() -> None:
        for name in modules:
            sys.modules.pop(name, None)

    monkeypatch.setattr(sys, "path", [str(ROOT / "studies/evidence"), *sys.path])
    forget()
    yield importlib.import_module
    forget()


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_first_and_last_block_are_taken_by_name(load: Any) -> None:
    """PRS's Fig. 3 was once judged at the patch embedding."""
    block_deltas = load("tables").block_deltas
    curves = [("stem", 0.0, 1.0), ("blocks.0.mixer", 0.1, 2.0), ("blocks.0", 0.2, 3.0)]
    curves += [("blocks.2", 0.4, 5.0), ("blocks.10.mixer", 0.9, 6.0), ("blocks.10", 1.0, 7.0)]
    assert {name: float(value[0]) for name, value in block_deltas(curves).items()} == {
        "delta(pi), first block": 3.0, "delta(pi), last block": 7.0,
    }  # fmt: skip
    assert block_deltas([]) == block_deltas(curves[:2]) == {}


@pytest.mark.parametrize(("study", "count"), [("d-prs", 30), ("j-prs-long", 15)])
def test_the_blocks_of_the_table_are_those_of_the_stored_runs(study: str, count: int) -> None:
    with zipfile.ZipFile(RESULTS / f"evidence_runs/{study}.zip") as packed:
        runs = [json.loads(packed.read(name)) for name in packed.namelist() if name.endswith("result.json")]
    stored = {
        (run["job"]["arm"], str(run["job"]["seed"])): dict((n, d) for n, _, d in run.get("fourier", ())) for run in runs
    }
    rows = [r for r in read("evidence.csv") if (r["study"], r["metric"]) == (study, "delta(pi), first block")]
    assert len(rows) == count
    for row in rows:
        assert float(row["value"]) == pytest.approx(stored[row["arm"], row["seed"]]["blocks.0"], abs=6e-4)


def test_severities_take_turns(load: Any) -> None:
    parts = load("tables").by_severity(np.arange(7))
    assert {name: part.tolist() for name, part in parts.items()} == {
        "corruptions, severity 1": [0, 3, 6], "corruptions, severity 3": [1, 4], "corruptions, severity 5": [2, 5]
    }  # fmt: skip
    assert load("tables").by_severity(np.empty(0)) == {}


def test_the_claims_follow_from_the_other_tables(load: Any) -> None:
    studies = load("studies").studies()
    judged = load("claims").judged(read("evidence.csv"), read("evidence_differences.csv"), studies)
    assert [{name: str(value) for name, value in row.items()} for row in judged] == read("evidence_claims.csv")
    assert {row["verdict"].split(":")[0] for row in judged} == {"holds here", "does not hold here", "not decidable"}


@pytest.mark.parametrize(
    ("low", "high", "below", "attention", "expected"),
    [
        (0.1, 0.3, False, "awake", "holds here"),
        (0.1, 0.3, True, "", "does not hold here"),
        (-0.3, -0.1, False, "", "does not hold here"),
        (-0.3, -0.1, True, "awake", "holds here"),
        (-0.1, 0.3, False, "awake", "not decidable"),
        (0.1, 0.3, False, "asleep", "not decidable: attention slept"),
    ],
)
def test_verdict(load: Any, low: float, high: float, below: bool, attention: str, expected: str) -> None:
    claim = load("claims").Claim("paper", "says", "study", "a", "b", below=below)
    assert claim.verdict({"low_95": low, "high_95": high, "attention": attention}) == expected


NUMBERS = ("difference", "low_95", "high_95")


def cells_of(page: str, pattern: str) -> list[list[str]]:
    """The cells of the lines of tables that hold a pattern, with ASCII signs and without emphasis."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("−", "-").replace("**", "").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|") and re.search(pattern, line)]


def are_of(row: dict[str, str], columns: tuple[str, ...], numbers: list[str]) -> bool:
    """Return True if the numbers are those of a row, rounded."""
    differences = [abs(float(row[column]) - float(number)) for column, number in zip(columns, numbers, strict=True)]
    return all(d <= 0.51 * 10.0 ** -len(n.partition(".")[2]) for d, n in zip(differences, numbers, strict=True))


def test_the_table_of_claims_in_the_documentation_is_that_of_the_results() -> None:
    table = cells_of("expect.md", r"\| keep \|")
    assert len(table) > 25
    rows = [row for row in read("evidence_claims.csv") if "*" not in row["study"]]
    for cells in table:
        *_, gate, stride, epochs, top1, interval, verdict, detectable = cells
        key = ({"C-MHSA": "none: C-MHSA", "–": ""}.get(gate, gate), stride, verdict.split(":")[0])
        numbers = [epochs, top1, *re.findall(r"[-+.\d]+", interval), detectable]
        columns = ("epochs", "train_top1", *NUMBERS, "detectable")
        assert any(
            (row["gate"], row["stride"], row["verdict"].split(":")[0]) == key and are_of(row, columns, numbers)
            for row in rows
        ), cells


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("expect.md", r"\| (sigmoid|linear) \| remove \|"),
        ("runs.md", r"stride removed.* - |the same - stride removed"),
    ],
)
def test_the_rows_without_the_stride_are_those_of_the_results(page: str, pattern: str) -> None:
    rows = read("evidence_gpu_differences.csv")
    table = cells_of(page, pattern)
    assert len(table) >= 5
    for cells in table:
        for interval in re.findall(r"([+-]?\d+\.\d) \(([+-]?\d+\.\d), ([+-]?\d+\.\d)\)", " | ".join(cells)):
            assert any(are_of(row, NUMBERS, interval) for row in rows), (page, interval)
        line = " ".join(cells)
        arm = "sigmoid" if "sigmoid" in line else "images"
        asleep = any(row["attention"] == "asleep" for row in rows if f"{arm}, stride removed" == row["arm"][8:])
        assert page == "runs.md" or ("asleep" in line) == asleep, line
