"""Read recipes from YAML files, which may leave out fields, and write them with every field. Imports no torch.

Paths in a recipe file are relative to the file, so that a run folder can be moved together with what lies in it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from recast.config import File, Keys, read
from recast.errors import RecastError, shown
from recast.files import write_text
from recast.lab.config import Recipe
from recast.lab.config.fields import fields_of, merge
from recast.lab.config.inputs import is_of_lab
from recast.lab.config.recipe import EXTENSIONS, extend, task_name_of_data
from recast.lab.config.types import MayChange
from recast.reading import decode, read_bytes

LARGEST = 2**19
"""Bytes of a recipe file. PyYAML reads some 100 kB a second."""
DEEPEST = 32
"""Levels of lists and mappings in one another in a recipe file."""
SEAL = "# sha256 of the lines above: "
"""Start of the last line of a run's recipe, the checksum of the other lines. Delete it after editing the file."""


def read_recipe(content: Callable[[], Any], source: str = "", name: Callable[[Keys], str] = ".".join) -> Recipe:
    """Return the recipe of plain data; with the `EXTENSIONS` if it, or its data set, requires them.

    Args and errors are those of `recast.config.read`; `content` is called again if the extensions are loaded.
    """
    if EXTENSIONS:
        with suppress(RecastError):
            recipe = read(Recipe, content(), source, name)
            if is_of_lab(recipe.data.name):
                return recipe
        extend()
    return read(Recipe, content(), source, name)


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
        >>> from recast.lab.config.text import override
        >>> override(Recipe(recast={"gate": "sigmoid", "alpha": 2.0}), {"recast": {"gate": "bias"}}).recast.gate
        'bias'
    """

    def content() -> dict[str, Any]:
        task, data_set = changes.get("task", {}), changes.get("data", {}).get("name", base.data.name)
        if (kind := task_name_of_data(data_set)) and isinstance(task, Mapping) and "kind" not in task:
            return merge(Recipe, base.model_dump(), {**changes, "task": {"kind": kind, **task}})
        return merge(Recipe, base.model_dump(), changes)

    return read_recipe(content, name=name)


def load_recipe(path: str | Path, *, complete: bool = False) -> Recipe:
    """Read a recipe file. Relative paths in it are searched beside it, then in the current folder.

    Args:
        complete: require every field and an unchanged file, as for the recipe of a run. Otherwise an edit is a warning.

    Raises:
        RecastError: the file is missing, incomplete, edited or no YAML mapping, or a key or value is wrong.
    """
    path = Path(path)
    text, data = _read(path)
    given = flat(data)

    def content() -> dict[str, Any]:
        for keys in paths():
            value = given.get(".".join(keys))
            if isinstance(value, str) and (beside := path.parent / value).exists():
                _section(data, keys)[keys[-1]] = str(beside.resolve())
        return data

    body, seal, digest = text.rpartition(SEAL)
    is_untouched = digest.strip() == _digest(body)
    recipe = read_recipe(content, f"{path} comes from another version of recast" if is_untouched else str(path))
    missing = [key for key, value in flat(recipe.plain()).items() if value is not None and key not in given]
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
    data = recipe.plain()
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


def changes(before: Recipe, now: Recipe, ignore: Iterable[str]) -> list[str]:
    """Return the fields in which two recipes differ, as "optim.lr (0.1, now 0.2)", without those named in `ignore`."""
    a, b = (flat(recipe.plain()) for recipe in (before, now))
    names = [name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name) and name not in ignore]
    return [f"{name} ({a.get(name)}, now {b.get(name)})" for name in names]


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return every field of a recipe's plain data by its dotted name."""
    fields: dict[str, Any] = {}
    for key, value in nested.items():
        fields |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return fields
