"""What the commands' parsers share: one grammar of dotted flags, timm's short names, messages that suggest."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from recast.errors import RecastError, suggest

set_parsing_settings(docstring_parse_attribute_docstrings=True)

RECAST_ALIASES = {
    "gate": "recast.gate",
    "alpha": "recast.alpha",
    "stride": "recast.stride",
    "backend": "recast.backend",
    "head_dim": "recast.head_dim",
}
TRAIN_ALIASES = RECAST_ALIASES | {
    "model": "model.name",
    "checkpoint": "model.checkpoint",
    "pretrained": "model.pretrained",
    "num_classes": "model.num_classes",
    "data": "data.name",
    "data_dir": "data.data_dir",
    "img_size": "data.img_size",
    "batch_size": "data.batch_size",
    "workers": "data.workers",
    "num_train": "data.num_train",
    "num_val": "data.num_val",
    "opt": "optim.opt",
    "lr": "optim.lr",
    "gate_lr": "optim.gate_lr",
    "weight_decay": "optim.weight_decay",
    "warmup_epochs": "optim.warmup_epochs",
    "clip_grad": "optim.clip_grad",
}
FLAGS = {"pretrained", "model.pretrained", "control", "recast.attend_padding", "json"}
LISTS = {"where", "suite", "eps"}


def new_parser(
    command: str, description: str, examples: str = "", aliases: dict[str, str] | None = None
) -> ArgumentParser:
    """A parser that raises instead of exiting, with examples and the short names below its options."""
    epilog = f"examples:\n{examples}" if examples else ""
    if aliases:
        short = ", ".join(f"--{a.replace('_', '-')} = --{full}" for a, full in aliases.items())
        epilog += f"\nshort names: {short}\n"
    return ArgumentParser(
        prog=f"recast {command}",
        description=description,
        epilog=epilog,
        exit_on_error=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse(parser: ArgumentParser, argv: Sequence[str], aliases: dict[str, str] | None = None) -> Namespace:
    """Parse after rewriting the short forms; a mistake becomes one `RecastError` line with a suggestion."""
    try:
        return parser.parse_args(rewrite(argv, aliases or {}))
    except argparse.ArgumentError as error:
        raise RecastError(_improve(str(error), parser)) from None


def rewrite(argv: Sequence[str], aliases: dict[str, str]) -> list[str]:
    """`--batch-size 8 --pretrained --where a b` → `--data.batch_size=8 --model.pretrained=true --where=["a", "b"]`."""
    rewritten: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        match = re.fullmatch(r"--(no-)?([A-Za-z][\w.-]*)(\+)?(?:=(.*))?", token, flags=re.DOTALL)
        if match is None:
            rewritten.append(token)
            continue
        negated, name, plus, value = match[1], match[2].replace("-", "_"), match[3] or "", match[4]
        name = aliases.get(name, name)
        if name in FLAGS and value is None:
            if rest and rest[0] in ("true", "false") and not negated:
                value = rest.pop(0)
            else:
                value = "false" if negated else "true"
        elif name in LISTS and not plus:
            items = [] if value is None else [value]
            while value is None and rest and not rest[0].startswith("--"):
                items.append(rest.pop(0))
            if not (len(items) == 1 and items[0].startswith("[")):
                value = json.dumps([part for item in items for part in item.split(",") if part])
            else:
                value = items[0]
        elif negated:
            name = f"no_{name}"
        rewritten.append(f"--{name}{plus}" if value is None else f"--{name}{plus}={value}")
    return rewritten


def _improve(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message on one line, with the nearest option for one that does not exist."""
    known = [option for action in parser._actions for option in action.option_strings]
    unknown = re.search(r"unrecognized arguments: (--[\w.]+)", message, flags=re.IGNORECASE)
    if unknown:
        return f"unknown option {unknown[1]}.{suggest(unknown[1], known)} See {parser.prog} --help"
    in_file = re.search(r"does not accept option '([\w.]+)'", message)
    hint = suggest(in_file[1], [option.rpartition(".")[2].lstrip("-") for option in known]) if in_file else ""
    return f"{' '.join(message.split())}{hint}"


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
