"""A run that recast nothing: a network alone, by itself and beside runs that are compared with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from recast.report import write_report
from recast.report.figures.cost import cost_axes
from recast.report.read.run import read_run
from recast.report.tables import cited
from recast.report.tables.made import missing
from recast.report.text.verdict import joint_verdict, verdict

MakeRun = Callable[..., Path]


@pytest.fixture
def make_plain(make_run: MakeRun) -> MakeRun:
    """A run folder as `recast train --where none` and `recast evaluate` leave it."""

    def make(name: str = "plain", **options: object) -> Path:
        path = make_run(name, attention=False, verify=False, control=False, **options)
        recipe = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8")) | {"where": ["none"]}
        (path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        (path / "plan.json").unlink()
        rows = (path / "rows.csv").read_text(encoding="utf-8").splitlines()
        kept = [row.replace("run,parent,", "run,finetuned,") for row in rows if not row.startswith("run,recast,")]
        (path / "rows.csv").write_text("\n".join(kept) + "\n", encoding="utf-8")
        shutil.rmtree(path / "finetuned", ignore_errors=True)
        return path

    return make


def test_the_page_says_so_and_shows_what_it_can(make_plain: MakeRun) -> None:
    path = make_plain(epochs=2)
    run = read_run(path)
    assert verdict(run).replace("\u00a0", " ") == (
        "Nothing was recast: the network alone, trained for 2 epochs, reaches 95.6 %."
    )
    text = write_report([path]).read_text(encoding="utf-8")
    assert "This run recast nothing: there is one arm" in text
    assert "Recast<br>" not in text
    assert "Gates and spans" not in text
    assert "What was recast, and what it costs" not in text
    assert "PGD, iterated" in text
    assert "nan" not in text.partition("</style>")[2].partition("<script>")[0].lower()
    assert "heads" not in missing(run)[1]


def test_beside_runs_that_are_recast(make_plain: MakeRun, make_run: MakeRun, tmp_path: Path) -> None:
    paths = [make_plain(epochs=1), make_run("mine", epochs=1, attention=False)]
    runs = [read_run(path) for path in paths]
    assert joint_verdict(runs).startswith("1 of 2 runs recast nothing; of the other: The recast model starts with")
    clean = cost_axes(runs)[0].charts[0]
    assert {(row[0], row[1]) for row in clean.data.rows} == {
        ("plain", "finetuned"),
        ("mine", "parent"),
        ("mine", "finetuned"),
        ("mine", "recast"),
    }
    assert "plain, Network: 95.6" in clean.svg
    text = write_report(paths, tmp_path / "both.html").read_text(encoding="utf-8")
    assert "more than the seed (where)" in text
    assert joint_verdict([runs[0], runs[0]]) == "None of these 2 runs recast anything."
    assert write_report([paths[0], paths[0]], tmp_path / "plain.html").exists()
    assert "## plain: " in cited.markdown(runs)


def test_a_run_whose_pooling_alone_became_attention(make_run: MakeRun) -> None:
    """Three arms and a plan, and no heads of convolutions to draw."""
    path = make_run("pooled", attention=False, epochs=2)
    recipe = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8"))
    recipe |= {"where": ["none"], "pool": {"kind": "per_class", "start": "average"}}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    planned = json.loads((path / "plan.json").read_text(encoding="utf-8"))
    (path / "plan.json").write_text(json.dumps(planned | {"steps": []}), encoding="utf-8")
    run = read_run(path)
    assert not run.is_plain
    assert not run.has_layers
    text = write_report([path]).read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "attention pooling with a learned token for every class. No convolution was recast." in text
    assert "Compute with attention pooling" in text
    assert "Gates and spans" not in text
    assert "Three arms" in text
    assert "This run recast nothing" not in text
    assert "heads" not in missing(run)[1]
    assert "agreement" in missing(run)[1]
