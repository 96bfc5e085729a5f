"""MkDocs: pages made when the site is built (commands, recipes, notebooks, files outside docs/); links inside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BOOSTS = {"training.md": 2, "data.md": 2}
"""Factor of a page in the ranking of the site's search."""


def on_files(files: Files, config: Any) -> Files:
    """Add what is not in docs/: the commands, notebooks as pages, results, CONTRIBUTING and CHANGELOG."""
    for path in (ROOT / "results").glob("*.csv"):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    results = re.sub(r"`(\w+\.csv)`", r"[`\1`](\1)", (ROOT / "results/README.md").read_text("utf-8"))
    pages = {"results/tables.md": results, "reference/commands.md": "\n".join(commands())}
    for name in ("CONTRIBUTING", "CHANGELOG"):
        pages[f"{name.lower()}.md"] = (ROOT / f"{name}.md").read_text("utf-8").replace("](docs/", "](")
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        pages[f"notebooks/{path.stem}.md"] = "\n".join(notebook(path))
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """`../results/x.csv` is outside of docs/ in the repository, and beside the pages in the site.

    The search shows the page of training options before pages that have the words by the way.
    """
    if page.file.src_uri.startswith("recipes/"):
        markdown = "".join(with_recipes(markdown))
    page.meta.setdefault("search", {"boost": BOOSTS.get(page.file.src_uri, 1)})
    return re.sub(r"\]\((?:\.\./)+results/", "](" + "../" * page.file.src_uri.count("/") + "results/", markdown)


def commands() -> Iterator[str]:
    """Every command with all its options, as its help shows them."""
    from recast.lab.cli import COMMANDS, main

    import_module("recast.papers")  # their recipes and networks, as in the command itself
    yield "# Commands\n\n`recast COMMAND --help` prints what is used most.\n"
    for name in COMMANDS:
        with redirect_stdout(StringIO()) as text:
            if main([name, "--help-all"]):
                raise RuntimeError(f"recast {name} --help-all failed")
        yield f"## recast {name}\n\n```text\n{text.getvalue().strip()}\n```\n"


def with_recipes(markdown: str) -> Iterator[str]:
    """A page of recipes with the table of every paper that is a section, before its notes."""
    import_module("recast.papers")
    from recast.lab.recipes import recipes_by_paper

    for section in re.split(r"^(?=##)", markdown, flags=re.MULTILINE):
        yield section
        heading = section.partition("\n")[0].removeprefix("## ")
        if names := recipes_by_paper().get(heading):
            yield "\n".join(recipe_table(names)) + "\n\n"


def recipe_table(names: list[str]) -> Iterator[str]:
    """What each recipe trains, its main settings, the published number and the cost."""
    from recast.lab.recipes import make_recipe, recipes

    yield "| recipe | trains | size | epochs | batch | optimiser, peak rate | decay | drop-path | expected | cost |"
    yield "|---|---|---:|---:|---:|---|---:|---:|---|---|"
    for name in names:
        recipe, entry = make_recipe(name), recipes()[name]
        data, optim, drop_path = recipe.data, recipe.optim, recipe.regularization.drop_path or 0
        rate = optim.lr * (data.batch_size / optim.base_batch if optim.base_batch else 1)
        sizes = ", tested ".join(str(size) for size in (data.img_size, data.test_size) if size)
        settings = (sizes, recipe.epochs, data.batch_size, f"{optim.opt} {rate:.3g}", f"{optim.weight_decay:g}")
        cells = (f"`{name}`", entry.title, *settings, f"{drop_path:g}", entry.expected, entry.cost)
        yield f"| {' | '.join(map(str, cells))} |"


def notebook(path: Path) -> Iterator[str]:
    """A notebook as a page: its text, code and what it printed, with pictures inside."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        yield f"```python\n{source}\n```\n" if cell["cell_type"] == "code" else source + "\n"
        if number == 0:
            yield f"[Download the notebook]({path.name}){{ .md-button download }}\n"
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                yield f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">\n'
            else:
                yield "```text\n" + "".join(data["text/plain"]).rstrip() + "\n```\n"
