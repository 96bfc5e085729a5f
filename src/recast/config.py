"""Building blocks of configs: ranges as types, unions by kind, and one line for each mistake. Imports no torch.

A config is a `Config`, a pydantic model: `OptimConfig(lr=1e-3)`. Fields that only some kinds have are fields of those
kinds: a `OneOf` such as `PoolConfig` is made by its kind, `PoolConfig("per_class", start="paper")`, and is none, single
or per_class. So a combination that means nothing cannot be written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from recast.errors import RecastError, shown

T = TypeVar("T")

Keys = tuple[str, ...]
"""Keys from a config down to a field."""

Count = Annotated[int, Ge(1), Le(10**9)]
CountOrZero = Annotated[int, Ge(0), Le(10**9)]
Workers = Annotated[int, Ge(0), Le(256)]
Threads = Annotated[int, Ge(1), Le(2**10)]
Port = Annotated[int, Ge(0), Lt(2**16)]
Pixels = Annotated[int, Ge(1), Le(2**14)]
"""A side of an image."""
Classes = Annotated[int, Ge(1), Le(10**5)]
Width = Annotated[int, Ge(1), Le(2**12)]
"""Of a head, or heads beside one another."""
Seed = Annotated[int, Ge(-(2**63)), Lt(2**63)]
NotNegative = Annotated[float, Ge(0), Le(1e9)]
Positive = Annotated[float, Ge(1e-30), Le(1e9)]
Ratio = Annotated[float, Ge(1e-3), Le(64)]
Finite = Annotated[float, Ge(-1e9), Le(1e9)]
Probability = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Gt(0), Le(1)]
ProperShare = Annotated[float, Gt(0), Lt(1)]
CropShare = Annotated[float, Ge(0.05), Le(1)]


@dataclass(frozen=True)
class File:
    """Marks a text that names a file or folder; in a recipe file it is relative to that file."""


@dataclass(frozen=True)
class Rare:
    """Marks an option that only `--help-all` shows."""


FilePath = Annotated[str, File()]


@dataclass_transform(frozen_default=True)
class Config(BaseModel):
    """Base of all configs: immutable; unknown names, NaN and infinity are mistakes.

    Raises:
        RecastError: for a value that a field does not allow, and for an unknown name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    def __init__(self, /, *values: Any, **named: Any) -> None:
        try:
            super().__init__(**dict(zip(type(self).model_fields, values, strict=False)) | named)  # as in a dataclass
        except ValidationError as error:
            raise RecastError(explain(error, type(self))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested configs are validated with their parent

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with other values. Another kind drops the fields that it does not have."""
        return type(self)(**dict(self) | changes)


def is_union(model: Any) -> bool:
    """Return True for the base of the kinds, False for each of them."""
    return isinstance(model, type) and "default" in vars(model) and issubclass(model, OneOf)


def kinds_of(member: type[OneOf]) -> tuple[str, ...]:
    """Return the kinds that a member of a union stands for."""
    return get_args(member.model_fields[member.by].annotation)


def union_of(member: Any) -> type[OneOf] | None:
    """Return the union that a class is a kind of, or the class itself if it is one; None for others."""
    return next((base for base in member.__mro__ if is_union(base)), None) if isinstance(member, type) else None


class OneOf(Config):
    """Base of a config that is one of several kinds, each a subclass that declares its kind in the field `by`.

    Calling the base makes the right one; in a recipe file a text or a missing kind will do.
    """

    by: ClassVar[str] = "kind"
    default: ClassVar[str]
    members: ClassVar[dict[str, type[Self]]]  # type: ignore[misc]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        if is_union(cls):
            kind = values[0] if values else named.get(cls.by, cls.default)
            cls = cls.members.get(kind, cls) if isinstance(kind, str) else cls
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if is_union(cls):
            cls.members = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        base = union_of(cls)
        if base and cls is not base and cls.by in cls.__annotations__:
            base.members |= dict.fromkeys(kinds_of(cls), cls)
            base.model_rebuild(force=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if not is_union(cls) or not cls.members:
            return handler(source)
        choices = {kind: handler.generate_schema(member) for kind, member in cls.members.items()}
        tagged = core_schema.tagged_union_schema(choices, discriminator=cls._kind_of)
        return core_schema.no_info_before_validator_function(cls._with_kind, tagged)

    @classmethod
    def _kind_of(cls, value: Any) -> Any:
        return value.get(cls.by) if isinstance(value, Mapping) else getattr(value, cls.by, None)

    @classmethod
    def _with_kind(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {cls.by: cls.default, **value}
        return {cls.by: value} if isinstance(value, str) else value

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with other values. Another kind drops the fields that it does not have."""
        base = union_of(type(self)) or type(self)
        member = base.members.get(changes.get(self.by, ""), type(self))
        return base(**{name: value for name, value in dict(self).items() if name in member.model_fields} | changes)


@dataclass(frozen=True)
class Sections:
    """Marks a mapping of names to configs that other packages add to, each validated by the class in the table."""

    members: Mapping[str, type[Config]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        fields = {
            name: core_schema.typed_dict_field(handler.generate_schema(member), required=False)
            for name, member in self.members.items()
        }
        return core_schema.typed_dict_schema(fields, extra_behavior="forbid")


def clash(message: str) -> PydanticCustomError:
    """Return the error about fields that do not go together. Names in `backticks` become options on the command line."""
    return PydanticCustomError("clash", message.replace("{", "{{").replace("}", "}}"))  # type: ignore[arg-type]


def problem(message: str) -> PydanticCustomError:
    """Return the error about one value, "must be ...", for a validator to raise; the field is named before it."""
    return PydanticCustomError("problem", message.replace("{", "{{").replace("}", "}}"))  # type: ignore[arg-type]


def parts_of(model: Any, key: str) -> Any:
    """Return the config of a field of a config: a class, a union, or `Sections`; None for plain values."""
    if isinstance(model, Sections):
        return model.members.get(key)
    field = getattr(model, "model_fields", {}).get(key)
    for hint in (*field.metadata, field.annotation, *get_args(field.annotation)) if field else ():
        if isinstance(hint, Sections) or (isinstance(hint, type) and issubclass(hint, Config)):
            return hint
    return None


def merge(model: Any, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested data of `model` with `changes`. Where a union changes its kind, fields that it lacks are dropped."""
    base = dict(base)
    if is_union(model):
        kind = changes.get(model.by, base.get(model.by, model.default))
        known = model.members[kind].model_fields if kind in model.members else base
        base, model = {key: value for key, value in base.items() if key in known or key == model.by}, model.members.get(kind)
    for key, value in changes.items():
        part, old = parts_of(model, key), base.get(key)
        if part is not None:
            value, old = ({part.by: item} if is_union(part) and isinstance(item, str) else item for item in (value, old))
        base[key] = merge(part, old or {}, value) if part is not None and isinstance(value, Mapping) else value
    return base


def read(model: type[T], data: Any, source: str = "", name: Callable[[Keys], str] = ".".join) -> T:
    """Validate plain data as a config or dataclass.

    Args:
        model: a `Config`, or a dataclass.
        data: nested mappings and lists, as a YAML or JSON file holds them.
        source: name of that file; errors begin with it.
        name: how an error calls a field. Default: its keys with dots between, `optim.lr`.

    Raises:
        RecastError: of one line for the first value that is not allowed.

    Example:
        >>> from recast.config import read
        >>> read(recast.PoolConfig, {"kind": "single"}, "mine.yaml").start
        'average'
    """
    try:
        result: T = adapter(model).validate_python(data)
        return result
    except ValidationError as error:
        raise RecastError((f"{source}: " if source else "") + explain(error, model, name)) from None


@cache
def adapter(model: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a type; it is slow to make."""
    return TypeAdapter(model)


def check(hint: Any, value: Any, name: str) -> Any:
    """Return a value converted to a type, or raise RecastError that says what `name` must be."""
    try:
        return adapter(hint).validate_python(value)
    except ValidationError as error:
        raise RecastError(explain(error, hint, lambda path: name)) from None


SIGNS = {
    "Input should ": "", "Value error, ": "", "greater than or equal to": ">=", "less than or equal to": "<=",
    "greater than": ">", "less than": "<", ", unable to parse string as a number": "",
    ", unable to parse string as an integer": "", ", unable to interpret input": "", "a valid integer": "a whole number",
    "a valid ": "a ", "a finite number": "finite", "a dictionary or instance of": "a mapping for",
}  # fmt: skip
"""Pydantic's words, and ours."""


def explain(error: ValidationError, model: Any, name: Callable[[Keys], str] = ".".join) -> str:
    """Return the first mistake in one line. `name` gives the words for a field."""
    errors = error.errors(include_url=False)
    first = errors[0]
    path, holder, part = _locate(model, first["loc"])
    kind, got, context = first["type"], first["input"], first.get("ctx", {})
    if kind == "clash":
        return re.sub(r"`([\w.]+)`", lambda key: name((*path, *key[1].split("."))), first["msg"])
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return _unknown(model, path, holder, name)
    if kind in ("missing", "missing_argument"):
        base = union_of(holder)
        why = f"; {name((*path[:-1], base.by))} {' or '.join(kinds_of(holder))} requires it" if base else ""
        return f"{name(path)} is missing{why}"
    if kind == "union_tag_not_found":
        return f"{name(path)} must be a mapping or one of {', '.join(part.members)}, got {shown(got)}"
    if kind == "union_tag_invalid":
        path, got = (*path, part.by), context["tag"]
    if kind in ("union_tag_invalid", "literal_error") and len(errors) == 1:
        words = re.findall(r"'([^']*)'", context.get("expected_tags") or context["expected"])
        near = difflib.get_close_matches(str(got), words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name(path)} must be one of {', '.join(words)}, got {shown(got)}{hint}"
    message = " or ".join(dict.fromkeys(e["msg"] for e in errors if _locate(model, e["loc"])[0] == path))
    for long, short in SIGNS.items():
        message = message.replace(long, short)
    message = "must be " + message.removeprefix("must ").removeprefix("be ").replace(" or be ", " or ")
    return f"{name(path)} {message}, got {shown(got)}".strip()


def _unknown(model: Any, path: Keys, holder: Any, name: Callable[[Keys], str]) -> str:
    """Return the error for a name that is no field: of another kind, of another place, misspelt."""
    *outer, key = path
    base = union_of(holder)
    if base and (kinds := [kind for kind, member in base.members.items() if key in member.model_fields]):
        return f"{name(path)} requires {name((*outer, base.by))} {' or '.join(kinds)}, got {' or '.join(kinds_of(holder))}"
    beside = holder.members if isinstance(holder, Sections) else getattr(holder, "model_fields", {})
    elsewhere = [field.path for field in fields_of(model) if field.path[-1] == key]
    near = elsewhere or [(*outer, word) for word in difflib.get_close_matches(key, beside, n=3, cutoff=0.5)]
    if not near:
        return f"unknown name {name(path)}; expected {', '.join(beside) or 'none'}"
    return f"unknown name {name(path)}; did you mean {', '.join(map(name, dict.fromkeys(near)))}?"


def _locate(model: Any, location: tuple[int | str, ...]) -> tuple[Keys, Any, Any]:
    """Return the path of an error's field, without pydantic's tags of unions; the class it is in; the config it is."""
    path: Keys = ()
    holder, part, items = model, model, list(location)
    while items and isinstance(part, type | Sections) and (isinstance(part, Sections) or issubclass(part, Config)):
        if is_union(part):
            holder = part = part.members[items.pop(0)]  # type: ignore[index]
        else:
            key = str(items.pop(0))
            path, holder, part = (*path, key), part, parts_of(part, key)
    is_plain = isinstance(model, type) and issubclass(model, Config) or isinstance(model, Sections)
    return (path, holder, part) if is_plain else (tuple(map(str, location)), holder, part)


class Field(NamedTuple):
    """A field of a config and where it is."""

    path: Keys
    info: FieldInfo
    section: type[Config]
    """The config, of those with a docstring of their own, that it is in: a heading for its option."""
    union: Keys
    """The field with the kind, if only some kinds have it."""
    kinds: tuple[str, ...]
    """Those kinds."""
    choices: tuple[str, ...]
    """Kinds of a union, where the field chooses it."""


def fields_of(model: Any, path: Keys = ()) -> list[Field]:
    """Return every field of a config and of the configs in it, in their order. Fields of several kinds come once."""
    fields: dict[Keys, Field] = {}
    if isinstance(model, Sections):
        return [field for key, member in model.members.items() for field in fields_of(member, (*path, key))]
    if is_union(model):
        chooser = (*path, model.by)
        first = next(iter(model.members.values()))
        fields[chooser] = Field(chooser, first.model_fields[model.by], model, (), (), tuple(model.members))
        for member in dict.fromkeys(model.members.values()):
            for field in fields_of(member, path):
                shared = field.path[len(path)] in model.model_fields
                if (before := fields.get(field.path)) is not None:
                    fields[field.path] = before._replace(kinds=before.kinds and (*before.kinds, *kinds_of(member)))
                else:
                    fields[field.path] = field if shared else field._replace(union=chooser, kinds=kinds_of(member))
        every = set(model.members)
        return [f._replace(union=(), kinds=()) if set(f.kinds) == every else f for f in fields.values()]
    nested: list[Field] = []
    plain: list[Field] = []
    for key, info in model.model_fields.items():
        part = parts_of(model, key)
        if part is None:
            plain.append(Field((*path, key), info, model, (), (), ()))
        else:
            nested += fields_of(part, (*path, key))
    return plain + nested
