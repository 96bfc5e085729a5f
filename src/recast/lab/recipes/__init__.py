"""Make recipes by name, `make_recipe("finetune")`, from one YAML file per paper. Imports no torch.

The text of a recipe states what it trains, the paper's experiment, the command, the published number, the cost, and
what is inferred here because the paper leaves it open.

A file holds `paper`, `notes` (texts said more than once), `bases` (settings with a name, under the dotted names of a
recipe's fields; other files may build on them), `sizes` (columns of numbers and texts, a row for every size of the
network), `groups` of recipes, and by name of a recipe its `memory`, as counted.
A recipe of a group is made for each of its rows, or for those named in `for`. {column} in its name, texts and settings
is replaced by the value of the row, of its size, or of a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from recast.config import read
from recast.errors import RecastError, suggest
from recast.lab.config import Recipe
from recast.lab.config.recipe import extend
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
    """Description, source, expected results and settings of a recipe."""

    name: str
    title: str
    """Summary in less than 90 characters."""
    paper: str
    """Paper, with the experiment, table or section."""
    expected: str
    """The published number."""
    cost: str
    inferred: str
    """Choices made here where the paper is silent or ambiguous."""
    settings: Mapping[str, Any]
    """Differences from `Recipe()`, by the dotted names of the fields."""
    after: str | None = None
    """The recipe whose weights it starts from (`--checkpoint`)."""
    needs_weights: bool = False
    """True if it requires trained weights: `--checkpoint` or `--pretrained`."""
    memory: Sequence[float] | None = None
    """Weights, gradients and moments in GiB, and what autograd keeps of an image in MiB without and with
    `grad_checkpointing` (results/memory.csv). None: not counted."""
    given_command: str | None = None
    data: str | None = None
    """Key of `DATA`; None: the data set of the settings."""

    def make(self) -> Recipe:
        """Return a new recipe."""
        nested: dict[str, Any] = {}
        for key, value in self.settings.items():
            *sections, field = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[field] = value
        return read(Recipe, nested, f"recipe {self.name}")

    @property
    def command(self) -> str:
        """The command line. A later stage names the weights of the earlier one."""
        if self.given_command:
            return self.given_command
        weights = f" --checkpoint runs/{self.after}/weights.safetensors" if self.after else ""
        _, data_dir = DATA[self.data or self.settings["data.name"]]
        return f"recast train {self.name} --data-dir {data_dir}{weights} --out runs/{self.name}"

    @property
    def text(self) -> str:
        """The whole description, the title first."""
        lines = [
            f"{self.title}\n",
            f"Paper: {self.paper}",
            f"Command: {self.command}",
            f"Expected: {self.expected}",
            f"Cost: {self.cost}",
        ]
        if self.memory is not None:
            weights, image, checkpointed = self.memory
            kept = f"{image:g} MiB an image ({checkpointed:g} with --grad-checkpointing)"
            lines.append(f"Memory: {weights:g} GiB and {kept}, counted for the parent")
        return "\n".join([*lines, f"Inferred: {self.inferred}"])


def compute(
    settings: Mapping[str, Any], gmacs: float | list[list[float]], teacher_gmac: float = 0.0, data: str | None = None
) -> str:
    """Return the floating-point operations of a training as text: images · epochs · 2 · (3 · gmac + teacher_gmac).

    A multiply-add is two operations, a backward pass costs two forward passes, and a teacher runs forward only.

    Args:
        gmacs: billions of multiply-adds of one image, forward; a list of [gmac, epochs] if they change.
    """
    images = DATA[data or settings["data.name"]][0] * float(settings.get("data.num_train", 1.0))
    parts = gmacs if isinstance(gmacs, list) else [[gmacs, settings["epochs"]]]
    exa = images * sum(epochs * 2 * (3 * gmac + teacher_gmac) for gmac, epochs in parts) * 1e9 / 1e18
    return f"{exa:,.0f} EFLOP" if exa >= 100 else f"{exa:.3g} EFLOP"


def recipe_files(plugins: Sequence[str]) -> list[Path]:
    """Return the YAML files of this library, and those in the folders of plug-ins, without importing these."""
    specs = [spec for name in plugins if (spec := find_spec(name)) is not None and spec.origin is not None]
    folders = dict.fromkeys([Path(__file__).parent, *(Path(spec.origin).parent for spec in specs if spec.origin)])
    return [path for folder in folders for path in sorted(folder.rglob("*.yaml"))]


def read_papers(paths: Sequence[Path]) -> dict[str, list[Entry]]:
    """Return paper → its recipes, in the order of the files."""
    papers = [yaml.load(path.read_text("utf-8"), LOADER) for path in paths]
    bases = {name: base for paper in papers for name, base in paper.get("bases", {}).items()}

    def settings(table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a table over those of the bases that it names in `from`, later ones over earlier ones.

        Another `kind` drops the settings of the previous kind.
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

    entries: dict[str, list[Entry]] = {paper["paper"]: [] for paper in papers}
    for paper in papers:
        for name, table in recipes_of(paper):
            values, cost = settings({"from": table.get("from", []), **table.get("set", {})}), table.get("cost", "")
            if "gmac" in table:
                cost = compute(values, table["gmac"], table.get("teacher_gmac", 0.0), table.get("data")) + cost
            source = f"{paper['paper']}: {table['experiment']}" if "experiment" in table else table["paper"]
            more: dict[str, Any] = {"after": table.get("after"), "given_command": table.get("command")}
            needs, memory = "after" in table or table.get("needs_weights", False), paper.get("memory", {}).get(name)
            more |= {"needs_weights": needs, "memory": memory, "data": table.get("data")}
            entry = Entry(name, table["title"], source, table["expected"], cost, table["inferred"], values, **more)
            entries[paper["paper"]].append(entry)
    return entries


def recipes_of(paper: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and table of every recipe of a paper, one for each row of its group, with the columns filled in."""
    sizes, notes = paper.get("sizes", {}), paper.get("notes", {})
    for group in paper["groups"]:
        rows = group.get("rows", [""])
        for row in rows:
            values = (rows[row] or {}) if isinstance(rows, Mapping) else {}
            columns = {"size": row} | notes | sizes.get(values.get("size", row), {}) | values
            for name, table in group["recipes"].items():
                if row in table.get("for", [row]):
                    yield filled(name, columns), filled(table, columns)


def filled(template: Any, columns: Mapping[str, Any]) -> Any:
    """Return a copy of nested plain data with every {column} replaced; a text of one {column} becomes its value."""
    if isinstance(template, Mapping):
        return {key: filled(value, columns) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(item, columns) for item in template]
    if not isinstance(template, str) or "{" not in template:
        return template
    if template[0] == "{" and template.find("}") == len(template) - 1:
        return filled(columns[template[1:-1]], columns)
    return filled(template.format_map(columns), columns)


@cache
def _recipes(plugins: tuple[str, ...]) -> dict[str, list[Entry]]:
    return read_papers(recipe_files(plugins))


def recipes() -> dict[str, Entry]:
    """Return the recipes of this library and of the plug-ins by name."""
    return {entry.name: entry for entries in _recipes(tuple(PLUGINS)).values() for entry in entries}


def find_recipe(name: str) -> Entry | None:
    """Return a recipe by its name, after loading the extensions if it is none of this library's; None if unknown."""
    if name not in recipes():
        extend()
    return recipes().get(name)


def make_recipe(name: str) -> Recipe:
    """Return a new recipe. Raises RecastError for an unknown name."""
    if (entry := find_recipe(name)) is None:
        raise RecastError(
            f"unknown recipe {name!r}: expected a name of docs/recipes.md, or a .yaml file.{suggest(name, recipes())}"
        )
    return entry.make()


def recipes_by_paper() -> dict[str, list[str]]:
    """Return paper → names of its recipes, those of this library first."""
    return {paper: [entry.name for entry in entries] for paper, entries in _recipes(tuple(PLUGINS)).items()}
