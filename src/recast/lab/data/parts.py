"""Usual names of the parts of a data set: folders, archives, files and splits."""

from __future__ import annotations

import re
from collections.abc import Iterable

from recast.errors import RecastError, listed

TRAINING = ("train", "training", "trainval")
HELD_OUT = ("val", "valid", "validation", "dev", "eval", "evaluation", "test", "testing")
"""Words for the held-out part, preferred first."""

_THINGS = "(?:set|data|images?|imgs?|folder|split|mini)?"
_WORD = re.compile(f"{_THINGS}({'|'.join(TRAINING + HELD_OUT)}){_THINGS}")


def part_word(name: str) -> str | None:
    """Return the word for a part in a name: "train" for "Train", "seg_train", "train2017", "TrainImages"; else None."""
    words = {match[1] for word in re.findall("[a-z]+", name.lower()) if (match := _WORD.fullmatch(word))}
    return words.pop() if len(words) == 1 else None


def choose_parts(names: Iterable[str], where: str) -> tuple[str | None, str | None]:
    """Return the names of the training and of the held-out part; either may be None.

    Exact words come first, then HELD_OUT's order. Raises RecastError if two names are equally good.
    """
    rows = sorted((name.lower() != word, word, name) for name in names if (word := part_word(name)))
    chosen: list[str | None] = []
    for words, title in ((TRAINING, "training"), (HELD_OUT, "validation")):
        ranked = sorted((is_longer, words.index(word), name) for is_longer, word, name in rows if word in words)
        if len(ranked) > 1 and ranked[0][:2] == ranked[1][:2]:
            first, second = ranked[0][2], ranked[1][2]
            raise RecastError(f"ambiguous {title} part in {where}: {first} and {second}; move one of them elsewhere")
        chosen.append(ranked[0][2] if ranked else None)
    return chosen[0], chosen[1]


def parts_note(where: str, train: str | None, val: str | None, names: Iterable[str]) -> list[str]:
    """Return a line about the chosen parts; none if they have the usual names and nothing else is there."""
    unused = sorted(set(names) - {train, val})
    if not unused and train in (None, "train") and val in (None, "val", "valid", "validation", "test"):
        return []
    chosen = [f"{title} part {name}" for title, name in (("training", train), ("validation", val)) if name]
    return [f"{where}: {', '.join(chosen)}{f'; not used: {listed(unused, 5)}' if unused else ''}"]
