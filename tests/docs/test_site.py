import copy
import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import recast
import recast.lab.evaluation
from recast.lab.recipes import recipes, recipes_by_paper

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_the_reference_has_every_public_name_and_what_the_pages_import() -> None:
    reference = set(re.findall(r"^::: recast\.(\S+)", (DOCS / "reference/python.md").read_text("utf-8"), re.MULTILINE))
    imported = {
        f"{module}.{name}"
        for page in (ROOT / "README.md", *DOCS.rglob("*.md"))
        for module, names in re.findall(r"^from recast\.(\S+) import ([\w, ]+)", page.read_text("utf-8"), re.MULTILINE)
        for name in names.replace(" ", "").rstrip(",").split(",")
    }
    assert imported
    assert imported | set(recast.__all__) <= reference


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: str(path.relative_to(DOCS)))
def test_links_are_named_by_the_title_of_their_page(path: Path) -> None:
    assert re.findall(r"\[[\w/.]+\.md\]\(", path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs(path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="pip install -e '.[docs]' for nbclient")
    nbformat = pytest.importorskip("nbformat")
    nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=None, kernel_name="python3").execute()


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]' to build the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command, "--site-dir", str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    fetched = r"""<(?:script|img|iframe)[^>]+src="?(?:https?:)?//|<link[^>]+stylesheet"? href="?(?:https?:)?//"""
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    assert not [page for page in pages if re.search(fetched, page.read_text("utf-8"))]
    help_text = (tmp_path / "reference/commands/index.html").read_text("utf-8")
    pages_of_recipes = "".join(page.read_text("utf-8") for page in tmp_path.glob("recipes/**/index.html"))
    assert all(f"<td><code>{name}</code></td>" in pages_of_recipes for name in recipes())
    ours = next(iter(recipes_by_paper().values()))
    assert f"lists {len(recipes()) - len(ours)} more" in help_text
    assert ", ".join(ours[-2:]) in help_text


LAB = ("data.load_data", "evaluation.evaluate", "evaluation.PixelModel", "evaluation.attacks.pgd")
NAMES = [*recast.__all__, *(f"lab.{name}" for name in LAB)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "__version__"])
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"copy": copy, "nn": nn, "recast": recast, "torch": torch}
    finder = doctest.DocTestFinder(recurse=False)
    tests = [test for test in finder.find(eval(f"recast.{name}"), name, globs=names) if test.examples]
    assert tests, f"recast.{name} has no example"
    output: list[str] = []
    for test in tests:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert not output, "".join(output)
