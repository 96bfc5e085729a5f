"""Recipes as YAML files: strict to read, complete to write. Imports no torch.

Paths in a recipe file are relative to the file, so that a run folder can be moved together with what lies in it.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from recast.errors import RecastError, suggest
from recast.run.config import Recipe
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
    return _read(Recipe, found, source, "")


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
    a, b = _flat(recipe_to_dict(one)), _flat(recipe_to_dict(other))
    return [f"{key} ({a[key]}, now {b[key]})" for key in a if a[key] != b[key] and key not in ignore]


def _flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in found.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _read(kind: type[T], found: Mapping[str, Any], source: str, prefix: str) -> T:
    hints = get_type_hints(kind)
    for key in found:
        if key not in hints:
            raise RecastError(f"{source}: unknown key {prefix}{key}.{suggest(str(key), hints)}")
    values = {key: _convert(hints[key], value, source, prefix + key) for key, value in found.items()}
    try:
        return kind(**values)
    except RecastError as error:
        raise RecastError(f"{source}: {error}") from None


def _convert(hint: Any, value: Any, source: str, key: str) -> Any:
    """`value`, as YAML gives it, as the type that `hint` names."""
    wrong = RecastError(f"{source}: {key} must be {describe_type(hint)}, got {value!r}")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping | None):
            raise wrong
        return _read(hint, value or {}, source, f"{key}.")  # type: ignore[arg-type]
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        try:
            return _convert(inner, value, source, key)
        except RecastError as error:
            raise RecastError(
                str(error).replace(f" must be {describe_type(inner)}", f" must be {describe_type(hint)}")
            ) from None
    if origin is Literal:
        if value is False and "off" in args:  # YAML 1.1 reads a bare `off` as false
            return "off"
        if value not in args:
            raise RecastError(f"{wrong}.{suggest(str(value), args)}")
        return value
    if origin in (list, tuple):
        items = [value] if isinstance(value, str) and origin is list else value
        if not isinstance(items, list | tuple) or (
            origin is tuple and Ellipsis not in args and len(items) != len(args)
        ):
            raise wrong
        return origin(_convert(args[0], item, source, key) for item in items)
    if hint is float and not isinstance(value, bool):
        try:  # YAML 1.1 reads 1e-4, without a point, as text
            return float(value)
        except (TypeError, ValueError):
            raise wrong from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise wrong
    return value


def describe_type(hint: Any) -> str:
    """What a value of this type looks like, for a message: "a whole number", "one of linear, sigmoid"."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if hint in names:
        return names[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (types.UnionType, Union):
        return " or ".join("null" if arg is type(None) else describe_type(arg) for arg in args)
    if origin is tuple and Ellipsis not in args:
        return f"a list of {len(args)} items, each {describe_type(args[0])}"
    return f"a list, each item {describe_type(args[0])}" if origin in (list, tuple) else "a mapping"
