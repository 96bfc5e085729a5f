"""Building blocks of configs: ranges as types, and unions by kind. Imports no torch.

A config is a `Config`, a pydantic model: `OptimConfig(lr=1e-3)`. Fields that only some kinds have are fields of those
kinds: a `OneOf` such as `PoolConfig` is made by its kind, `PoolConfig("per_class", start="paper")`, and is none, single
or per_class. So a meaningless combination cannot be written.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import (
    Annotated,
    Any,
    ClassVar,
    ParamSpec,
    Self,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    InstanceOf,
    TypeAdapter,
    ValidationError,
    dataclasses,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from recast.errors import RecastError

T = TypeVar("T")
P = ParamSpec("P")

Keys = tuple[str, ...]
"""Keys from a config down to a field."""

NOT_A_SWITCH = BeforeValidator(lambda value: str(value) if isinstance(value, bool) else value)
"""Rejects true and false as numbers."""
Int = Annotated[int, NOT_A_SWITCH]
Float = Annotated[float, NOT_A_SWITCH]
Count = Annotated[Int, Ge(1), Le(10**9)]
CountOrZero = Annotated[Int, Ge(0), Le(10**9)]
Pixels = Annotated[Int, Ge(1), Le(2**14)]
"""A side of an image."""
Classes = Annotated[Int, Ge(1), Le(10**5)]
Width = Annotated[Int, Ge(1), Le(2**12)]
"""Width of a head, or a number of heads."""
Whole = Annotated[Int, Ge(-(2**63)), Le(2**63 - 1)]
Seed = Whole
NotNegative = Annotated[Float, Ge(0), Le(1e9)]
Positive = Annotated[Float, Gt(0), Le(1e9)]
Ratio = Annotated[Float, Ge(1e-3), Le(64)]
Finite = Annotated[Float, Ge(-1e9), Le(1e9)]


@dataclass(frozen=True)
class File:
    """Marks a text that names a file or folder; in a recipe file it is relative to that file."""


@dataclass(frozen=True)
class Rare:
    """Marks an option that only the full help of a command shows."""


@dataclass(frozen=True)
class PythonOnly:
    """Marks a field that no command offers; Python, plans and recipe files may set it."""


FilePath = Annotated[
    str, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path), File()
]


@dataclass_transform()
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
            raise as_recast_error(error, type(self)) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested configs are validated with their parent

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with other values. Another kind drops the fields that it does not have."""
        return type(self)(**dict(self) | changes)


EXTENDED: list[type[Config]] = []
"""Configs that are rebuilt when a part of them gets another kind or section."""


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
    members: ClassVar[dict[str, Any]]

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
            for model in (base, *EXTENDED):
                model.model_rebuild(force=True)

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
        values = {name: value for name, value in dict(self).items() if name in member.model_fields}
        return base(**values | changes)  # type: ignore[return-value]


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
    """Return the error about fields that do not go together; an error calls names in `backticks` as the user does."""
    return PydanticCustomError("clash", message.replace("{", "{{").replace("}", "}}"))


def problem(message: str) -> PydanticCustomError:
    """Return the error about one value, "must be ...", for a validator to raise; the field is named before it."""
    return PydanticCustomError("problem", message.replace("{", "{{").replace("}", "}}"))


def parts_of(model: Any, key: str) -> Any:
    """Return the config of a field of a config: a class, a union, or `Sections`; None for plain values."""
    if isinstance(model, Sections):
        return model.members.get(key)
    field = getattr(model, "model_fields", {}).get(key)
    for hint in (*field.metadata, field.annotation, *get_args(field.annotation)) if field else ():
        if isinstance(hint, Sections) or (isinstance(hint, type) and issubclass(hint, Config)):
            return hint
    return None


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
        if isinstance(model, type) and issubclass(model, BaseModel):  # it may have been rebuilt
            return model.model_validate(data)
        result: T = adapter(model).validate_python(data)  # type: ignore[arg-type]
        return result
    except ValidationError as error:
        raise as_recast_error(error, model, name, f"{source}: " if source else "") from None


def as_recast_error(
    error: ValidationError, model: Any, name: Callable[[Keys], str] = ".".join, start: str = ""
) -> RecastError:
    """Return the error of one line for a value of `model` that pydantic refused."""
    from recast.config_errors import describe_mistake  # which imports this module

    return RecastError(start + describe_mistake(error, model, name))


@cache
def adapter(model: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a type; it is slow to make."""
    return TypeAdapter(model)


def coerce(hint: Any, value: Any, name: str) -> Any:
    """Return a value converted to a type, or raise RecastError that says what `name` must be."""
    try:
        return adapter(hint).validate_python(value)
    except ValidationError as error:
        raise as_recast_error(error, hint, lambda path: name) from None


@dataclass_transform(frozen_default=True)
def checked(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields are converted and checked as it is made. Raises RecastError."""
    made: Any = dataclasses.dataclass(cls, frozen=True, config=ConfigDict(allow_inf_nan=False, extra="forbid"))
    init, names = made.__init__, list(made.__dataclass_fields__)

    def __init__(self: T, *values: Any, **named: Any) -> None:
        try:
            init(self, *values[len(names) :], **dict(zip(names, values, strict=False)) | named)
        except ValidationError as error:
            raise as_recast_error(error, cls) from None

    made.__init__ = __init__
    checked_class: type[T] = made
    return checked_class


def typed(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to check and convert these arguments by their type hints before it runs.

    Unlike `pydantic.validate_call` it makes no copies, starts no iterator and reads no type hint before the first call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @cache
        def hints() -> Mapping[str, Any]:  # at the first call: modules refer to one another
            return {name: _as_instances(hint) for name, hint in get_type_hints(function, include_extras=True).items()}

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python's own words name the function
            for name in [name for name in bound.arguments if name in names]:
                bound.arguments[name] = coerce(hints()[name], bound.arguments[name], name)
            return function(*bound.args, **bound.kwargs)

        return run

    return decorate


def _as_instances(hint: Any) -> Any:
    """Return a type hint whose classes accept only instances, not the data to make them from."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        return Union[tuple(map(_as_instances, get_args(hint)))]  # noqa: UP007
    if origin is Mapping:
        return Mapping[tuple(map(_as_instances, get_args(hint)))]  # type: ignore[misc]
    is_class = origin is None and isinstance(hint, type) and hint.__module__ not in ("builtins", "pathlib")
    if origin in (Iterable, Collection) or is_class:
        return InstanceOf[origin or hint]  # type: ignore[misc]
    return hint
