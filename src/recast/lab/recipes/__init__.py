"""Recipes by name: `make_recipe("finetune")`. Tables of values, one YAML file a paper; no torch in here.

A recipe's text gives what it trains, the paper's experiment, the command, the published number, the cost, and what the
paper leaves open and is inferred here.

A file holds `paper`, `notes` (texts said more than once), `bases` (settings with a name, under the dotted names of a
recipe's fields; other files may build on them), `sizes` (columns of numbers and texts, a row for every size of the
network), and `groups` of recipes. A recipe of a group is made for each of its rows, or for those named in `for`; where
its name, texts and settings say {column}, they get that of the row (its own, that of its size, or a note).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from recast.errors import RecastError, suggest
from recast.lab.config import Recipe
from recast.lab.recipe import recipe_from_dict
from recast.models.names import PLUGINS

DATA = {
    "imagenet": (1_281_167, "IMAGENET"), "folder": (14_197_122, "IMAGENET21K"), "cifar100": (50_000, "CIFAR100"),
    "torch/CIFAR100": (50_000, "CIFAR100"), "torch/Flowers102": (2_040, "FLOWERS102"), "INAT18": (437_513, "INAT18"),
    "masks": (20_210, "ADE20K"), "coco": (118_287, "COCO"),
}  # fmt: skip
"""Training images of a data set and the name of its folder in a command. A folder is the whole of ImageNet-21k (Fall
2011), 21,841 classes, unless the recipe's `data` names another; masks are those of ADE20k, coco is
train2017."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's is ten times faster."""


@dataclass(frozen=True)
class Entry:
    """One recipe: what it trains, where it comes from, what to expect of it, and its settings."""

    name: str
    title: str
    """What it trains, in less than 90 characters."""
    paper: str
    """With the experiment, table or section."""
    expected: str
    """The published number."""
    cost: str
    inferred: str
    """What the paper leaves open or says in two ways, and what is taken here."""
    settings: Mapping[str, Any]
    """What differs from `Recipe()`, under the dotted names of the fields."""
    after: str | None = None
    """The recipe whose weights it starts from (`--checkpoint`)."""
    needs_weights: bool = False
    """It means nothing from random weights: it is to be given `--checkpoint` (or `--pretrained`)."""
    given_command: str | None = None
    data: str | None = None
    """Of `DATA`. None: what the settings say."""

    def make(self) -> Recipe:
        """A fresh recipe."""
        nested: dict[str, Any] = {}
        for key, value in self.settings.items():
            *sections, field = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[field] = value
        return recipe_from_dict(nested, f"recipe {self.name}")

    @property
    def command(self) -> str:
        """The command line; a later stage names the weights of the earlier one."""
        if self.given_command:
            return self.given_command
        weights = f" --checkpoint runs/{self.after}/weights.safetensors" if self.after else ""
        _, data_dir = DATA[self.data or self.settings["data.name"]]
        return f"recast train {self.name} --data-dir {data_dir}{weights} --out runs/{self.name}"

    @property
    def text(self) -> str:
        """All that is told of it, the title first."""
        return (
            f"{self.title}\n\nPaper: {self.paper}\nCommand: {self.command}\nExpected: {self.expected}\n"
            f"Cost: {self.cost}\nInferred: {self.inferred}"
        )


def compute(
    settings: Mapping[str, Any], gmacs: float | list[list[float]], teacher_gmac: float = 0.0, data: str | None = None
) -> str:
    """Floating-point operations of a training: images · epochs · 2 · (3 · gmac + teacher_gmac), as text.

    Two operations a multiply-add, a backward pass twice the forward pass, a teacher runs forward only. `gmacs`:
    billions of multiply-adds of one image, forward; where they change, [gmac, epochs] each.
    """
    images = DATA[data or settings["data.name"]][0] * float(settings.get("data.num_train", 1.0))
    parts = gmacs if isinstance(gmacs, list) else [[gmacs, settings["epochs"]]]
    exa = images * sum(epochs * 2 * (3 * gmac + teacher_gmac) for gmac, epochs in parts) * 1e9 / 1e18
    return f"{exa:,.0f} EFLOP" if exa >= 100 else f"{exa:.3g} EFLOP"


def recipe_files() -> list[Path]:
    """Return the YAML files in the folders of the plugins (`models.names.PLUGINS`), without importing those."""
    specs = [spec for name in PLUGINS if (spec := find_spec(name)) is not None and spec.origin is not None]
    folders = dict.fromkeys(Path(spec.origin).parent for spec in specs if spec.origin is not None)
    return [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]


def read_papers(paths: Sequence[Path]) -> dict[str, list[Entry]]:
    """Paper → its recipes, in the order of the files."""
    papers = [yaml.load(path.read_text("utf-8"), LOADER) for path in paths]
    bases = {name: base for paper in papers for name, base in paper.get("bases", {}).items()}

    def settings(table: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a table and of the bases that it names in `from`, the later ones before the earlier.

        Another `kind` drops what was set for the one before.
        """
        merged: dict[str, Any] = {}
        for part in (*(settings(bases[base]) for base in table.get("from", [])), dict(table)):
            part.pop("from", None)
            for key, value in part.items():
                if key.endswith(".kind") and merged.get(key, value) != value:
                    old = key.removesuffix("kind")
                    merged = {name: setting for name, setting in merged.items() if not name.startswith(old)}
            merged |= part
        return merged

    found: dict[str, list[Entry]] = {paper["paper"]: [] for paper in papers}
    for paper in papers:
        for name, table in recipes_of(paper):
            own, cost = settings({"from": table.get("from", []), **table.get("set", {})}), table.get("cost", "")
            if "gmac" in table:
                cost = compute(own, table["gmac"], table.get("teacher_gmac", 0.0), table.get("data")) + cost
            source = f"{paper['paper']}: {table['experiment']}" if "experiment" in table else table["paper"]
            found[paper["paper"]].append(Entry(
                name, table["title"], source, table["expected"], cost, table["inferred"], own,
                after=table.get("after"), needs_weights="after" in table or table.get("needs_weights", False),
                given_command=table.get("command"), data=table.get("data"),
            ))  # fmt: skip
    return found


def recipes_of(paper: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and table of every recipe of a paper, one for each row of its group, the columns filled in."""
    sizes, notes = paper.get("sizes", {}), paper.get("notes", {})
    for group in paper["groups"]:
        rows = group.get("rows", [""])
        for row in rows:
            own = (rows[row] or {}) if isinstance(rows, Mapping) else {}
            columns = {"size": row} | notes | sizes.get(own.get("size", row), {}) | own
            for name, table in group["recipes"].items():
                if row in table.get("for", [row]):
                    yield filled(name, columns), filled(table, columns)


def filled(template: Any, columns: Mapping[str, Any]) -> Any:
    """A copy of nested plain data with the columns where it names them; a text that is {column} alone is its value."""
    if isinstance(template, Mapping):
        return {key: filled(value, columns) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(item, columns) for item in template]
    if not isinstance(template, str) or "{" not in template:
        return template
    if template[0] == "{" and template.find("}") == len(template) - 1:
        return filled(columns[template[1:-1]], columns)
    return filled(template.format_map(columns), columns)


_BY_PAPER = read_papers(recipe_files())

RECIPES: dict[str, Entry] = {entry.name: entry for entries in _BY_PAPER.values() for entry in entries}
"""Every recipe."""


def make_recipe(name: str) -> Recipe:
    """A fresh recipe. Raises RecastError for an unknown name."""
    if name not in RECIPES:
        raise RecastError(
            f"unknown recipe {name!r}: expected a name of docs/recipes.md, or a .yaml file.{suggest(name, RECIPES)}"
        )
    return RECIPES[name].make()


def recipes_by_paper() -> dict[str, list[str]]:
    """Names of the recipes below the paper that they come from, this library's own first."""
    return {paper: [entry.name for entry in entries] for paper, entries in _BY_PAPER.items()}
