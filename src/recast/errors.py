"""The one error class for a user's mistakes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Terminal control characters, bidi overrides and lone surrogates."""


class RecastError(ValueError):
    """A request that cannot be carried out. The message says what is wrong, where, and what to do.

    The command line prints the message as one line and exits with code 2.

    Example:
        >>> try:
        ...     recast.RecastConfig(gate="bias", alpha=2.0)
        ... except recast.RecastError as error:
        ...     print(error)
        alpha requires gate linear or sigmoid, got bias
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, keep="\n\t"))

    is_reported = False
    """True if another process of the same run prints it."""


class SizeError(RecastError):
    """An image, or a map, of a size that a layer does not take."""


LONGEST_VALUE = 100
"""Characters of a value in a message."""


def shown(value: object) -> str:
    """Return a value as a message quotes it, in one line: a tensor by its shape, and a long text cut in the middle."""
    if isinstance(shape := getattr(value, "shape", None), tuple) and shape:
        return f"a tensor of shape {tuple(shape)}"
    try:
        text = " ".join(repr(value).splitlines())
    except ValueError:  # a whole number of more than 4,300 digits
        return f"a number of about {int(value.bit_length() * 0.30103):,} digits" if isinstance(value, int) else "?"
    if re.search(r"(tensor|array)\(\[", text) and not isinstance(value, str):
        return f"a {type(value).__name__} of tensors"
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 20]} … {text[-12:]}"


def printable(text: str, keep: str = "") -> str:
    """Escape terminal control characters in the text, but for `keep`: names of files may hold anything."""
    return UNPRINTABLE.sub(
        lambda match: match[0] if match[0] in keep else match[0].encode("unicode_escape").decode(), text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error; its class name if it has no message."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an error class of the user, whose __str__ fails
        lines = []
    return (lines or [type(error).__name__])[0]


@contextmanager
def errors_in(action: str) -> Iterator[None]:
    """Turn exceptions of the user's code in the block (a forward pass, a loss, a generator) into a `RecastError`.

    The message says that `action` failed; the original exception is the cause.
    """
    try:
        yield
    except RecastError:
        raise
    except Exception as error:
        raise RecastError(f"{action} failed: {type(error).__name__}: {first_line(error)}") from error


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean a, b?"` with the choices closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""


def listed(names: Sequence[str], most: int) -> str:
    """Return `"a, b and 7 more"`: the first `most` of the names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
