"""The help text of a command: short names, what an option takes, its default; nothing twice."""

from __future__ import annotations

import argparse
import shutil
from typing import Any, Literal, get_args, get_origin

METAVARS = {
    "model": "MODEL", "runs": "RUN", "recipe": "RECIPE", "where": "LAYER", "suite": "SUITE", "eps": "NUM",
    "checkpoint": "FILE", "config": "FILE", "out": "PATH", "resume": "RUN", "data_dir": "DIR", "img_size": "PIXELS",
    "budget": "LIMITS", "device": "DEVICE", "name": "NAME", "data": "NAME", "opt": "NAME",
    "dates": "EPOCH:LAYER", "sizes": "HxW", "neighbours": "K", "sets": "DIR", "figures": "DIR",
    "subject": "RUN|MODEL", "images": "IMAGE", "classes": "FILE", "layer": "LAYER",
}  # fmt: skip


class Formatter(argparse.RawDescriptionHelpFormatter):
    """`--lr NUM`, `--[no-]control`, `--gate {linear,sigmoid}`; the default in brackets."""

    def __init__(self, prog: str, **_: Any) -> None:
        super().__init__(prog, max_help_position=30, width=min(110, shutil.get_terminal_size((100, 24)).columns))

    def add_argument(self, action: argparse.Action) -> None:
        # `--optim FILE`, which jsonargparse adds to every group, would be a second way to say --config
        if type(action).__name__ != "_ActionConfigLoad":
            super().add_argument(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        hint, last = getattr(action, "_typehint", None), action.dest.rpartition(".")[2]
        if isinstance(action, argparse._HelpAction):
            return "-h, --help"
        if not action.option_strings:
            return METAVARS.get(last, last.upper())
        name = short_name(action.dest).replace("_", "-")
        if hint is bool:
            return f"--{name}" if name == "json" else f"--[no-]{name}"
        return f"--{name} {_metavar(hint, last)}"

    def _expand_help(self, action: argparse.Action) -> str:
        # "None: …" in a field's docstring says what happens when the option is left out
        text = (action.help or "").replace("; None: ", ". None: ").replace("None: ", "Default: ").rstrip(".")
        default = action.default
        if default in (None, argparse.SUPPRESS, "", []) or action.dest in ("json", "help") or not action.option_strings:
            return text
        if isinstance(default, bool):
            default = "on" if default else "off"
        if isinstance(default, list | tuple):
            default = " ".join(map(str, default))
        return f"{text} [{default}]"


def short_name(dotted: str) -> str:
    """model.name is --model, pool.kind is --pool, optim.lr is --lr."""
    group, _, last = dotted.rpartition(".")
    return group if group and last in ("name", "kind") else last


def _metavar(hint: Any, name: str) -> str:
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    if get_origin(hint) is Literal:
        return "{" + ",".join(get_args(hint)) + "}"
    if get_origin(kinds[0]) is Literal:
        return _metavar(kinds[0], name)
    if get_origin(hint) in (list, tuple) or get_origin(kinds[0]) in (list, tuple):
        return f"{METAVARS.get(name, 'NUM')} …"
    return METAVARS.get(name) or {int: "N", float: "NUM"}.get(kinds[0], "TEXT")
