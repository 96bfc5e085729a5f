"""What the commands' parsers share: one grammar of options, read off the parser's own types.

Every field of a recipe is an option under its dotted name (`--optim.lr`) and under its last part (`--lr`), with `-` or
`_`. Switches are `--json` and `--no-control`, lists `--where a b` or `--suite clean,fgsm`. A mistake is one line.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from recast.cli.help import METAVARS, Formatter, short_name
from recast.errors import RecastError, suggest
from recast.run.recipe import describe_type

set_parsing_settings(docstring_parse_attribute_docstrings=True)

GREEDY = {
    "where": r".*",
    "dates": r"\d+:.*",
    "eps": r"-?[\d.,]+",
    "sizes": r"\d+(x\d+)?",
    "neighbours": r"\d+",
    "gate_range": r"-?[\d.,]+",
    "mean": r"[\d.,]+",
    "std": r"[\d.,]+",
}
"""Lists that go on over the following words that match; any list may be one word with commas."""


def new_parser(command: str, usage: str, description: str, examples: str = "") -> ArgumentParser:
    """A parser that raises instead of exiting, with examples below its options."""
    return ArgumentParser(
        prog=f"recast {command}",
        usage=f"recast {command} {usage}",
        description=description,
        epilog=f"examples:\n{examples}" if examples else "",
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=Formatter,
    )


def parse(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse after rewriting the short forms; a mistake becomes one `RecastError` line with a suggestion."""
    try:
        return parser.parse_args(rewrite(argv, parser))
    except argparse.ArgumentError as error:
        raise RecastError(_one_line(str(error), parser)) from None


def short_names(parser: ArgumentParser) -> dict[str, str]:
    """`{"lr": "optim.lr", "model": "model.name", "pool": "pool.kind", …}`: last part of a dotted option, or its group
    for what the group is about."""
    dotted = [action.dest for action in parser._actions if "." in action.dest]
    return {short_name(name): name for name in dotted}


def rewrite(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """`--batch-size 8 --pretrained --where a b` → `--data.batch_size 8 --model.pretrained=true --where=["a", "b"]`."""
    short = short_names(parser)
    hints = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    rewritten: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        match = re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", token, flags=re.DOTALL)
        if match is None:
            rewritten.append(token)
            continue
        name, value = match[1].replace("-", "_"), match[2]
        negated = name.startswith("no_") and hints.get(short.get(name[3:], name[3:])) is bool
        name = name[3:] if negated else name
        name = short.get(name, name)
        if hints.get(name) is bool and value is None:
            given = not negated and rest and rest[0] in ("true", "false")
            value = rest.pop(0) if given else str(not negated).lower()
        elif _is_list(hints.get(name)):
            words = [] if value is None else [value]
            pattern = GREEDY.get(name.rpartition(".")[2], "")
            while value is None and rest and not rest[0].startswith("--") and _goes_on(rest[0], words, pattern):
                words.append(rest.pop(0))
            value = _as_json(words) if words else value
        rewritten.append(f"--{name}" if value is None else f"--{name}={value}")
    return rewritten


def _goes_on(word: str, words: list[str], pattern: str) -> bool:
    return not words or re.fullmatch(pattern, word) is not None


def _as_json(words: list[str]) -> str:
    if len(words) == 1 and (words[0].startswith("[") or words[0] == "null"):
        return words[0]
    # commas separate words, but belong to a regular expression
    parts = [part for word in words for part in ([word] if word.startswith("re:") else word.split(","))]
    return json.dumps([part for part in parts if part])


def _is_list(hint: Any) -> bool:
    return any(get_origin(kind) in (list, tuple) for kind in (hint, *get_args(hint)))


def _one_line(message: str, parser: ArgumentParser) -> str:
    """argparse's and jsonargparse's messages in the words that the user typed, with the nearest option or value."""
    short = {dotted: name for name, dotted in short_names(parser).items()}
    options = [action for action in parser._actions if action.option_strings and hasattr(action, "_typehint")]
    shown = {action.dest: _dashed(short.get(action.dest, action.dest)) for action in options}
    unknown = re.search(r"unrecognized arguments: (\S+)", message, flags=re.IGNORECASE)
    if unknown and unknown[1].startswith("--"):
        option = _dashed(unknown[1][2:].partition("=")[0])
        known = map(_dashed, shown) if "." in option else shown.values()
        return f"unknown option {option}.{suggest(option, known)} See {parser.prog} --help"
    if unknown:
        return f"unexpected argument {unknown[1]!r}. See {parser.prog} --help"
    if missing := re.search(r"arguments are required: (\w+)", message):
        hint = " (--where takes all words that follow it)" if "where" in shown else ""
        return f"{parser.usage}: {METAVARS.get(missing[1], missing[1].upper())} is missing{hint}"
    if bad := re.search(r'Parser key "([\w.]+)":.*(?:Got|Given) value: (.*)', message, flags=re.DOTALL):
        key, value = bad[1], " ".join(bad[2].split())
        kind = next((getattr(action, "_typehint", None) for action in parser._actions if action.dest == key), None)
        if kind is not None:
            choices = [word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)]
            wanted = describe_type(kind).replace(" or null", "")
            return f"{shown.get(key, key)} must be {wanted}, got {_typed(value)}.{suggest(value, choices)}".rstrip(".")
    if group := re.search(r'Parser key "(\w+)":.*Unable to load', message, flags=re.DOTALL):
        fields = [name for dest, name in shown.items() if dest.startswith(f"{group[1]}.")]
        return f"--{group[1]} is a group of options, give them one by one: {', '.join(fields[:3])}, …"
    if needs := re.search(r"--([\w.]+)\W*expected one argument", message, flags=re.IGNORECASE):
        return f"{shown.get(needs[1], needs[1])} needs a value. See {parser.prog} --help"
    return " ".join(message.split())


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _typed(value: str) -> str:
    """A value as the user typed it: a list was rewritten as JSON."""
    try:
        words = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return repr(value)
    return repr(" ".join(map(str, words))) if isinstance(words, list) else repr(value)


def parse_size(text: str | None, default: int) -> tuple[int, int]:
    """`"224"` or `"224x160"` (height x width) as two numbers of pixels."""
    if text is None:
        return default, default
    match = re.fullmatch(r"(\d+)(?:[x×](\d+))?", text)
    if match is None or int(match[1]) < 1 or int(match[2] or 1) < 1:
        raise RecastError(f"--img-size takes pixels, 224 or 224x160 (height x width), got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def print_json(content: Any) -> None:
    """Machine-readable output on standard output."""
    json.dump(content, sys.stdout, indent=1)
    print()
