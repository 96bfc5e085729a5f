import csv
import importlib
import importlib.metadata
import json
import re
import runpy
import sys
import zipfile
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

from recast.analysis.record import Attention
from recast.lab.data.datasets import ImageTensors
from recast.tracing.cost import count_parameters

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of studies/ by name, out of the way of others of that name."""
    modules = ("claims", "csv_files", "measure", "studies", "tables")

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
        "delta(pi), first block": 3.0,
        "delta(pi), last block": 7.0,
    }
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
        "corruptions, severity 1": [0, 3, 6],
        "corruptions, severity 3": [1, 4],
        "corruptions, severity 5": [2, 5],
    }
    assert load("tables").by_severity(np.empty(0)) == {}


def test_the_claims_follow_from_the_other_tables(load: Any) -> None:
    claims = load("claims").all_claims()
    assert [{name: str(value) for name, value in row.items()} for row in claims] == read("evidence_claims.csv")
    assert {row["verdict"].split(":")[0] for row in claims} == {"holds here", "does not hold here", "not decidable"}
    for row in claims:
        assert row["attention"] != "asleep" or row["verdict"].startswith("not decidable"), row


def test_attention_slept_where_a_run_has_less_than_half_of_its_heads_awake(load: Any) -> None:
    """The same rule in every table: scores of the runs against the word in the rows of differences."""
    rule = load("rule")
    for part in ("evidence", "evidence_gpu"):
        scores = [row for row in read(f"{part}.csv") if row["heads"]]
        for row in read(f"{part}_differences.csv"):
            runs = [run for run in scores if (run["study"], run["arm"]) == (row["study"], row["arm"])]
            if runs:
                awake = all(rule.is_awake(int(run["heads_awake"]), int(run["heads"])) for run in runs)
                assert row["attention"] == ("awake" if awake else "asleep"), row


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
    row = {"low_95": low, "high_95": high, "attention": attention}
    assert claim.verdict(row) == claim.verdict(row, 95.0) == expected
    for train_top1 in (94.9, float("nan")):
        assert claim.verdict(row, train_top1).startswith("not decidable: ")
        assert replace(claim, source="ours").verdict(row, train_top1) == expected


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
    table = cells_of("studies/claims.md", r"\| (keep|remove) \|")
    assert len(table) > 45
    rows = [row for row in read("evidence_claims.csv") if row["epochs"] and "*" not in row["study"]]
    for cells in table:
        *_, gate, stride, epochs, interval, verdict = cells
        key = (
            {"C-MHSA": "none: C-MHSA", "–": ""}.get(gate, gate),
            stride,
            {"asleep": "not decidable: attention slept", "too short": "not decidable: too short"}.get(verdict, verdict),
        )
        numbers = [epochs, *re.findall(r"[-+.\d]+", interval)]
        columns = ("epochs", *NUMBERS)
        assert any(
            (row["gate"], row["stride"], row["verdict"]) == key and are_of(row, columns, numbers) for row in rows
        ), cells


INTERVAL = r"[+-]?\d+\.\d+ \([+-]?\d+\.\d+, [+-]?\d+\.\d+\)"
VERDICT = r"(holds here|does not hold here|not decidable)\*\*"


def test_a_verdict_beside_an_interval_is_that_of_the_table() -> None:
    """Of finetuned.md: `**does not hold here** with the linear gate, −1.1 (−1.6, −0.6)`."""
    rows = [row for row in read("evidence_claims.csv") if row["low_95"]]
    page = (ROOT / "docs/studies/finetuned.md").read_text(encoding="utf-8").replace("−", "-")
    verdicts = re.findall(rf"\*\*{VERDICT}[^.;:|]{{0,60}}, ({INTERVAL})", page)
    assert len(verdicts) >= 3
    for verdict, interval in verdicts:
        numbers = re.findall(r"[-+.\d]+", interval)
        assert verdict in {row["verdict"] for row in rows if are_of(row, NUMBERS, numbers)}, interval


def test_the_rows_without_the_stride_are_those_of_the_results() -> None:
    rows = read("evidence_gpu_differences.csv")
    table = cells_of("studies/finetuned.md", r"stride removed.* - |the same - stride removed")
    assert len(table) >= 5
    for cells in table:
        for interval in re.findall(r"([+-]?\d+\.\d) \(([+-]?\d+\.\d), ([+-]?\d+\.\d)\)", " | ".join(cells)):
            assert any(are_of(row, NUMBERS, interval) for row in rows), interval


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of studies/ by name, out of the way of others of that name."""
    monkeypatch.syspath_prepend(str(ROOT / "studies"))  # type: ignore[no-untyped-call]
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", "") or "").startswith(str(ROOT / "studies")):
            del sys.modules[name]


def test_every_arm_can_be_built(study: Any) -> None:
    """Their settings are older than the default gate, which does not take all of them."""
    price, beside = study("price"), study("beside")
    parent, images = timm.create_model("cifar_resnet20_a", num_classes=10), torch.randn(4, 3, 32, 32)
    for setting in price.arms("cifar").values():
        price.build(parent, price.complete("cifar", setting), images, 0)
    built = {arm: beside.build(parent, setting, images, 0) for arm, setting in beside.arms("cifar").items()}
    assert len({count_parameters(model) for model in built.values()}) == 8  # of nine networks, two of the same size


@pytest.mark.parametrize("task", ["odd", "twice", "more", "first", "views"])
def test_a_canvas_of_photographs_has_the_answer_that_it_shows(
    task: str, study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs = study("photographs")
    monkeypatch.setattr(photographs, "altered", lambda pictures, _generator: pictures)
    labels = torch.arange(200) % 10
    pixels = torch.stack([labels, torch.arange(200)], 1).byte()[:, [0, 1, 1], None, None].repeat(1, 1, 32, 32)
    images, answers = photographs.draw(task, ImageTensors(pixels, labels), 60, 0)
    cells = images[:, :2, 16::32, 16::32].flatten(2).tolist()  # class and number of the photograph in each cell
    for (classes, numbers), answer in zip(cells, answers.tolist(), strict=True):
        shown = [pair for pair in zip(classes, numbers, strict=True) if pair[0] < 10]  # others are empty
        counts = Counter(label for label, _ in shown)
        if task in ("twice", "views"):
            first, second = photographs.PAIRS[answer]
            assert len(set(shown)) == 3
            assert shown[first] == shown[second]
        elif task == "first":
            assert shown[0][0] == answer
        else:
            assert len(set(shown)) == len(shown)
            assert len(counts) == 2
            assert (counts[answer], len(shown)) == ((1, 3) if task == "odd" else (4, 7))


def test_every_view_of_a_photograph_is_altered(study: Any) -> None:
    photographs, pictures = study("photographs"), torch.randint(0, 200, (5, 3, 3, 32, 32), dtype=torch.uint8)
    for all_altered in (False, True):
        canvases, cells = photographs.seen_twice(pictures, torch.Generator(), all_altered=all_altered)
        shown = canvases.unflatten(2, (2, 32)).unflatten(4, (2, 32)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        shown = shown[torch.arange(5)[:, None], cells]
        kept = (shown == pictures[:, [0, 1, 2, 0]]).flatten(2).all(2)
        assert kept.tolist() == [[not all_altered] * 3 + [False]] * 5


def test_attention_is_summed_over_the_cells_of_a_canvas(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maps, mix = study("photographs_maps"), torch.rand(2, 1, 64, 64).softmax(-1)
    monkeypatch.setattr(maps.recast, "record", lambda _model: nullcontext({"layer": Attention(mix, (8, 8))}))
    cell = torch.tensor([row // 4 * 2 + column // 4 for row in range(8) for column in range(8)])
    for asked, read in product(range(4), repeat=2):
        expected = mix[:, 0, cell == asked][:, :, cell == read].sum(2).mean(1)
        torch.testing.assert_close(maps.on_cells(nn.Identity(), torch.zeros(2))[:, asked, read], expected)


def test_no_study_hides_a_package() -> None:
    """A study's folder is first on its path: numba imported a `coverage.py` there."""
    lines = [line for package in importlib.metadata.distributions() for line in package.requires or ()]
    optional = {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in lines}
    for path in (ROOT / "studies").glob("*.py"):
        assert path.stem not in optional, f"{path.name} hides the package {path.stem}"


@pytest.fixture
def works_with(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What studies/works_with defines, its scripts out of the way of others of their names."""
    folder = ROOT / "studies/works_with"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    study = runpy.run_path(str(folder / "__main__.py"), run_name="works_with")
    study["load_tools"]()
    yield study
    for path in folder.glob("[!_]*.py"):
        sys.modules.pop(path.stem, None)


def test_every_tool_has_its_rows_and_the_page_is_made_of_them(works_with: Any) -> None:
    rows, tools = works_with["read"](), works_with["TOOLS"]
    of = {name: [row for row in rows if row["tool"] == name] for name in tools}
    assert {row["tool"] for row in rows} == set(tools)
    for name, tool in tools.items():
        assert {(row["kind"], row["does"]) for row in of[name]} == {(tool.kind, tool.does)}, name
        cells = {row["cell"] for row in of[name]}
        assert cells <= {"exact", "works", "wrong", "loses attention", "refused"} or cells == {"not run"}, name
        assert [row["layer"] for row in of[name]] == (["beside", "linear"] if cells != {"not run"} else [""]), name
        _, _, pinned = tool.packages[0].partition("==")
        assert all(row["version"].startswith(pinned) for row in of[name]), name
        assert all(row["message"] for row in of[name] if row["cell"] in ("refused", "not run")), name
    assert sum(mine[0]["cell"] != "not run" for mine in of.values()) >= 35
    page = (ROOT / "docs/works-with.md").read_text(encoding="utf-8")
    assert page.endswith("\n\n" + works_with["tables"](rows))
