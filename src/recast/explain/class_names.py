"""What the outputs of a network are called."""

from __future__ import annotations

from pathlib import Path

from timm.data import ImageNetInfo

from recast.errors import RecastError


def imagenet_names() -> tuple[list[str], dict[str, str]]:
    """ImageNet-1k's classes by their first name (all of them where two classes share it), and folder → class."""
    info = ImageNetInfo()
    wnids = info.label_names()
    told = [info.index_to_description(index) for index in range(len(wnids))]
    first = [text.partition(",")[0] for text in told]
    names = [text if first.count(short) > 1 else short for text, short in zip(told, first, strict=True)]
    return names, {name: name for name in names} | dict(zip(wnids, names, strict=True))


def read_class_names(path: Path) -> list[str]:
    """The lines of a text file, a class each. Raises `RecastError` for a file that is none, and for empty lines."""
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = "no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise RecastError(
            f"cannot read the names of classes in {path}: {reason}; one name a line is expected"
        ) from None
    while names and not names[-1]:
        names.pop()
    if not names or "" in names:
        where = f"line {names.index('') + 1} is empty" if names else "it is empty"
        raise RecastError(f"{path} must name one class a line, but {where}")
    return names
