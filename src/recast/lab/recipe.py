"""Recipes as YAML files: strict to read, complete to write. Imports no torch.

Paths in a recipe file are relative to the file, so that a run folder can be moved together with what lies in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from recast.errors import RecastError
from recast.fields import read_fields
from recast.files import write_text
from recast.lab.config import Recipe
from recast.lab.records import Row
from recast.reading import SETTINGS, decode, parse_yaml, read_bytes

PATHS = (("model", "checkpoint"), ("data", "data_dir"), ("data", "coarse_file"), ("distill", "teacher_checkpoint"))
"""The fields that name a file or a folder."""
HOW_IT_RUNS = (
    "device", "control", "data.workers", "accumulate", "grad_checkpointing", "save_steps", "keep", "keep_every",
    "trackers",
)  # fmt: skip
"""The fields that say how a run is carried out, not what it computes."""
MAY_CHANGE = (*HOW_IT_RUNS, *(f"{section}.{field}" for section, field in PATHS))
"""What may differ when a run goes on: how it runs and where things lie, not what it computes."""
SEAL = "# sha256 of the lines above: "
"""The last line of a run's recipe: what has it was not touched, or it is told. Who means to edit it deletes it."""
PARENT_WEIGHTS = "parent.safetensors"
"""In a run folder: the weights of a parent that nothing else holds, random ones or those under a new classifier."""
COARSE_FILE = "coarse.csv"
"""In a run folder: a copy of the file of coarse classes that it was trained with, whatever becomes of that file."""


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Every field as nested plain data."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))  # tuples become lists


def recipe_from_dict(found: Mapping[str, Any], source: str = "the recipe") -> Recipe:
    """The inverse of `recipe_to_dict`; what is left out has its default.

    Raises RecastError naming the key for an unknown one or a value of the wrong type. `source` names the recipe there.
    """
    return read_fields(Recipe, found, source)


def load_recipe(path: str | Path, *, complete: bool = False) -> Recipe:
    """Read a recipe file; relative paths in it are looked for beside it, then in the current folder.

    `complete`: that of a run, which holds every field, and is as it was written: one that was cut short, edited or
    damaged must not be taken for another run's; in another recipe an edit is told. Raises RecastError for that, for a
    file that is absent or no YAML mapping, an unknown key, or a value of the wrong type.
    """
    path = Path(path)
    try:
        found = parse_yaml(text := decode(read_bytes(path, SETTINGS), path))
    except FileNotFoundError:
        raise RecastError(f"no such recipe: {path}") from None
    except RecastError:
        raise
    except ValueError as error:
        raise RecastError(f"cannot read recipe {path}: {error}") from None
    if not isinstance(found, Mapping):
        raise RecastError(f"recipe {path} must hold a mapping of keys to values, got {type(found).__name__}")
    recipe = recipe_from_dict(found, str(path))
    given = _flat(found)
    # null is the default: what is missing may be younger than the file
    if complete and (missing := [key for key, value in flat(recipe).items() if value is not None and key not in given]):
        raise RecastError(
            f"{path} lacks {', '.join(missing[:3])}{', …' * (len(missing) > 3)}: it was cut short, or is of another "
            "version of recast"
        )
    body, seal, told = text.rpartition(SEAL)
    if seal and told.strip() != _digest(body):
        touched = f"{path} is not as the run wrote it: it was edited or damaged"
        if complete:
            raise RecastError(f"{touched}. Undo that; or, if the change is meant, delete its last line, the checksum")
        warnings.warn(f"{touched}; it is taken as it stands", stacklevel=2)
    for section, field in PATHS:
        value = getattr(getattr(recipe, section), field)
        if value is not None and (beside := path.parent / value).exists():
            setattr(getattr(recipe, section), field, str(beside.resolve()))
    return recipe


def save_recipe(recipe: Recipe, path: str | Path) -> None:
    """Write the complete recipe. Paths become absolute, or relative to the file where they lie below its folder."""
    path = Path(path)
    found = recipe_to_dict(recipe)
    folder = path.parent.resolve()
    for section, field in PATHS:
        if found[section][field] is not None:
            target = Path(found[section][field]).expanduser().resolve()
            inside = target.is_relative_to(folder) and target != folder
            found[section][field] = target.relative_to(folder).as_posix() if inside else str(target)
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True)
    write_text(path, f"{text}{SEAL}{_digest(text)}\n")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def changes(one: Recipe, other: Recipe, ignore: tuple[str, ...] = ()) -> list[str]:
    """The fields in which two recipes differ, "optim.lr (0.1, now 0.2)" each, without those named in `ignore`."""
    a, b = flat(one), flat(other)
    return [f"{key} ({a[key]}, now {b[key]})" for key in a if a[key] != b[key] and key not in ignore]


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every field by its dotted name; all sections are one deep."""
    return _flat(recipe_to_dict(recipe))


def _flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        found |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
    return found


def functions_of(recipe: Recipe) -> tuple[str | None, str | None]:
    """What in a recipe may name a function of the user's: the model and the teacher."""
    return recipe.model.name, recipe.distill.name


def has_new_parent(recipe: Recipe, folder: Path) -> bool:
    """Whether the parent of the run in `folder` had a new classifier, or random weights altogether."""
    checkpoint = recipe.model.checkpoint
    if checkpoint is None:
        return not recipe.model.pretrained
    return (folder / checkpoint).resolve() == (folder / PARENT_WEIGHTS).resolve()


def why_untaught(recipe: Recipe, folder: Path, classes: int, rows: Iterable[Row]) -> str:
    """Why the parent of a run, as it was, is nothing to compare with: it never learnt to tell these classes apart.

    Empty where it may have. Known from the recipe, or from its top-1 in `rows`: not above a guess among `classes`.
    """
    if has_new_parent(recipe, folder):
        return "its classifier was new"
    for row in rows:
        if (row.model, row.suite, row.metric) == ("parent", "clean", "top1") and classes > 1:
            guess = 100 / classes
            if (row.value if row.low is None else row.low) <= guess:
                return f"its top-1, {row.value:.1f}\u00a0%, is not shown to be above a guess, {guess:.1f}\u00a0%"
    return ""
