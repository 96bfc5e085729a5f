"""The answer of a trial: one sentence with intervals and a recommendation, then a table. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from rich.table import Table

from recast.lab.evaluation.intervals import POINTS, interval
from recast.lab.folder.records import UNIFORM, Wakefulness
from recast.lab.pages.formats import decimal, plural, signed, three_digits, two_digits
from recast.surgery.table import render

Worth = Literal["yes", "no", "unclear"]
HIDDEN = 2.0
"""Points: a full run is not worth it where its gain is shown to be smaller than this."""
RATES = (2e-4, 1e-3, 5e-3)
"""Learning rates of AdamW that an arm chooses among (results/price_rates_cifar.csv: 5e-3 was best for every arm)."""
COLUMNS = ("arm", "top-1", "recast gains", "updates", "ms/step", "rate")
ENOUGH_UPDATES, ENOUGH_EPOCHS = 100, 1
"""A trial decides nothing in which an arm had fewer."""
BEGUN = 0.5
"""Fine-tuning that gains this share of its first gain again when it lasts as long as recasting has only begun."""
EARLY = 0.01
"""Probability, of 0.05, of a wrong interval in a look before the last seed."""
CLOCK = 1.1
"""Equal time is uncertain if the measured ratio of a recast to a fine-tuned step moved by more than this factor."""
Right = Sequence[Sequence[bool]]
"""Of an arm: for each seed, which validation images are right."""


@dataclass(frozen=True)
class ArmLine:
    """Result of an arm, as the mean over seeds; the parent is not trained."""

    arm: str
    label: str
    top1: float
    updates: int = 0
    seconds: float = 0.0
    step_ms: float = 0.0
    rate: float = 0.0


@dataclass(frozen=True)
class Gain:
    """Points of top-1 of the recast arm over another, with an interval over seeds and images (`confidence`)."""

    over: str
    mean: float
    low: float
    high: float
    detectable: float
    """Smallest true gain that such a trial shows with a probability of 80 %."""

    def __str__(self) -> str:
        return f"{signed(self.mean)} ({decimal(self.low)}, {decimal(self.high)})"


@dataclass(frozen=True)
class Facts:
    """Facts of a trial that its sentence states or depends on, besides the images."""

    train: int
    epochs: float
    """Passes of an arm over the training images."""
    most_epochs: float
    minutes: float
    entry: str
    """Module at which the network was split; empty if it was not."""
    views: int
    updates: int
    """The fewest of an arm."""
    seeds: int
    """The most that the trial trains."""
    ways: Mapping[str, int]
    """Options with which a trial on this machine gives an answer → its minutes."""
    notes: tuple[str, ...] = ()
    ratios: tuple[float, ...] = ()
    """Seconds of a recast update relative to a fine-tuned one, as measured again and again."""
    ratio: float = 1.0
    """Updates of the arm fine-tuned for equal time, relative to the others."""
    beside: str = "convolution"
    """What attention stands beside; empty for the papers' layers."""

    @property
    def is_short(self) -> bool:
        """Return True if the arms were trained too little to show anything."""
        return self.updates < ENOUGH_UPDATES or self.epochs < ENOUGH_EPOCHS

    @property
    def is_clock_steady(self) -> bool:
        """Return True if equal time is what it says."""
        return not self.ratios or is_steady(self.ratios)

    def decide(self, updates: Gain, time: Gain) -> Worth:
        """Return the verdict at equal time.

        With an unsteady clock it must hold for every measured ratio: a yes over fine-tuning that was trained for the
        largest, a no already at equal updates, where fine-tuning has less time than recasting.
        """
        worth = verdict(time.low, time.high)
        if self.is_clock_steady:
            return worth
        if worth == "yes" and max(self.ratios) <= CLOCK * self.ratio:
            return "yes"
        return "no" if verdict(updates.low, updates.high) == "no" and min(self.ratios) >= 1 else "unclear"


@dataclass(frozen=True)
class Answer:
    """The answer of a trial; `str` gives it as text, `to_json` as data."""

    worth: Worth
    sentence: str
    changes: tuple[str, ...]
    """Changes that could turn the answer."""
    arms: tuple[ArmLine, ...]
    gains: Mapping[str, Gain]
    """By the arm that recast is compared with: finetuned (equal updates), longer (equal time), added (after a yes)."""
    heads: int
    awake: int
    seeds: int
    images: int
    confidence: float
    """Of the intervals: 0.95, or more where the trial looked several times."""
    facts: Facts

    def to_json(self) -> str:
        """Return the answer as indented JSON."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    def rows(self) -> list[list[str]]:
        """Return the table of the arms under `COLUMNS`, as text."""
        rows = []
        for line in self.arms:
            trained = (
                [f"{line.updates:,}", three_digits(line.step_ms), f"{line.rate:.0e}"] if line.updates else [""] * 3
            )
            rows.append([line.label, f"{line.top1:.1f}", str(self.gains.get(line.arm, "")), *trained])
        return rows

    def __str__(self) -> str:
        table, facts = Table(box=None, padding=(0, 2, 0, 0)), self.facts
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
        for row in self.rows():
            table.add_row(*row)
        about = (
            f"{facts.train:,} training images in {plural(facts.views, 'view')}, {self.images:,} validation images, "
            f"{plural(self.seeds, 'seed')}, {epochs(facts.epochs)}; intervals of {100 * self.confidence:.3g} %"
        )
        lines = [self.sentence, "", render(table), about, *facts.notes]
        if self.changes:
            lines += ["", "What would change the answer:", *(f"- {change}" for change in self.changes)]
        return "\n".join(lines) + "\n"


def is_steady(ratios: Sequence[float]) -> bool:
    """Return True if measured ratios differ by a tenth at most."""
    return max(ratios) <= CLOCK * min(ratios)


def confidence(seeds: int, most: int) -> float:
    """Return the confidence of the interval after `seeds` of at most `most` seeds.

    A trial stops as soon as an interval decides. There is a look after each seed but the first; the probabilities of
    a wrong interval add up to 0.05 (Bonferroni), most of it for the last look.

    Example:
        >>> confidence(2, 2), confidence(2, 3), confidence(3, 3)
        (0.95, 0.99, 0.96)
    """
    early = max(0, most - 2)
    return 1 - (EARLY / early if seeds < most else 0.05 - EARLY * bool(early))


def epochs(number: float) -> str:
    """Return a number of epochs, with two digits.

    Example:
        >>> epochs(0.52), epochs(1), epochs(104.4)
        ('0.52 epochs', '1 epoch', '104 epochs')
    """
    text = two_digits(number)
    return f"{text} epoch{'s' * (text != '1')}"


def offers(ways: Mapping[str, int]) -> str:
    """Return what an answer costs.

    Example:
        >>> offers({"--minutes 25": 25, "--img-size 128 --minutes 8": 8}).replace("\xa0", " ")
        'an answer takes 100 updates and 1 epoch: about 25 minutes (--minutes 25), or 8 (--img-size 128 --minutes 8)'
    """
    (options, minutes), *others = ways.items()
    times = [f"about {plural(minutes, 'minute')} ({options})", *(f"{least} ({which})" for which, least in others)]
    return f"an answer takes {ENOUGH_UPDATES} updates and {epochs(ENOUGH_EPOCHS)}: {', or '.join(times)}"


def verdict(low: float, high: float) -> Worth:
    """Return yes where an interval shows a gain, no where it rules out one of `HIDDEN` points, else unclear."""
    return "yes" if low > 0 else "no" if high < HIDDEN else "unclear"


def judge(right: Mapping[str, Right], arms: Sequence[ArmLine], attention: Wakefulness | None, facts: Facts) -> Answer:
    """Judge the arms of a trial.

    Args:
        right: arm → seed → which validation images are right; the same seeds and images for every arm.
        arms: their results, in the order of the table.
        attention: heads of the recast arm that attend.
        facts: of the trial.

    Returns:
        An `Answer`: the verdict on the gain at equal time (`Facts.decide`), but unclear if the trial could not show
        anything: too few updates or epochs, one seed, a clock that decides, no trained arm ahead of the network as it
        is, a no from a training that has only begun, heads asleep.
    """
    seeds, images = len(right["recast"]), len(right["recast"][0])
    sure = confidence(seeds, facts.seeds)
    gains = {over: _gain(over, right, sure) for over in ("finetuned", "longer", "added") if over in right}
    updates, time = gains["finetuned"], gains["longer"]
    heads, awake = (attention.heads, attention.awake) if attention else (0, 0)
    worth = facts.decide(updates, time)
    doubts = _doubts(arms, seeds, facts, worth)
    if attention is not None and attention.slept:
        start = "; --query-key images starts them elsewhere" if attention.entropy >= UNIFORM else ""
        doubts.append(f"{attention}: this is no evidence about attention{start}")
    if doubts:
        worth = "unclear"
    why = f" {doubts[0][:1].upper()}{doubts[0][1:]}." if doubts else ""
    of_seeds = plural(seeds, "seed") if seeds == facts.seeds else f"{seeds} of at most {plural(facts.seeds, 'seed')}"
    sentence = (
        f"Worth a full run: {worth}.{why} {updates} over fine-tuning at equal updates, {time} at equal time; {awake} "
        f"of {heads} heads attend. With {images:,} validation images and {of_seeds} the smallest detectable difference "
        f"at equal time is {time.detectable:.1f} points."
    )
    changes = doubts[1:]
    if "added" in gains and worth == "yes" and gains["added"].low <= 0:
        changes.append(
            f"over added convolutions of similar cost recast gains {gains['added']}: the gain may come from compute, "
            "not from attention"
        )
    if at_edge := [line.label for line in arms if line.rate == RATES[-1]]:
        labels = ", ".join(at_edge)
        changes.append(f"a higher learning rate than those tried: {labels} took the highest, {RATES[-1]:.0e}")
    if worth != "yes":
        changes += _remedies(updates, time, right, facts)
    return Answer(worth, sentence, tuple(changes), tuple(arms), gains, heads, awake, seeds, images, sure, facts)


def _doubts(arms: Sequence[ArmLine], seeds: int, facts: Facts, worth: Worth) -> list[str]:
    """Return the reasons for which a trial decides nothing, whatever its intervals; `worth` is their verdict."""
    doubts = list[str]()
    if facts.is_short:
        doubts.append(
            f"too short to say on this machine, with {facts.updates} updates and {epochs(facts.epochs)} an arm; "
            f"{offers(facts.ways)}"
        )
    if seeds == 1:
        doubts.append("one seed, so that the intervals are over the images only")
    if worth == "unclear" and not facts.is_clock_steady:
        doubts.append(
            f"a recast update took {min(facts.ratios):.2f} to {max(facts.ratios):.2f} times a fine-tuned one while "
            "the trial ran, so that equal time is undecided; run it in a new folder on an idle machine"
        )
    top1 = {line.arm: line.top1 for line in arms}
    if (before := top1.pop("parent", 0.0)) > (best := max(top1.values())):
        doubts.append(
            f"the network as it is ({before:.1f}) is ahead of every trained arm (at most {best:.1f}); if it was "
            "trained on these images, take others"
        )
    first, later = top1["finetuned"] - before, top1["longer"] - top1["finetuned"]
    if worth == "no" and later >= max(HIDDEN, BEGUN * first):
        doubts.append(
            f"the training has only begun: fine-tuning alone gains {later:.1f} points more when it lasts as long as "
            f"recasting, after {first:.1f} before, so later gains cannot be foretold"
        )
    return doubts


def _gain(over: str, right: Mapping[str, Right], sure: float) -> Gain:
    return Gain(over, **asdict(interval(_points(over, right), POINTS, sure)))


def _points(over: str, right: Mapping[str, Right]) -> np.ndarray:
    """Return recast minus another arm in points (seeds, images)."""
    return 100.0 * (np.array(right["recast"], dtype=float) - np.array(right[over], dtype=float))


def _remedies(updates: Gain, time: Gain, right: Mapping[str, Right], facts: Facts) -> list[str]:
    """Return changes that could turn a no or an unclear answer."""
    images, seeds = len(right["recast"][0]), len(right["recast"])
    remedies = []
    if updates.low > 0 >= time.low:
        remedies.append("hours: at equal updates the gain is shown; it is the time of a step that takes it away")
    if facts.epochs < facts.most_epochs and not facts.is_short:
        minutes = math.ceil(facts.minutes * facts.most_epochs / facts.epochs)
        remedies.append(
            f"a longer trial: every arm saw the images {two_digits(facts.epochs)} times; --minutes {minutes:,} "
            f"makes that {facts.most_epochs:.0f}"
        )
    of_images = interval(_points("longer", right).mean(0, keepdims=True), POINTS)  # more images do not replace seeds
    if time.mean > 0.1 and of_images.low <= 0 and (needed := images * (of_images.detectable / time.mean) ** 2) < 1e5:
        count = f"{100 * math.ceil(needed / 100):,}"
        remedies.append(f"more validation images: about {count}, for a gain of {time.mean:.1f} points")
    if seeds == facts.seeds < 5:
        remedies.append(f"more seeds: --seeds 5 instead of {seeds}")
    after = "after the blocks (--beside block), or " if facts.beside == "convolution" else ""
    remedies.append(f"another place: {after}where maps are larger (--where stage:-2)")
    return remedies
