"""Recipes as YAML files: strict to read, complete to write. Imports no torch.

Paths in a recipe file are relative to the file, so that a run folder can be moved together with what lies in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml

from recast.errors import RecastError, suggest
from recast.run.config import Recipe
from recast.run.fields import field_types, read_value
from recast.run.files import write_text

T = TypeVar("T")

PATHS = (("model", "checkpoint"), ("data", "data_dir"), ("distill", "teacher_checkpoint"))
"""The fields that name a file or a folder."""
HOW_IT_RUNS = (
    "device", "control", "data.workers", "accumulate", "grad_checkpointing", "save_steps", "keep", "keep_every",
    "trackers",
)  # fmt: skip
"""The fields that say how a run is carried out, not what it computes."""
MAY_CHANGE = (*HOW_IT_RUNS, *(f"{section}.{field}" for section, field in PATHS))
"""What may differ when a run goes on: how it runs and where things lie, not what it computes."""


def recipe_to_dict(recipe: Recipe) -> dict[str, Any]:
    """Every field as nested plain data."""
    return _plain(dataclasses.asdict(recipe))


def recipe_from_dict(found: Mapping[str, Any], source: str = "the recipe") -> Recipe:
    """The inverse of `recipe_to_dict`; what is left out has its default.

    Raises RecastError naming the key for an unknown one or a value of the wrong type. `source` names the recipe there.
    """
    return read_fields(Recipe, found, source)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file; relative paths in it are looked for beside it, then in the current folder.

    Raises RecastError for a file that is absent or no YAML mapping, an unknown key, or a value of the wrong type.
    """
    path = Path(path)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecastError(f"no such recipe: {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecastError(f"cannot read recipe {path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise RecastError(f"recipe {path} must hold a mapping of keys to values, got {type(found).__name__}")
    recipe = recipe_from_dict(found, str(path))
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
    write_text(path, yaml.safe_dump(found, sort_keys=False, allow_unicode=True))


def changes(one: Recipe, other: Recipe, ignore: tuple[str, ...] = ()) -> list[str]:
    """The fields in which two recipes differ, "optim.lr (0.1, now 0.2)" each, without those named in `ignore`."""
    a, b = flat(one), flat(other)
    return [f"{key} ({a[key]}, now {b[key]})" for key in a if a[key] != b[key] and key not in ignore]


def flat(recipe: Recipe) -> dict[str, Any]:
    """Every field by its dotted name; all sections are one deep."""
    found: dict[str, Any] = {}
    for key, value in recipe_to_dict(recipe).items():
        found |= {f"{key}.{name}": item for name, item in value.items()} if isinstance(value, Mapping) else {key: value}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def read_fields(kind: type[T], found: Mapping[str, Any], source: str) -> T:
    """A dataclass, and the dataclasses in it, of plain data; what is left out has its default.

    Raises RecastError, naming `source` and the key, for an unknown key or a value of the wrong type.
    """
    try:
        return _read(kind, found, "")
    except RecastError as error:
        raise RecastError(f"{source}: {error}") from None


def _read(kind: type[T], found: Mapping[str, Any], prefix: str) -> T:
    hints = field_types(kind)
    for key in found:
        if key not in hints:
            raise RecastError(f"unknown key {prefix}{key}.{suggest(str(key), hints)}")
    return kind(**{key: _field(hints[key], value, prefix + key) for key, value in found.items()})


def _field(hint: Any, value: Any, name: str) -> Any:
    inner = next((arg for arg in (hint, *get_args(hint)) if dataclasses.is_dataclass(arg)), None)
    if inner is None:
        return read_value(hint, value, name)
    is_list = get_origin(hint) is tuple
    if not isinstance(value, (list if is_list else Mapping) | None):
        raise RecastError(f"{name} must be a {'list' if is_list else 'mapping'}, got {value!r}")
    if is_list:
        return tuple(_field(inner, item, f"{name}[{i}]") for i, item in enumerate(value or ()))
    is_optional = hint is not inner
    return None if value is None and is_optional else _read(inner, value or {}, f"{name}.")  # type: ignore[arg-type]
