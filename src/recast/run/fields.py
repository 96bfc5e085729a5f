"""The types of a config's fields: what they say of themselves, how plain data becomes them, which numbers they take.

A range is part of the type, `lr: NotNegative = 1e-4`. The same types read a recipe file and the command line.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from recast.errors import RecastError, suggest

T = TypeVar("T")


class Range(NamedTuple):
    """Which numbers are allowed, in words and as a test. NaN, of which every comparison is false, lies in none."""

    text: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Range("1 or more", lambda x: 1 <= x < math.inf)]
CountOrZero = Annotated[int, Range("0 or more", lambda x: 0 <= x < math.inf)]
Finite = Annotated[float, Range("a finite number", math.isfinite)]
NotNegative = Annotated[float, Range("0 or a positive number", lambda x: 0 <= x < math.inf)]
Positive = Annotated[float, Range("a positive number", lambda x: 0 < x < math.inf)]
Probability = Annotated[float, Range("between 0 and 1", lambda x: 0 <= x <= 1)]
PixelMean = Annotated[float, Range("between 0 and 1 (divide what is of 0 to 255 by 255)", lambda x: 0 <= x <= 1)]
BelowOne = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Range("above 0 and at most 1", lambda x: 0 < x <= 1)]
ProperShare = Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1)]


_FIELD_TYPES: dict[Any, Mapping[str, Any]] = {}
"""What `field_types` has found: configs are made often."""


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


def check_value(hint: Any, value: Any, name: str) -> None:
    """Raise RecastError for a number out of its range, a word that is no choice, or a None not provided for."""
    if value is None and hint is not Any and types.NoneType not in get_args(hint):
        raise mismatch(name, describe(hint), value, words_of(hint))
    several = isinstance(value, list | tuple)
    for kind in (part for part in leaves(hint) if get_origin(part) in (Annotated, Literal)):
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        for item in value if several else () if value is None else (value,):
            if choices and item not in choices:
                raise mismatch(name, f"one of {', '.join(choices)}", item, choices)
            if not choices and not (isinstance(item, Real) and kind.__metadata__[0].holds(item)):
                raise RecastError(f"{name} must {'each ' * several}be {kind.__metadata__[0].text}, got {value}")


def read_fields(kind: type[T], found: object, source: str, *, strict: bool = True) -> T:
    """A dataclass, and the dataclasses in it, of plain data; what is left out has its default.

    Raises RecastError, naming `source` and the key, for a value of the wrong type, for what is missing and has no
    default, and, where it is strict, for an unknown key.
    """
    try:
        return _read(kind, found, "", strict)
    except RecastError as error:
        raise RecastError(f"{source}: {error}") from None


def _read(kind: type[T], found: object, prefix: str, strict: bool) -> T:
    if not isinstance(found, Mapping):
        raise mismatch(prefix.rstrip(".") or "it", "a mapping", found)
    hints = field_types(kind)
    for key in found if strict else ():
        if key not in hints:
            raise RecastError(f"unknown key {prefix}{key}.{suggest(str(key), hints)}")
    needed = [one for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [prefix + one.name for one in needed if one.name not in found]:
        raise RecastError(f"{', '.join(missing)} is missing")
    known = {key: value for key, value in found.items() if key in hints}
    return kind(**{key: read_value(hints[key], value, prefix + key, strict=strict) for key, value in known.items()})


def read_value(hint: Any, value: Any, name: str, given: object = None, strict: bool = True) -> Any:
    """`value`, as YAML gives it, as the type `hint`. RecastError: what `name` must be; it got `given`, or `value`."""
    try:
        return _convert(hint, value, name, strict)
    except RecastError:  # names a field inside the value
        raise
    except (TypeError, ValueError):
        raise mismatch(name, describe(hint), value if given is None else given, words_of(hint)) from None


def mismatch(name: str, wanted: str, value: object, choices: tuple[str, ...] = ()) -> RecastError:
    """The sentence for a value that is of another type, with the nearest choices."""
    nearest = suggest(str(value), choices)
    return RecastError(f"{name} must be {wanted}, got {value!r}{'.' * bool(nearest)}{nearest}")


def _convert(hint: Any, value: Any, name: str, strict: bool) -> Any:
    """Raises ValueError or TypeError without a text for a value of another type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint):
        return _read(hint, value or {}, f"{name}.", strict)  # type: ignore[arg-type]
    if origin is Annotated:
        return _convert(args[0], value, name, strict)
    if origin in (types.UnionType, Union):
        (inner,) = (arg for arg in args if arg is not types.NoneType)
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
    """What a value of this type looks like, for a message: "a whole number", "one of linear, sigmoid"."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}
    origin, args = get_origin(hint), get_args(hint)
    if hint in names:
        return names[hint]
    if origin in (dict, Mapping):
        return "a mapping"
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
    """The types that a type is made of: `list[Literal["a"]] | None` is of the Literal and None."""
    if get_origin(hint) not in (types.UnionType, Union, list, tuple):
        return [hint]
    return [leaf for arg in dict.fromkeys(get_args(hint)) for leaf in leaves(arg)]
