"""The evidence tables: blocks by name, verdicts, and that each table follows from the one before it."""

import csv
import importlib
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of studies/ by name, out of the way of others of that name."""
    modules = ("claims", "studies", "tables")

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


def test_the_claims_follow_from_the_other_tables(load: Any) -> None:
    claims, every = load("claims"), load("studies").studies()
    judged = claims.judged(read("evidence.csv"), read("evidence_differences.csv"), every)
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


CELLS = r"\| (.*) \| (sigmoid|linear|C-MHSA|–) \| (keep) \| (.*) \| (.*) \| (.*) \((.*), (.*)\) \| (.*) \| (.*) \|"
NUMBERS = ("epochs", "train_top1", "difference", "low_95", "high_95", "detectable")


def test_the_table_of_claims_in_the_documentation_is_that_of_the_results() -> None:
    lines = [line for line in (ROOT / "docs/expect.md").read_text(encoding="utf-8").splitlines() if "| keep |" in line]
    shown = [re.fullmatch(CELLS, line.replace("−", "-").replace("**", "")) for line in lines]
    assert len(shown) > 25
    rows = [row for row in read("evidence_claims.csv") if "*" not in row["study"]]
    for found in shown:
        assert found is not None
        gate = {"C-MHSA": "none: C-MHSA", "–": ""}.get(found[2], found[2])
        printed = [found[i] for i in (4, 5, 6, 7, 8, 10)]
        error = [0.51 * 10.0 ** -len(cell.partition(".")[2]) for cell in printed]
        assert any(
            (row["gate"], row["stride"], row["verdict"].split(":")[0]) == (gate, found[3], found[9].split(":")[0])
            and all(
                abs(float(row[name]) - float(cell)) <= e for name, cell, e in zip(NUMBERS, printed, error, strict=True)
            )
            for row in rows
        ), found[0]


def test_the_rows_without_the_stride_are_those_of_the_results() -> None:
    """In the table of claims, and column by column in docs/runs.md."""
    rows = read("evidence_gpu_differences.csv")
    tables = {
        "expect.md": r"\| (?:sigmoid|linear) \| remove \|",
        "runs.md": r"stride removed.* − |the same − stride removed",
    }
    for page, line in tables.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        lines = [shown for shown in text.splitlines() if re.search(line, shown) and shown.startswith("|")]
        assert len(lines) >= 5
        for shown in lines:
            for cell in re.findall(r"([+−]?\d+\.\d) \(([+−]?\d+\.\d), ([+−]?\d+\.\d)\)", shown):
                numbers = [float(number.replace("−", "-")) for number in cell]
                assert any(
                    all(
                        abs(float(row[name]) - number) <= 0.051
                        for name, number in zip(NUMBERS[2:5], numbers, strict=True)
                    )
                    for row in rows
                ), (page, cell)
            arm = "sigmoid" if "sigmoid" in shown else "images"
            asleep = any(row["attention"] == "asleep" for row in rows if arm in row["arm"])
            assert page == "runs.md" or ("asleep" in shown) == asleep, shown
