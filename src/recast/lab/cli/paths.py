"""Check typed paths before anything large is imported: a typo costs half a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING

from recast.config import File
from recast.errors import RecastError
from recast.lab.folder.run import RunFolder
from recast.reading import read_bytes

if TYPE_CHECKING:
    from recast.lab.cli.command import Command

FILES = (".safetensors", ".pth", ".ckpt", ".bin")
"""Endings of files of weights, without .pt, in which names of timm end too."""


def check_paths(command: Command, words: Sequence[str]) -> None:
    """Raise RecastError for a typed file or folder that does not exist, and for an `--out` below a file."""
    words = list(takewhile(lambda word: word != "--", words))
    paths = {
        name: option.field.path[-1]
        for part in command.parts.values()
        for option in part.options.values()
        if File in option.field.marks
        for name in (option.short, option.dotted)
    }
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name not in paths or value in ("", "null") or (not equals and value.startswith("--")):
            continue
        path = os.path.expanduser(value)
        if paths[name] == "out":
            _check_parents(name, path)
        elif not (os.path.exists(path) or (paths[name] == "data_dir" and any(map(_names_hub, words)))):
            what = {"data_dir": "data folder", "sets": "folder"}.get(paths[name], "file")
            raise RecastError(f"no such {what}: {value} ({name})")
    labels = list(command.words)
    for number, word in enumerate(takewhile(lambda word: not word.startswith("-"), words)):
        if labels:
            _check_subject(labels[min(number, len(labels) - 1)], word)


def _names_hub(word: str) -> bool:
    """Return True for data of a hub, also in a recipe or a run: its data folder is a cache, which is made."""
    path = str(RunFolder(word).recipe_file) if os.path.isdir(word) else word
    if path.endswith((".yaml", ".yml")):
        with suppress(OSError, RecastError):
            word = read_bytes(path).decode(errors="replace")
    return "hfds/" in word


def _check_parents(name: str, path: str) -> None:
    """Raise RecastError if a parent of the path is a file."""
    while (parent := os.path.dirname(path)) not in ("", path):
        if os.path.lexists(parent) and not os.path.isdir(parent):
            raise RecastError(f"{name}: {parent} is not a folder")
        path = parent


def _check_subject(label: str, word: str) -> None:
    """Raise RecastError for a word that cannot be what its label in the usage says."""
    is_there = os.path.exists(word)
    if "MODEL" in label and not is_there and word.endswith(FILES):
        raise RecastError(f"no such file: {word}")
    if label == "RUN|MODEL" and not is_there and "/" in word and ":" not in word:
        RunFolder(word).check()
    if "IMAGE" in label and not is_there and not word.startswith("val:"):
        raise RecastError(f"no such image or folder: {word}")
    if label == "RUN|FILE" and not is_there:
        raise RecastError(f"no such run folder or file: {word}")
    if label == "RUN|FILE" and os.path.isdir(word):
        RunFolder(word).check()
