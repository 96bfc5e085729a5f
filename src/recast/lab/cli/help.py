"""Layout of the help: usage, description, and options with their texts in two columns. Imports no library."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

HELP = ("--help", "-h", "--help-all")
COLUMN = 34
"""Column at which the texts begin."""

Entry = tuple[str, str]
"""An option or a command, and its text."""


def help_text(usage: str, about: str, panels: Mapping[str, Sequence[Entry]], end: str) -> str:
    """Return a help as wide as the terminal; `end` is not wrapped."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    first, *lines = about.strip().splitlines()
    filled = [textwrap.fill(first, width), *(textwrap.fill(line, width, subsequent_indent="    ") for line in lines)]
    rows = [row for title, entries in panels.items() if entries for row in _rows(title, entries, width)]
    return "\n".join([f"Usage: {usage}", "", *filled, "", *rows, "", end.rstrip()])


def _rows(title: str, entries: Sequence[Entry], width: int) -> list[str]:
    lines = [f"{title}:"]
    for name, text in entries:
        label, wrapped = f"  {name}", textwrap.wrap(text, width - COLUMN) or [""]
        lines.append(f"{label:<{COLUMN - 1}} {wrapped.pop(0)}" if len(label) < COLUMN else label)
        lines += (" " * COLUMN + line for line in wrapped)
    return lines
