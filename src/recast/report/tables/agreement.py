"""On which images the recast network and another arm differ: won, lost, and whether that could be chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from recast.report.read.analysis import Prediction
from recast.report.read.run import Run
from recast.report.text import formats
from recast.report.text.words import words

SHOWN = 24
"""Images that are listed for each side."""


@dataclass(frozen=True)
class Changed:
    """An image that one arm gets right and the other does not."""

    image: str
    label: str
    before: str
    after: str


@dataclass(frozen=True)
class Pair:
    against: str
    name: str
    images: int
    won: list[Changed]
    lost: list[Changed]
    both_right: int
    both_wrong: int
    same: int
    """Images with the same prediction, right or wrong."""
    sentence: str


def mcnemar(won: int, lost: int) -> float:
    """Exact two-sided p value of McNemar's test: P(as uneven a split of won + lost fair coin tosses), at most 1."""
    total, fewer = won + lost, min(won, lost)
    if total == 0:
        return 1.0
    logs = [math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(fewer + 1)]
    tail = math.fsum(math.exp(log - total * math.log(2)) for log in logs)
    return min(1.0, 2 * tail)


def net_interval(won: int, lost: int, images: int) -> tuple[float, float]:
    """95 % interval of 100·(won − lost)/images in points: Wald's for paired shares, with a pseudo-image on either side.

    The half image added to each of won, lost (and the rest) is Agresti and Min's adjustment (2005): it keeps the
    interval honest where hardly any image changed.
    """
    more, b, c = images + 2, won + 0.5, lost + 0.5
    centre = (b - c) / more
    half = 1.959964 * math.sqrt(max(b + c - (b - c) ** 2 / more, 0)) / more
    return 100 * (centre - half), 100 * (centre + half)


def agreement(run: Run) -> list[Pair]:
    """The recast arm against each other arm that has predictions."""
    found = run.analysis.agreement
    names = words(run)
    pairs = []
    for arm, name in (("finetuned", names.control), ("parent", names.parent_short)):
        both = [line for line in found if arm in line.arms and "recast" in line.arms]
        if both:
            pairs.append(_pair(both, arm, name))
    return pairs


def _pair(found: list[Prediction], arm: str, name: str) -> Pair:
    def is_right(line: Prediction, model: str) -> bool:
        return line.arms[model] == line.label

    def changed(line: Prediction) -> Changed:
        return Changed(line.image or str(line.index), line.label, line.arms[arm], line.arms["recast"])

    won = [changed(line) for line in found if is_right(line, "recast") and not is_right(line, arm)]
    lost = [changed(line) for line in found if is_right(line, arm) and not is_right(line, "recast")]
    right = sum(is_right(line, arm) and is_right(line, "recast") for line in found)
    low, high = net_interval(len(won), len(lost), len(found))
    p = mcnemar(len(won), len(lost))
    chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    net = formats.signed(100 * (len(won) - len(lost)) / len(found), 2)
    sentence = (
        f"Against {name}: {formats.plural(len(won), 'image')} won, {len(lost):,} lost of {len(found):,}, "
        f"net {net} points (95 % interval {formats.interval(low, high, 2)}; McNemar’s exact test {chance})."
    )
    same = sum(line.arms[arm] == line.arms["recast"] for line in found)
    return Pair(arm, name, len(found), won, lost, right, len(found) - right - len(won) - len(lost), same, sentence)
