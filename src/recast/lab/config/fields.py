"""The fields of a config with the configs in it, and the merging of changes into its plain data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from pydantic.fields import FieldInfo

from recast.config import Keys, OneOf, PythonOnly, Sections, is_union, kinds_of, parts_of


class Field(NamedTuple):
    """A field of a config and where it is."""

    path: Keys
    info: FieldInfo
    section: Any
    """The config right below the root that it is in, for a heading: `OptimConfig`, or the root itself."""
    union: Keys
    """The field with the kind, if only some kinds have it."""
    kinds: tuple[str, ...]
    """Those kinds."""
    choices: tuple[str, ...]
    """Kinds of a union, where the field chooses it."""

    @property
    def marks(self) -> set[type]:
        """Classes of what `Annotated` says of it: `File`, `Rare`, `MayChange`."""
        inner = (mark for hint in get_args(self.info.annotation) for mark in getattr(hint, "__metadata__", ()))
        return {type(mark) for mark in (*self.info.metadata, *inner)}


def fields_of(model: Any, path: Keys = (), section: Any = None) -> list[Field]:
    """Return the fields of a config and of the configs in it, in their order. Fields of several kinds come once."""
    if isinstance(model, Sections):
        return [field for key, member in model.members.items() for field in fields_of(member, (*path, key), member)]
    section = section or model
    if is_union(model):
        return list(_fields_of_union(model, path, section).values())
    plain: list[Field] = []
    nested: list[Field] = []
    for key, info in model.model_fields.items():
        part = parts_of(model, key)
        if PythonOnly() in info.metadata:
            continue
        if part is None:
            plain.append(Field((*path, key), info, section, (), (), ()))
        else:
            nested += fields_of(part, (*path, key), section if path else part)
    return plain + nested


def _fields_of_union(model: type[OneOf], path: Keys, section: Any) -> dict[Keys, Field]:
    chooser = (*path, model.by)
    fields = {chooser: Field(chooser, model.model_fields[model.by], section, (), (), tuple(model.members))}
    for member in dict.fromkeys(model.members.values()):
        for field in fields_of(member, path, section):
            if (before := fields.get(field.path)) is not None:
                more = kinds_of(member) if before.union == chooser else ()
                fields[field.path] = before._replace(kinds=(*before.kinds, *more))
            elif field.path[len(path)] in model.model_fields or field.union:
                fields[field.path] = field
            else:
                fields[field.path] = field._replace(union=chooser, kinds=kinds_of(member))
    return fields


def merge(model: Any, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data of `model` with `changes`.

    Another kind of a union drops the fields that it does not have, and the defaults of the kind before.
    """
    base = dict(base)
    if is_union(model):
        before = base.get(model.by, model.default)
        kind = changes.get(model.by, before)
        if kind != before and {kind, before} <= model.members.keys():
            new, old = (model.members[name].model_fields for name in (kind, before))
            base = {key: value for key, value in base.items() if key in new and value != old[key].default}
        model = model.members.get(kind)
    for key, value in changes.items():
        part, old = parts_of(model, key), base.get(key)
        if is_union(part):
            value, old = ({part.by: item} if isinstance(item, str) else item for item in (value, old))
        base[key] = merge(part, old or {}, value) if part is not None and isinstance(value, Mapping) else value
    return base
