"""The one error class a user's mistake raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecastError(ValueError):
    """A request that cannot be carried out: the message says what was expected, what came, and what to do.

    The command line prints the message as one line and exits with code 2.
    """

    already_told = False
    """True where another process of the same run prints it."""


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line; its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def suggest(name: str, known: Iterable[str]) -> str:
    """`" Did you mean a, b?"` with the known names closest to `name`, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {', '.join(close)}?" if close else ""
