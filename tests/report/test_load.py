"""A run folder that is missing a file or holds half of one: the error names it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recast.errors import RecastError
from recast.lab.report.load import read_run
from recast.lab.report.verdict import verdict

MakeRun = Callable[..., Path]


def test_what_may_be_missing(make_run: MakeRun) -> None:
    for name in ("plan.json", "metrics.jsonl"):
        with pytest.raises(RecastError, match=name):
            read_run(make_run(name, without=(name,)))
    rest = ("verify.json", "environment.json", "rows.csv", "finetuned", "analysis", "evaluation.json")
    assert read_run(make_run(without=rest)).epochs == 3


OPTIONAL = ["finetuned/metrics.jsonl", "verify.json", "environment.json", "schedule.json", "rows.csv"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluation.json", *OPTIONAL])
def test_what_is_damaged_is_named_and_left_out(make_run: MakeRun, name: str) -> None:
    path = make_run(source="during")
    content = (path / name).read_bytes()
    wide = b"x" * 200_000 if name == "rows.csv" else b""  # more than a field of a CSV may hold
    for damaged in (content[: int(0.7 * len(content))], content[: len(content) // 2] + b"\0\xff\xfe" + wide):
        (path / name).write_bytes(damaged)
        with pytest.warns(UserWarning, match=rf"the report goes without .*{name}"):
            assert read_run(path).metrics


def test_a_run_of_which_no_epoch_can_be_read(make_run: MakeRun) -> None:
    path = make_run(source="during")
    (path / "metrics.jsonl").write_bytes(b"\xff\x00" * 100)
    with pytest.warns(UserWarning, match="line 1"):
        run = read_run(path)
    assert (run.metrics, run.epochs, bool(verdict(run).headline)) == ([], run.recipe.epochs, True)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("recipe.yaml", "a: [1", "recipe.yaml"),
        ("metrics.jsonl", "\n", "metrics.jsonl"),
        ("plan.json", '{"steps": [', "plan.json"),
        ("plan.json", '{"steps": [{"name": "a"}], "left": [], "edits": [], "totals": {}}', "plan.json"),
    ],
)
def test_a_needed_file_of_another_format(make_run: MakeRun, name: str, content: str, named: str) -> None:
    path = make_run()
    (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(RecastError, match=named):
        read_run(path)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("metrics.jsonl", '{"epoch": 0}\n', "line 1: val_loss"),
        ("verify.json", "[]", "verify.json"),
        ("rows.csv", "run,model,suite,dataset,metric,value,n,low,high\nrun,parent\n", r"rows\.csv line 2"),
        ("analysis/agreement.csv", "index,image\nx,a\n", r"agreement\.csv .* label"),
        ("evaluation.json", '{"suites": []}', r"evaluation\.json: suites"),
        ("schedule.json", '{"version": 2, "name": "", "layers": [], "dates": {}}', "version 2"),
    ],
)
def test_other_files_of_another_format_are_left_out(make_run: MakeRun, name: str, content: str, named: str) -> None:
    path = make_run()
    (path / name).write_text(content, encoding="utf-8")
    with pytest.warns(UserWarning, match=f"the report goes without .*{named}"):
        read_run(path)


def test_a_repeated_epoch_counts_once(make_run: MakeRun) -> None:
    path = make_run(epochs=2)
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"epoch": 1, "val_loss": 1.0, "val_top1": 12.5}) + "\n")
    assert [row.metrics for row in read_run(path).metrics if row.epoch == 1] == [{"top1": 12.5}]
