"""docs/papers.md: every table and figure of a paper has a row, and every command of it and of its notes is one.

With RECAST_SLOW=1 the trainings make two updates each on tiny data.
"""

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
from test_two_steps import tiny, tiny_data

from recast.errors import RecastError
from recast.lab.cli import main
from recast.lab.config import Recipe
from recast.lab.evaluation.suites import SUITES
from recast.lab.folder.records import Row, write_records
from recast.lab.recipes import recipes
from recast.lab.training import prepare, run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "papers.md").read_text(encoding="utf-8")
TABLES = PAGE.partition("\n## ")[2]
NOTES = [path.read_text(encoding="utf-8").partition("### Notes on")[2] for path in sorted(DOCS.glob("recipes/*.md"))]
TEXT = re.sub(r"\s+", " ", " ".join([PAGE, *NOTES]))


def expanded(text: str) -> Iterator[str]:
    braces = re.search(r"\{([^{}]*)\}", text)
    if braces is None:
        yield text
        return
    for word in braces[1].split(","):
        yield from expanded(text.replace(braces[0], word))


COMMANDS = [shlex.split(text)[1:] for line in re.findall(r"`(recast [^`]+)`", TEXT) for text in expanded(line)]
CHAINS = [
    [shlex.split(text)[2:] for text in pair.split(" then ")]
    for match in re.finditer(r"`(recast train [^`]+)`, then `(recast train [^`]+)`", TEXT)
    for pair in expanded(" then ".join(match.groups()))
]
TRAININGS = [words[1:] for words in COMMANDS if words[0] == "train"]


def captured(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Recipe:
    caught: list[Recipe] = []

    def catch(recipe: Recipe, *_: Any, **__: Any) -> None:
        caught.append(recipe)
        raise RecastError("caught")

    Path("data").mkdir(exist_ok=True)
    Path("weights.safetensors").touch()
    Path("families.csv").write_text("fine,coarse\na,b\n", encoding="utf-8")
    monkeypatch.setattr(run, "train", catch)
    weights = ["--checkpoint", "weights.safetensors"] if recipes()[words[0]].needs_weights else []
    assert main(["train", *words, *weights, "--data-dir", "data", "--out", "runs/none"]) == 2
    assert len(caught) == 1, words
    return caught[0]


ITEM = r"(?:[A-D]\.)?\d+(?:\.\d+)?"


def mentioned(section: str, kind: str) -> set[str]:
    """Numbers of the tables or figures of a section: `Tables B.1, B.2`, `Figs. 6.7–6.10`."""
    numbers: set[str] = set()
    for text in re.findall(rf"{kind}s?\.? ({ITEM}(?:(?:–|, | and ){ITEM})*)", section):
        for first, last in re.findall(rf"({ITEM})(?:–({ITEM}))?", text):
            chapter, dot, number = first.rpartition(".")
            end = int((last or first).rpartition(".")[2]) + 1
            numbers |= {f"{chapter}{dot}{n}" for n in range(int(number), end)}
    return numbers


def test_every_table_and_figure_has_a_row() -> None:
    *sections, _ = re.split(r"^## .*$", PAGE, flags=re.MULTILINE)[1:]
    tables = ["1-5", "1-3", "1-5 B.1-3 C.1-1 D.1-2", "2.1-16", "3.1-22 4.1-6 6.1-15"]
    figures = ["1-7", "1-4", "1-8", "2.1-9", "3.1-10 4.1-4 6.1-11"]
    for section, *ranges in zip(sections, tables, figures, strict=True):
        for kind, words in zip(("Table", "Fig"), ranges, strict=True):
            for chapter, first, last in re.findall(r"(\w\.)?(\d+)-(\d+)", words):
                expected = {f"{chapter}{number}" for number in range(int(first), int(last) + 1)}
                assert expected <= mentioned(section, kind)


def test_every_row_has_one_verdict_and_nothing_else() -> None:
    cells = [line.strip("| ").split("|")[-1].strip() for line in TABLES.splitlines() if line.startswith("| ")]
    verdicts = "equal|holds here|does not hold here|not decidable|measured|drawn|not run"
    other = {
        cell for cell in cells if not re.fullmatch(rf"\[(?:{verdicts})\]\([^)]+\)|not run|drawn|left out: .*", cell)
    }
    assert len(cells) > 80
    assert other == {"here"}


def test_every_recipe_is_named_in_the_docs() -> None:
    code = [text for path in DOCS.rglob("*.md") for text in re.findall(r"`([^`\n]{2,400})`", path.read_text("utf-8"))]
    assert recipes().keys() <= {word for text in code for name in expanded(text) for word in name.split()}


@cache
def options_of(command: str) -> set[str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([command, "--help-all"]) == 0
    return set(re.findall(r"--[a-z][a-z-]*", out.getvalue().replace("--[no-]", "--")))


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_every_command_parses_and_its_recipe_resolves(
    every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(TRAININGS) > 200
    for words in TRAININGS[::every]:
        recipe = captured(words, monkeypatch)
        assert recipe.model.name.partition(":")[2] or timm.is_model(recipe.model.name), words
    for command, *words in COMMANDS:
        assert {word for word in words if word.startswith("--")} <= options_of(command) | {"--no-pretrained"}, words
        if "--suite" in words:
            assert set(words[words.index("--suite") + 1].split(",")) <= SUITES.keys(), words
        if command in ("verify", "explain") and words[0] != "RUN":
            assert timm.is_model(words[0]), words


def test_figures_of_several_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two points of PRS' Table 2, a rank of Grafit's Fig. 2.4, one on V2, two seeds, and metrics that none shows."""
    monkeypatch.chdir(tmp_path)
    top1 = {
        "deit_tiny": (6.43, 72.2),
        "resnet18": (13.93, 69.53),
        "swin_tiny": (13.2, 81.2),
        "resnet50": (13.67, 80.15),
    }
    runs = {
        f"prs_scale_{network}_{share}": {("clean", "top1"): value, ("clean", "top5"): 1.0}
        for network, values in top1.items()
        for share, value in zip((1, 100), values, strict=True)
    }
    runs["deit3_small"] = {("clean", "top1"): 81.4, ("imagenet-v2", "top1"): 70.5, ("imagenet-v2", "top5"): 90}
    runs["grafit_family"] = {("retrieval", "top1"): 1, ("retrieval", "map"): 2, ("retrieval", "neighbours"): 3}
    for name, values in runs.items():
        rows = [Row(name, "finetuned", suite, "imagenet", m, value, 100) for (suite, m), value in values.items()]
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_records(tmp_path / "runs" / name / "rows.csv", Row, rows)
    for seed, last in enumerate((79.5, 79.7)):
        lines = [json.dumps({"epoch": epoch, "val_top1": top1}) for epoch, top1 in enumerate((0.1, 40.0, last))]
        (tmp_path / "runs" / f"rsb_a2_{seed}").mkdir()
        (tmp_path / "runs" / f"rsb_a2_{seed}" / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    session: dict[str, Any] = {}
    for source in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE):
        exec(compile(source, "papers.md", "exec"), session)
    figure = session["minus_resnet"]
    assert figure["deit_tiny"].to_dict() == pytest.approx({1: 6.43 - 13.93, 100: 72.2 - 69.53})
    assert figure["swin_tiny"].to_dict() == pytest.approx({1: 13.2 - 13.67, 100: 81.2 - 80.15})
    assert session["v2_against_clean"].loc["deit3_small"].to_dict() == {"clean": 81.4, "imagenet-v2": 70.5}
    assert sorted(session["final"]) == [79.5, 79.7]
    assert session["by_epoch"].loc[2, ["mean", "min", "max"]].tolist() == pytest.approx([79.6, 79.5, 79.7])
    assert session["by_rank"].loc["grafit_family"].to_dict() == {"top1": 1, "map": 2}


def kinds(chains: list[list[list[str]]]) -> list[list[list[str]]]:
    """One chain of every kind: the size of the network makes none."""
    sizes = r"(?<=_)(tiny|small|base|large|huge|x*[sbml]?\d+)(?=_|')"
    return list({re.sub(sizes, "SIZE", str(chain)): chain for chain in chains}.values())


AFTER = [
    [[entry.after], [name]]
    for name, entry in recipes().items()
    if entry.after and entry.make().task.kind == "classify" and os.environ.get("RECAST_SLOW")
]


@pytest.mark.parametrize("chain", kinds(CHAINS + AFTER), ids=str)
def test_the_weights_of_the_first_stage_fit_the_second(
    chain: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train = run.train
    first, second = (captured(words, monkeypatch) for words in chain)
    monkeypatch.setattr(prepare, "load_data", tiny_data)
    train(tiny(first), tmp_path / "first", progress=False, trust=True)
    second, new_head = tiny(second), second.model.new_head
    weights = {"checkpoint": tmp_path / "first" / "weights.safetensors", "new_head": new_head}
    second = second.replace(model=second.model.replace(**weights))
    train(second, tmp_path / "second", progress=False, trust=True)
    assert (tmp_path / "second" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 2


@pytest.mark.slow
# those of a recipe as it is are in test_two_steps
@pytest.mark.parametrize("words", [words for words in TRAININGS if len(words) > 1], ids=" ".join)
def test_two_updates(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train = run.train
    recipe = captured(words, monkeypatch)
    monkeypatch.setattr(prepare, "load_data", tiny_data)
    train(tiny(recipe), tmp_path / "run", progress=False, trust=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 2
