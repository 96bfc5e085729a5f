"""Read recipes from YAML files, which may leave out fields, and write them with every field. Imports no torch.

Paths in a recipe file are relative to the file, so that a run folder can be moved together with what lies in it.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from recast.config import File, Keys, read
from recast.errors import RecastError, shown
from recast.files import write_text
from recast.lab.config import Recipe
from recast.lab.config.inputs import EMBEDDED
from recast.lab.config.recipe import task_name_of_data
from recast.lab.config.types import MayChange
from recast.lab.fields import fields_of, merge
from recast.lab.files import LOCK
from recast.lab.records import Row
from recast.models.trust import follow_up
from recast.reading import decode, read_bytes

LARGEST = 2**19
"""Bytes of a recipe file. PyYAML reads some 100 kB a second."""
DEEPEST = 32
"""Levels of lists and mappings in one another in a recipe file."""
SEAL = "# sha256 of the lines above: "
"""Start of the last line of a run's recipe, the checksum of the other lines. Delete it after editing the file."""
PARENT_WEIGHTS = "parent.safetensors"
"""In a run folder: the parent's weights, if they are random or the classifier is new."""
PARENT = "parent"
"""The only folder that a run folder may hold before the run: the training of its parent."""
COARSE_FILE = "coarse.csv"
"""In a run folder: a copy of the file of coarse classes."""


def paths() -> list[Keys]:
    """Return the fields that name a file or a folder."""
    return [field.path for field in fields_of(Recipe) if File in field.marks]


def how_it_runs() -> list[str]:
    """Return the dotted names of the fields that change how a run is carried out, not its result."""
    return [".".join(field.path) for field in fields_of(Recipe) if MayChange in field.marks]


def may_change() -> list[str]:
    """Return the dotted names of the fields that may differ when a run is resumed: `how_it_runs` and `paths`."""
    return [*how_it_runs(), *map(".".join, paths())]


def override(base: Recipe, changes: Mapping[str, Any], name: Callable[[Keys], str] = ".".join) -> Recipe:
    """Return a recipe with other values.

    Where a union changes its kind, `base`'s fields that the new kind does not have are dropped.

    Args:
        base: the recipe to change.
        changes: nested plain data, such as `{"optim": {"lr": "1e-3"}}`.
        name: returns the name of a field in an error.

    Raises:
        RecastError: a field is unknown, or a value is not allowed.

    Example:
        >>> from recast.lab.config import Recipe
        >>> from recast.lab.recipe import override
        >>> override(Recipe(recast={"gate": "sigmoid", "alpha": 2.0}), {"recast": {"gate": "bias"}}).recast.gate
        'bias'
    """
    task, name_of_data = changes.get("task", {}), changes.get("data", {}).get("name", base.data.name)
    if (kind := task_name_of_data(name_of_data)) and isinstance(task, Mapping) and "kind" not in task:
        changes = {**changes, "task": {"kind": kind, **task}}
    return read(Recipe, merge(Recipe, base.model_dump(), changes), name=name)


def load_recipe(path: str | Path, *, complete: bool = False) -> Recipe:
    """Read a recipe file. Relative paths in it are searched beside it, then in the current folder.

    Args:
        complete: require every field and an unchanged file, as for the recipe of a run. Otherwise an edit is a warning.

    Raises:
        RecastError: the file is missing, incomplete, edited or no YAML mapping, or a key or value is wrong.
    """
    path = Path(path)
    text, data = _read(path)
    given = _flat(data)
    for keys in paths():
        value = given.get(".".join(keys))
        if isinstance(value, str) and (beside := path.parent / value).exists():
            _section(data, keys)[keys[-1]] = str(beside.resolve())
    body, seal, digest = text.rpartition(SEAL)
    is_untouched = digest.strip() == _digest(body)
    recipe = read(Recipe, data, f"{path} comes from another version of recast" if is_untouched else str(path))
    missing = [key for key, value in flat(recipe).items() if value is not None and key not in given]
    if complete and missing:
        raise RecastError(
            f"{path} lacks {', '.join(missing[:3])}{', …' * (len(missing) > 3)}: it was cut short, or comes from "
            "another version of recast"
        )
    if seal and not is_untouched:
        touched = f"{path} is not as the run wrote it: it was edited or damaged"
        if complete:
            raise RecastError(f"{touched}. Undo that; or, if the change is meant, delete its last line, the checksum")
        warnings.warn(f"{touched}; it is taken as it stands", stacklevel=2)
    return recipe


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a recipe file and the mapping in it."""
    try:
        text = decode(read_bytes(path, LARGEST), path)
        data = yaml.load(text, _PlainLoader)
    except FileNotFoundError:
        raise RecastError(f"no such recipe: {path}") from None
    except RecastError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # the latter for a number of 5,000 digits
        raise RecastError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from None
    except Exception as error:  # PyYAML lets through what Python says to `!!bool x`
        reason = f"a value is not what its tag says ({type(error).__name__})"
        raise RecastError(f"cannot read recipe {path}: {reason}") from None
    if not isinstance(data, dict):
        raise RecastError(f"recipe {path} must hold a mapping of keys to values, got {type(data).__name__}")
    return text, data


class _PlainLoader(yaml.SafeLoader):
    """YAML loader without what a recipe does not need.

    Aliases (a few lines of them stand for gigabytes), duplicate keys and deep nesting are errors.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1} has an alias (*): write it out")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError(f"lists and mappings are nested deeper than {DEEPEST} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if (twice := next((key for key in keys if keys.count(key) > 1), None)) is not None:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {shown(twice)} stands twice in a mapping")
        return super().construct_mapping(node, deep)


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the complete recipe. Paths below the folder of the file become relative to it, others absolute."""
    path = Path(path)
    data = recipe.model_dump(mode="json")
    folder = path.parent.resolve()
    for keys in paths():
        section = _section(data, keys)
        if section.get(keys[-1]) is not None:
            target = Path(section[keys[-1]]).expanduser().resolve()
            inside = target.is_relative_to(folder) and target != folder
            section[keys[-1]] = target.relative_to(folder).as_posix() if inside else str(target)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    write_text(path, f"{text}{SEAL}{_digest(text)}\n")


def _section(data: Any, keys: Keys) -> Any:
    """Return the mapping that contains a field; an empty one if there is none."""
    for key in keys[:-1]:
        data = data.get(key, {}) if isinstance(data, dict) else {}
    return data if isinstance(data, dict) else {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def changes(before: Recipe, now: Recipe, ignore: Iterable[str] = ()) -> list[str]:
    """Return the fields in which two recipes differ, as "optim.lr (0.1, now 0.2)", without those named in `ignore`."""
    a, b = flat(before), flat(now)
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name) and name not in ignore]
    return [f"{name} ({a.get(name)}, now {b.get(name)})" for name in names]


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return every field by its dotted name."""
    return _flat(recipe.model_dump(mode="json"))


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in nested.items():
        fields |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return fields


def refuse_used(out: Path) -> None:
    """Raise RecastError unless a new run may start in `out`."""
    used = sorted(path.name for path in out.iterdir() if path.name not in (PARENT, LOCK)) if out.is_dir() else []
    if "recipe.yaml" in used:
        raise RecastError(f"run folder {out} exists: choose another one with --out, or continue it with --resume {out}")
    if used:
        raise RecastError(f"{out} is not empty ({used[0]}): choose another folder with --out")


def check_recipe(folder: str | Path) -> None:
    """Raise `RecastError` for a folder that is not a run."""
    if not (Path(folder) / "recipe.yaml").is_file():
        raise RecastError(f"{folder} is not a run folder: it has no recipe.yaml (recast train writes one)")


def check_run(folder: str | Path) -> None:
    """Raise `RecastError` for a folder without a finished recast arm, before anything of it is loaded."""
    folder = Path(folder)
    check_recipe(folder)
    if not (folder / "weights.safetensors").is_file():
        again = follow_up("train", "--resume", str(folder), functions=functions_of(load_recipe(folder / "recipe.yaml")))
        raise RecastError(f"the training in {folder} is not finished: continue it with {again}")


def recipe_of(folder: Path, data_dir: str | None = None) -> Recipe:
    """Return the recipe of a run; `data_dir` is the folder of its images if they moved.

    Raises RecastError for files of a run from another machine that are not there.
    """
    recipe = load_recipe(folder / "recipe.yaml", complete=True)
    data, checkpoint = recipe.data, recipe.model.checkpoint
    before, table = (path and Path(path).expanduser() for path in (data.data_dir, data.labels_file))
    if data_dir is None and before and not before.exists() and not data.name.startswith("hfds/"):
        raise RecastError(f"no such data folder: {before}, of the run {folder}: give the folder with --data-dir")
    if data_dir is not None and data.name in EMBEDDED:
        raise RecastError(f"the run {folder} has images of the package ({data.name}): drop --data-dir")
    if table and not table.exists():
        if before is None and data_dir is None:
            raise RecastError(f"no such file: {table}, of the run {folder}: give its folder with --data-dir")
        images = before or table.parent
        names = os.path.relpath(table, images), table.name
        places = [*(Path(data_dir or images, name) for name in names), folder / table.name]
        if (here := next(filter(Path.is_file, places), None)) is None:
            raise RecastError(f"no such file: {table}, the labels of the run {folder}: copy it to {places[-1]}")
        recipe = recipe.replace(data=data.replace(labels_file=str(here)))
    if data_dir is not None:
        recipe = recipe.replace(data=recipe.data.replace(data_dir=data_dir))
    if checkpoint and not Path(checkpoint).exists():
        if not (beside := folder / Path(checkpoint).name).is_file():
            raise RecastError(f"no such checkpoint: {checkpoint}, the parent of the run {folder}: copy it to {beside}")
        recipe = recipe.replace(model=recipe.model.replace(checkpoint=str(beside)))
    return recipe


def functions_of(recipe: Recipe) -> tuple[str | None, str | None]:
    """Return the names of model and teacher, which may be functions of the user."""
    return recipe.model.name, getattr(recipe.teacher, "teacher_model", None)


def has_new_parent(recipe: Recipe, folder: Path) -> bool:
    """Return True if the parent of the run in `folder` has a new classifier or random weights."""
    checkpoint = recipe.model.checkpoint
    if checkpoint is None:
        return not recipe.model.pretrained
    return (folder / checkpoint).resolve() == (folder / PARENT_WEIGHTS).resolve()


def is_kept_parent(checkpoint: str | None) -> bool:
    """Return True for a run's file of a parent that has a new classifier or random weights: no others are kept."""
    path = Path(checkpoint or "")
    return path.name == PARENT_WEIGHTS and (path.parent / "recipe.yaml").is_file()


def why_untaught(recipe: Recipe, folder: Path, classes: int, rows: Iterable[Row]) -> str:
    """Return why the parent of a run before fine-tuning is no baseline; empty if it is one.

    It is none if its classifier is new, or if its top-1 in `rows` is not shown to be above a guess among `classes`.
    """
    if has_new_parent(recipe, folder):
        return "its classifier was new"
    for row in rows:
        if (row.model, row.suite, row.metric) == ("parent", "clean", "top1") and classes > 1:
            guess = 100 / classes
            if (row.value if row.low is None else row.low) <= guess:
                return f"its top-1, {row.value:.1f}\u00a0%, is not shown to be above a guess, {guess:.1f}\u00a0%"
    return ""
