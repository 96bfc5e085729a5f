"""A command and its options, and the help made from them: what an option takes, what it is for, its default."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shutil
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args, get_origin

from recast.config import leaves, words_of

OUTPUT = ("threads", "json", "quiet", "verbose")
"""Options of all commands, the last in their help; the switches have no --no-."""
METAVARS = {
    "runs": "RUN", "where": "LAYER", "suite": "SUITE", "checkpoint": "FILE", "config": "FILE", "out": "PATH",
    "resume": "RUN", "data_dir": "DIR", "img_size": "PIXELS", "budget": "LIMITS", "device": "DEVICE", "name": "NAME",
    "data": "NAME", "opt": "NAME", "dates": "EPOCH:LAYER", "sizes": "HxW", "neighbours": "K", "sets": "DIR",
    "figures": "DIR", "subject": "RUN|MODEL", "images": "IMAGE", "classes": "FILE", "layer": "LAYER",
    "coarse_file": "FILE", "checkpoint_key": "NAME", "saved": "FILE|RUN", "parent": "MODEL|FILE",
}  # fmt: skip


class Command(NamedTuple):
    """What is told of a command besides its options."""

    name: str
    usage: str
    description: str
    examples: str


@dataclass(frozen=True)
class Option:
    """A field of a dataclass as an option, or as a word without dashes."""

    path: tuple[str, ...]
    """Of the field, from the command's dataclass on."""
    dotted: str
    hint: Any
    default: Any
    group: str
    words: str | None
    """How many words the field takes without dashes: "1", "?", "*" or "+". None: it is an option."""
    doc: str

    @property
    def last(self) -> str:
        return self.path[-1]

    @property
    def short(self) -> str:
        """model.name is --model, pool.kind is --pool, optim.lr is --lr."""
        group = self.dotted.rpartition(".")[0]
        return group if group and self.last in ("name", "kind") else self.last

    @property
    def shown(self) -> str:
        return "--" + self.short.replace("_", "-")

    @property
    def item_types(self) -> tuple[type, ...]:
        """int, float, bool or str: what a word of the option is."""
        found = (str if get_origin(leaf) is Literal else (*get_args(leaf), leaf)[0] for leaf in leaves(self.hint))
        return tuple(kind for kind in dict.fromkeys(found) if kind not in (types.NoneType, Ellipsis))

    @property
    def is_switch(self) -> bool:
        return bool in self.item_types

    @property
    def is_list(self) -> bool:
        return any(get_origin(kind) in (list, tuple) for kind in (self.hint, *get_args(self.hint)))

    @property
    def metavar(self) -> str:
        choices = "" if float in self.item_types else ",".join(words_of(self.hint))
        kind = {int: "N", float: "NUM"}.get(self.item_types[0], "TEXT")
        name = f"{{{choices}}}" if choices else METAVARS.get(self.last, self.last.upper() if self.words else kind)
        return f"{name} …" if self.is_list and not choices and not self.words else name

    @property
    def help(self) -> str:
        """The field's docstring and the default; "None: …" in it says what happens when the option is left out."""
        text = self.doc.replace("; None: ", ". None: ").replace("None: ", "Default: ")
        text = re.sub(r"(?<!\.)\.$", "", text)
        default = self.default
        if default in (None, "", []) or self.last in OUTPUT or self.words:
            return text
        if isinstance(default, bool):
            default = "on" if default else "off"
        if isinstance(default, list | tuple):
            default = ("," if str in self.item_types else " ").join(map(str, default))
        return f"{text} [{default}]"


def field_docs(kind: type) -> dict[str, str]:
    """Field → the string below it in the source of a dataclass and of those that it is derived from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        for field, below in pairwise(_bodies(base.__module__)[base.__name__]):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())  # type: ignore[union-attr]
    return found


@cache
def _bodies(module: str) -> dict[str, list[ast.stmt]]:
    """The statements of every class of a module: its source is parsed once, which `inspect` does for each class."""
    parsed = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in parsed.body if isinstance(node, ast.ClassDef)}


def show_help(command: Command, options: Sequence[Option]) -> None:
    """Print the help; argparse lays it out, and parses nothing."""
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    parser = argparse.ArgumentParser(
        prog=f"recast {command.name}",
        usage=f"recast {command.name} {command.usage}",
        description=command.description,
        epilog=f"examples:\n{command.examples}",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=width),
    )
    groups: dict[str, argparse._ArgumentGroup | argparse.ArgumentParser] = {"": parser}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group, text = groups[option.group], option.help.replace("%", "%%")
        if option.words:
            group.add_argument(option.last, metavar=option.metavar, help=text)
        elif option.is_switch:
            dashes = "--" if option.last in OUTPUT else "--[no-]"
            group.add_argument(f"{dashes}{option.shown[2:]}", action="store_true", help=text)
        else:
            group.add_argument(option.shown, metavar=option.metavar, help=text)
    parser.print_help()
