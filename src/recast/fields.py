"""Types of a config's fields: their ranges, their descriptions, and the conversion of plain data.

A range is part of the type, `lr: NotNegative = 1e-4`. The same types read a recipe file and the command line.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from recast.errors import RecastError, shown, suggest

T = TypeVar("T")
P = ParamSpec("P")


class Range(NamedTuple):
    """Range of allowed numbers, in words and as a test. NaN, for which every comparison is false, lies in none."""

    text: str
    holds: Callable[[Any], bool]
    most: float = 10**9
    """Upper bound of the magnitude; catches typos that would exhaust memory."""


def _from_one(most: int) -> Range:
    return Range("1 or more", lambda x: x >= 1, most)


Count = Annotated[int, _from_one(10**9)]
CountOrZero = Annotated[int, Range("0 or more", lambda x: x >= 0)]
Workers = Annotated[int, Range("0 or more", lambda x: x >= 0, 256)]
Threads = Annotated[int, _from_one(2**10)]
Port = Annotated[int, Range("0 or more", lambda x: x >= 0, 2**16 - 1)]
Pixels = Annotated[int, _from_one(2**14)]
"""A side of an image."""
Classes = Annotated[int, _from_one(10**5)]
Width = Annotated[int, _from_one(2**12)]
"""Of a head, or heads beside one another."""
Whole = Annotated[int, Range("a whole number", lambda x: True, 2**63 - 1)]
Seed = Whole
Finite = Annotated[float, Range("a finite number", math.isfinite)]
NotNegative = Annotated[float, Range("0 or a positive number", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, Range("a positive number", lambda x: 1e-30 <= x < math.inf)]
Ratio = Annotated[float, Range("a positive number", lambda x: 1e-3 <= x < math.inf, 64)]
Probability = Annotated[float, Range("between 0 and 1", lambda x: 0 <= x <= 1)]
PixelMean = Annotated[float, Range("between 0 and 1 (divide what is of 0 to 255 by 255)", lambda x: 0 <= x <= 1)]
BelowOne = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
CropShare = Annotated[float, Range("at least 0.05 and at most 1", lambda x: 0.05 <= x <= 1)]
ProperShare = Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1)]


_FIELD_TYPES: dict[Any, Mapping[str, Any]] = {}
"""Cache of `field_types`: configs are made often."""


def field_types(kind: Any) -> Mapping[str, Any]:
    """Name → type of the fields of a dataclass, with their ranges."""
    if kind not in _FIELD_TYPES:
        hints = get_type_hints(kind, include_extras=True)
        _FIELD_TYPES[kind] = {field.name: hints[field.name] for field in fields(kind)}
    return _FIELD_TYPES[kind]


class Checked:
    """A dataclass whose fields are checked as it is made. `prefix` stands before their names in errors."""

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls._prefix = prefix

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Checked) -> None:
    """Raise RecastError that names the first field whose number or word its type does not allow."""
    for name, hint in field_types(type(config)).items():
        check_value(hint, getattr(config, name), config._prefix + name)


def typed(*names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to check these arguments against their type hints before it runs."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.cache
        def hints() -> Mapping[str, Any]:  # at the first call: modules name one another
            return get_type_hints(function, include_extras=True)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return function(*args, **kwargs)  # Python's own words name the function
            for name in names:
                if name in given:
                    check_value(hints()[name], given[name], name)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_value(hint: Any, value: Any, name: str) -> None:
    """Raise RecastError for a value of another type, a number out of its range, or a word that is no choice."""
    several = isinstance(value, list | tuple)
    items = value if several else () if value is None else (value,)
    for kind in (part for part in leaves(hint) if get_origin(part) is Literal):
        for item in items:
            if isinstance(item, str) and item not in get_args(kind):
                raise mismatch(name, f"one of {', '.join(get_args(kind))}", item, get_args(kind))
    if not _fits(hint, value):
        raise mismatch(name, describe(hint), value, words_of(hint))
    for kind in (part for part in leaves(hint) if get_origin(part) is Annotated):
        allowed: Range = kind.__metadata__[0]
        for item in (item for item in items if not isinstance(item, str)):
            if allowed.most < abs(item) < math.inf:
                raise RecastError(f"{name} must be at most {allowed.most:,}, got {shown(item)}")
            if not allowed.holds(item):
                raise RecastError(f"{name} must {'each ' * several}be {allowed.text}, got {_plain(value)}")


def _fits(hint: Any, value: Any) -> bool:
    """Return True if a value has the type of a field.

    A list may stand for a tuple, a whole number for a fraction, a path for text.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(args[0], value)
    if origin in (types.UnionType, Union):
        return any(_fits(arg, value) for arg in args)
    if origin in (list, tuple):
        fits = isinstance(value, list | tuple) and fixed_length(hint) in (None, len(value))
        return fits and all(_fits(args[0], item) for item in value)
    if origin in (dict, Mapping):
        fits = isinstance(value, Mapping)
        return fits and all(_fits(args[0], key) and _fits(args[1], item) for key, item in value.items())
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | os.PathLike)
    return hint is Any or (value in args if origin is Literal else isinstance(value, origin or hint))


def _plain(value: object) -> str:
    """Return a value without the quotes of a text."""
    return value if isinstance(value, str) and len(value) <= 100 else shown(value)


def read_fields(kind: type[T], data: object, source: str, *, strict: bool = True) -> T:
    """Make a dataclass, and the dataclasses in it, from plain data; missing fields have their defaults.

    Raises RecastError, naming `source` and the key, for a value of the wrong type, for what is missing and has no
    default, and, where it is strict, for an unknown key.
    """
    try:
        return _read(kind, data, "", strict)
    except RecastError as error:
        raise RecastError(f"{source}: {error}") from None


def _read(kind: type[T], data: object, prefix: str, strict: bool) -> T:
    if not isinstance(data, Mapping):
        raise mismatch(prefix.rstrip(".") or "it", "a mapping", data)
    hints = field_types(kind)
    for key in data if strict else ():
        if key not in hints:
            raise RecastError(f"unknown key {prefix}{_plain(key)}.{suggest(str(key)[:100], hints)}")
    needed = [field for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [prefix + field.name for field in needed if field.name not in data]:
        raise RecastError(f"{', '.join(missing)} is missing")
    values = {key: value for key, value in data.items() if key in hints}
    return kind(**{key: read_value(hints[key], value, prefix + key, strict=strict) for key, value in values.items()})


def read_value(hint: Any, value: Any, name: str, given: object = None, strict: bool = True) -> Any:
    """Convert `value`, from YAML, to the type `hint`. The RecastError says what `name` must be, and what it got."""
    try:
        return _convert(hint, value, name, strict)
    except RecastError:  # names a field inside the value
        raise
    except (OverflowError, TypeError, ValueError):
        raise mismatch(name, describe(hint), value if given is None else given, words_of(hint)) from None


def mismatch(name: str, wanted: str, value: object, choices: tuple[str, ...] = ()) -> RecastError:
    """Return the error for a value of another type, with the nearest choices."""
    nearest = suggest(value, choices) if isinstance(value, str) else ""
    return RecastError(f"{name} must be {wanted}, got {shown(value)}{'.' * bool(nearest)}{nearest}")


def _convert(hint: Any, value: Any, name: str, strict: bool) -> Any:
    """Raises ValueError or TypeError without a text for a value of another type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _read(hint, {} if value is None else value, f"{name}.", strict)  # type: ignore[arg-type]
    if origin is Annotated:
        return _convert(args[0], value, name, strict)
    if origin in (types.UnionType, Union):
        word = value[0] if isinstance(value, list) and len(value) == 1 else value  # of a list's option
        inner, *others = (arg for arg in args if arg is not types.NoneType)
        if others and isinstance(word, str) and word in words_of(hint):
            return word
        return None if value is None else _convert(inner, value, name, strict)
    if origin in (list, tuple):
        items = [value] if isinstance(value, str) and origin is list else value
        if not isinstance(items, list | tuple) or fixed_length(hint) not in (None, len(items)):
            raise TypeError
        return origin(_convert(args[0], item, f"{name}[{i}]", strict) for i, item in enumerate(items))
    if origin is dict and isinstance(value, Mapping):
        return {key: _convert(args[1], item, f"{name}.{key}", strict) for key, item in value.items()}
    if origin is Literal:
        value = "off" if value is False and "off" in args else value  # YAML 1.1 reads a bare `off` as false
        fits = value in args
    elif hint is float:
        value = float(value if not isinstance(value, bool) else "")  # YAML 1.1 reads 1e-4, without a point, as text
        fits = True
    else:
        fits = isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool))
    if not fits:
        raise TypeError
    return value


def describe(hint: Any) -> str:
    """Describe a value of this type for a message: "a whole number", "one of linear, sigmoid"."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
    origin, args = get_origin(hint), get_args(hint)
    if hint in names:
        return names[hint]
    if getattr(hint, "__name__", "") == "Module":
        return "a network (nn.Module, as timm.create_model gives)"
    if origin in (dict, Mapping):
        return "a mapping"
    if origin is Iterable:
        return "an iterable"
    if origin is None and isinstance(hint, type):
        return f"a {hint.__name__}"
    if origin is Annotated:
        return describe(args[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin in (types.UnionType, Union):
        parts = list(map(describe, args))
        return (", or " if parts[0].startswith("a list") else " or ").join(parts)
    item, length = describe(args[0]), fixed_length(hint)
    if item.endswith("number"):
        return f"a list of {length or ''} {item.removeprefix('a ')}s".replace("  ", " ")
    return f"a list, each item {item}"


def fixed_length(hint: Any) -> int | None:
    """Items of a tuple such as `tuple[float, float]`; None for lists and tuples of any length."""
    args = get_args(hint)
    return len(args) if get_origin(hint) is tuple and Ellipsis not in args else None


def words_of(hint: Any) -> tuple[str, ...]:
    """The choices of a type, however deep in it."""
    return tuple(word for part in leaves(hint) if get_origin(part) is Literal for word in get_args(part))


def leaves(hint: Any) -> list[Any]:
    """Return the parts of a type: `list[Literal["a"]] | None` has the Literal and None."""
    if get_origin(hint) not in (types.UnionType, Union, list, tuple):
        return [hint]
    return [leaf for arg in dict.fromkeys(get_args(hint)) for leaf in leaves(arg)]
