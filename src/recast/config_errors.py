"""One line for a value that pydantic refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

from pydantic import ValidationError

from recast.config import Config, Keys, PythonOnly, Sections, is_union, kinds_of, parts_of, union_of
from recast.errors import shown, suggest

SIGNS = {
    "greater than or equal to": ">=", "less than or equal to": "<=", "greater than": ">", "less than": "<",
    "a valid integer": "a whole number", "a valid boolean": "true or false", "a valid ": "a ", "a tuple": "a list",
    "a finite number": "finite",
    "a dictionary or instance of": "a mapping for",
    "'str' instances are not allowed as a Sequence value": "be a list of names",
    "an instance of Module": "a network (nn.Module)", "Input is not a path for <class 'pathlib.Path'>": "a path",
}  # fmt: skip
"""Pydantic's words, and ours."""
AROUND = re.compile(r"^(\w+ should)|( after validation, not|, unable|, got a number).*$")
"""Words of pydantic's that are left out."""


def describe_mistake(error: ValidationError, model: Any, name: Callable[[Keys], str]) -> str:
    """Return the first mistake in one line. `name` gives the words for a field."""
    errors = error.errors(include_url=False)
    first = errors[0]
    path, holder, part = _locate(model, first["loc"])
    kind, got, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "clash":
        return re.sub(r"`([\w.]+)`", lambda key: name((*path, *key[1].split("."))), first["msg"])
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        unknown = [name(_locate(model, error["loc"])[0]) for error in errors[1:] if error["type"] == kind]
        return _unknown(model, path, holder, name) + (f" Unknown too: {', '.join(unknown)}" if unknown else "")
    if kind == "missing" and isinstance(first["loc"][-1], int):
        count = max(int(e["loc"][-1]) for e in errors if e["loc"][:-1] == first["loc"][:-1]) + 1
        return f"{name(tuple(key for key in path if not key.isdecimal()))} must have {count} values, got {shown(got)}"
    if kind in ("missing", "missing_argument"):
        base = union_of(holder)
        why = f"; {name((*path[:-1], base.by))} {' or '.join(kinds_of(holder))} requires it" if base else ""
        return f"{name(path)} is missing{why}"
    choices = re.findall(r"'([^']*)'", context["expected"]) if kind == "literal_error" and len(errors) == 1 else []
    if kind.startswith("union_tag"):
        path, choices, got = (*path, part.by), [*part.members], context.get("tag", got)
    if choices:
        near = suggest(str(got), choices)
        return f"{name(path)} must be one of {', '.join(choices)}, got {shown(got)}" + f".{near}" * bool(near)
    if kind == "value_error":  # of ours: a whole sentence
        return ": ".join(filter(None, (name(path), str(context["error"]))))
    alike = [e["msg"] for e in errors if e["input"] is got and _locate(model, e["loc"])[0] == path]  # of `A | B`
    message = " or ".join(dict.fromkeys(AROUND.sub("", text).strip() for text in alike)).replace(" or be ", " or ")
    for long, short in SIGNS.items():
        message = message.replace(long, short)
    return f"{name(path)} must {message.removeprefix('must ')}, got {shown(got)}".strip()


def _unknown(model: Any, path: Keys, holder: Any, name: Callable[[Keys], str]) -> str:
    """Return the error for a name that is no field: of another kind, of another place, misspelt."""
    if not _is_config(model):
        return f"unknown name {name(path)}"
    *outer, key = path
    base = union_of(holder)
    if base and (kinds := [kind for kind, member in base.members.items() if key in member.model_fields]):
        got = " or ".join(kinds_of(holder))
        return f"{name(path)} requires {name((*outer, base.by))} {' or '.join(kinds)}, got {got}"
    if isinstance(holder, Sections):
        beside = list(holder.members)
    else:
        beside = [field for member in (base.members.values() if base else (holder,)) for field in member.model_fields]
    elsewhere = [place for place in _places(model) if place[-1] == key]
    near = elsewhere or [(*outer, word) for word in difflib.get_close_matches(key, beside, n=3, cutoff=0.5)]
    if near:
        return f"unknown name {name(path)}; did you mean {', '.join(map(name, dict.fromkeys(near)))}?"
    return f"unknown name {name(path)}; expected {', '.join(dict.fromkeys(beside)) or 'none'}"


def _places(model: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield the keys of every field of a config and of the configs in it."""
    if is_union(model):
        for member in model.members.values():
            yield from _places(member, path)
        return
    sections = isinstance(model, Sections)
    for key, info in (model.members if sections else model.model_fields).items():
        part = info if sections else parts_of(model, key)
        if sections or PythonOnly() not in info.metadata:
            yield from [(*path, key)] if part is None else _places(part, (*path, key))


def _locate(model: Any, location: tuple[int | str, ...]) -> tuple[Keys, Any, Any]:
    """Return the path of an error's field, without pydantic's tags of unions; the class it is in; the config it is."""
    if not _is_config(model):
        return tuple(map(str, location)) if is_dataclass(model) else (), model, model
    path: Keys = ()
    holder: Any = model
    part: Any = model
    items = list(location)
    while items and _is_config(part):
        if is_union(part):
            holder = part = part.members[items.pop(0)]
        else:
            key = str(items.pop(0))
            path, holder, part = (*path, key), part, parts_of(part, key)
    return path, holder, part


def _is_config(model: Any) -> bool:
    return isinstance(model, Sections) or (isinstance(model, type) and issubclass(model, Config))
