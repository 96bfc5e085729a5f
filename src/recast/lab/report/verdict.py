"""What the numbers of a run allow to say: one sentence, what is behind it, and no more than that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import PurePath
from typing import NamedTuple

from recast.analysis.records import Wakefulness
from recast.errors import listed
from recast.files import number
from recast.lab.recipe import HOW_IT_RUNS, PATHS, flat
from recast.lab.report import formats
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import words
from recast.lab.report.load import Run
from recast.lab.statistics import mean_interval
from recast.lab.suites import METRICS

EXACT = 1e-5
"""Largest relative error of the outputs that still counts as the same function (fp32)."""
MAY_DIFFER = {*HOW_IT_RUNS, "seed", "compile"}
"""In runs that have a mean."""
LISTED = 4
"""Differences of recipes that are named; of more, their number is told."""


def accuracy(run: Run, model: str) -> float:
    """Top-1 (mIoU, box AP) of an arm in percent: from rows.csv, otherwise the last validation of its training."""
    measured = run.value(model, *run.main)
    if math.isfinite(measured):
        return measured
    if model == ("finetuned" if run.is_plain else "recast"):
        return run.metrics[-1].metrics.get(run.main[1], math.nan) if run.metrics else math.nan
    if model == "finetuned" and run.control and run.control[-1].epoch > 0:
        return run.control[-1].metrics.get(run.main[1], math.nan)
    return run.control[0].metrics.get(run.main[1], math.nan) if model == "parent" and run.control else math.nan


def test_images(run: Run) -> int:
    """How many images the clean accuracy was measured on, 0 if unknown."""
    row = run.row("recast", *run.main)
    return row.n if row else 0


def harmed(run: Run) -> list[str]:
    """The trained arms that are shown to end below the parent as it was.

    By the paired interval; where there is none by that of a difference as if the arms had seen different images,
    1.96 √(Σ p (100 − p) / n), which is wider.
    """
    if "parent" not in words(run).others or run.epochs == 0:
        return []
    arms = []
    for arm in ("finetuned", "recast"):
        paired = run.difference("parent", *run.main) if arm == "recast" else None
        rows = [row for one in ("parent", arm) if (row := run.row(one, *run.main)) and row.n and run.task.counts_images]
        if paired is not None:
            high = paired.high
        elif len(rows) == 2:
            error = 1.96 * math.sqrt(sum(max(row.value * (100 - row.value), 0) / row.n for row in rows))
            high = rows[1].value - rows[0].value + error
        else:
            continue
        arms += [arm] if round(high, 1) < 0 else []
    return arms


def kept_predictions(run: Run) -> tuple[int, int]:
    """(predictions that agree with the parent's, images) of verify.json; of a detector, whose boxes have no likeliest
    class, all where the outputs are the same to the bit."""
    assert run.verify is not None
    images, share = int(number(run.verify["images"])), number(run.verify["argmax_agreement"])
    share = 1.0 if math.isnan(share) and run.verify["bitwise"] is True else share
    return round(share * images) if math.isfinite(share) else 0, images


def is_exact(run: Run) -> bool:
    """The recast model started as its parent: every prediction the same and the outputs equal to rounding."""
    if run.verify is None:
        return False
    same, images = kept_predictions(run)
    return same == images and number(run.verify["max_relative_error"]) <= EXACT


class Verdict(NamedTuple):
    """What stands at the top of the page."""

    headline: str
    """One short sentence."""
    numbers: str
    """The sentences behind it."""


def verdict(run: Run) -> Verdict:
    """What a run allows to say."""
    if run.is_plain:
        trained = f"trained for {formats.plural(run.epochs, 'epoch')}" if run.epochs else "not trained"
        reached = _reaches(run, accuracy(run, "finetuned"))
        return Verdict("Nothing was recast.", f"The network alone, {trained}, {reached}.")
    headline, reached = _end(run)
    began = _became(run) if run.is_scheduled else _start(run)
    return Verdict(headline, " ".join(part for part in (reached, _attention(run), f"{began}.") if part))


def _attention(run: Run) -> str:
    """Whether attention was at work, as a sentence of its own: where it slept, nothing here is evidence about it."""
    found = Wakefulness.of(run.metrics[-1].layers) if run.epochs and run.metrics else None
    if found is None:
        return ""
    text = str(found)
    return f" {text[0].upper()}{text[1:]}{': no evidence about attention' if found.slept else ''}."


def _start(run: Run) -> str:
    if run.verify is None:
        return "How the recast model started was not measured (no verify.json)"
    same, images = kept_predictions(run)
    error = f"max relative error {formats.error(number(run.verify['max_relative_error']))}"
    counts = f"{same:,}{NBSP}of{NBSP}{images:,}"
    if not is_exact(run):
        return f"The recast model does not start exactly as its parent: {counts} predictions agree ({error})"
    how = "bit for bit" if run.verify["bitwise"] is True else error
    return f"The recast model starts with the parent’s exact predictions ({counts}, {how})"


def _became(run: Run) -> str:
    """How many layers became attention, and when: verify.json only describes the network before training."""
    if run.switching is None:
        return "When layers became attention was not written down (no schedule.json)"
    epochs = [switch.epoch for switch in run.switching.switches]
    when = f" from epoch{NBSP}{epochs[0]} to epoch{NBSP}{epochs[-1]}" if epochs else ""
    if len(set(epochs)) == 1:
        when = f" at the start of epoch{NBSP}{epochs[0]}"
    layers = formats.plural(len(run.switching.schedule.layers), "layer")
    return f"{len(run.switching.switched)} of {layers} became attention{when}"


def _reaches(run: Run, value: float) -> str:
    label = METRICS[run.main[1]].in_text
    what = f"a{'n' * label.startswith('m')} {label} of " * (not run.task.counts_images)
    return f"reaches {what}{formats.percent(value)}"


def _end(run: Run) -> Verdict:
    recast, finetuned, parent = (accuracy(run, arm) for arm in ("recast", "finetuned", "parent"))
    if run.epochs == 0:
        standing = f"As it stands it {_reaches(run, recast)}." if math.isfinite(recast) else ""
        return Verdict("The recast network has not been trained.", standing)
    planned = run.recipe.epochs
    count = f"{run.epochs} of {planned} epochs" if planned > run.epochs else formats.plural(run.epochs, "epoch")
    if not math.isfinite(recast):
        return Verdict("The accuracy of the recast network was not measured.", f"It was trained for {count}.")
    reached = f"After {count} it {_reaches(run, recast)}"
    names, worse = words(run), harmed(run)
    advice = _advice(run) if worse else ""
    if not math.isfinite(finetuned):
        if "recast" in worse:
            return Verdict(_fallen(parent, recast), f"{reached}.{advice}")
        if math.isfinite(parent) and "parent" in names.others:
            caution = "more training alone may explain that" if recast > parent else "that is no fair comparison"
            reached += f", {_against(recast - parent, 'its parent')}; {caution}"
        return Verdict(f"Nothing to compare with: there is no run of {names.control}.", f"{reached}.")
    headline = f"The recast network ends {_against(recast - finetuned, names.control)}."
    behind = ""
    if run.task.counts_images and (counted := round(abs(recast - finetuned) / 100 * test_images(run))):
        behind = f"{counted:,}{NBSP}of{NBSP}{test_images(run):,} images; "
    paired = run.difference("finetuned", *run.main)
    if paired is not None and paired.low < paired.high:  # equal where no image of these changed sides
        behind = f"95 % interval {formats.interval(paired.low, paired.high)}, over the images; "
        if not formats.leaves_out_zero(paired.low, paired.high):
            headline = f"The recast network is not shown to differ from {names.control}."
    by_training = parent - finetuned > (parent - recast) / 2  # rather than by attention
    if "recast" in worse and (by_training or _shown(run) >= 0):
        headline = _fallen(parent, recast, finetuned if "finetuned" in worse else math.nan)
    elif worse == ["finetuned"]:
        headline = f"{headline[:-1]}, which training made worse."
    difference = formats.signed(recast - finetuned, 2 if abs(recast - finetuned) < 0.095 else 1)
    reached += f", against {formats.percent(finetuned)}: {difference} points"
    return Verdict(headline, f"{reached} ({behind}one seed: a first look, not evidence).{advice}")


def _advice(run: Run) -> str:
    """What to try where an arm ends below the parent as it was."""
    paired = run.difference("parent", *run.main) if "recast" in harmed(run) else None
    gap = f" ({formats.signed(paired.value)}, {formats.interval(paired.low, paired.high)})" if paired else ""
    return (
        f" The parent as it was has {formats.percent(accuracy(run, 'parent'))}{gap}. Try a lower --lr (here "
        f"{run.recipe.optim.lr:g}), the augmentation that the parent was trained with, or more --epochs."
    )


def _fallen(parent: float, recast: float, finetuned: float = math.nan) -> str:
    both = math.isfinite(finetuned)
    fell = f"{formats.percent(parent)} fell to {formats.percent(recast)}"
    fell += f", and to {formats.percent(finetuned)} without attention" if both else ""
    return f"Training made the {'networks' if both else 'recast network'} worse than the parent as it was: {fell}."


def _against(difference: float, other: str) -> str:
    if abs(difference) < 0.005:
        return f"level with {other}"
    return f"{formats.points(abs(difference))}{NBSP}points {'above' if difference > 0 else 'below'} {other}"


def joint_verdict(runs: Sequence[Run]) -> Verdict:
    """What several runs allow to say."""
    rest = [run for run in runs if not run.is_plain]
    if not rest:
        return Verdict(f"None of these {len(runs)} runs recast anything.", "")
    if len(rest) < len(runs):
        headline, numbers = verdict(rest[0]) if len(rest) == 1 else joint_verdict(rest)
        return Verdict(headline, f"{len(runs) - len(rest)} of {len(runs)} runs recast nothing. {numbers}")
    start, names = f"{_joint_start(runs)}.", words(*runs)
    gaps = {arm: [accuracy(run, "recast") - accuracy(run, arm) for run in runs] for arm in names.others}
    compared = sum(map(math.isfinite, gaps["finetuned"]))
    if not compared:
        return Verdict(f"Nothing to compare with: there is no run of {names.control}.", start)
    if not why_no_mean(runs) and compared == len(runs):
        mean, low, high = mean_interval(gaps["finetuned"])
        ends = f"is on average {_against(mean, names.control)}"
        if not formats.leaves_out_zero(low, high):
            ends = f"is not shown to differ from {names.control}"
        spread = f"{formats.signed(mean)} points (95 % interval over the seeds {formats.interval(low, high)})"
        if all(map(math.isfinite, gaps.get("parent", [math.nan]))):
            mean, low, high = mean_interval(gaps["parent"])
            if round(high, 1) < 0:
                ends = f"ends below {names.parent}: training made it worse"
                spread += f" against {names.control}, {formats.signed(mean)} ({formats.interval(low, high)}) against "
                spread += names.parent
        return Verdict(f"Over {len(runs)} seeds the recast network {ends}.", f"In the mean {spread}. {start}")
    signs = [_shown(run) for run, gap in zip(runs, gaps["finetuned"], strict=True) if math.isfinite(gap)]
    above, below, none = (signs.count(sign) for sign in (1, -1, 0))
    headline = f"The recast network is shown to end above {names.control} in {above} of {compared} runs."
    if worse := sum("recast" in harmed(run) for run in runs):
        headline = f"In {worse} of {len(runs)} runs training made the recast network worse than the parent as it was."
    behind = f"It is shown to end below in {below}; in {none} no difference is shown."
    if unknown := sum(run.difference("finetuned", *run.main) is None for run in runs):
        behind += f" Intervals are missing of {unknown} (recast evaluate)."
    return Verdict(headline, f"{behind} {start}")


def _shown(run: Run) -> int:
    """1 where the recast network ends above the fine-tuned one and the interval of that leaves out 0, −1 below."""
    paired = run.difference("finetuned", *run.main)
    if paired is None or not formats.leaves_out_zero(paired.low, paired.high):
        return 0
    return 1 if paired.value > 0 else -1


def _joint_start(runs: Sequence[Run]) -> str:
    """How many began as their parents, and how many were recast during training."""
    before = [run for run in runs if not run.is_scheduled]
    parts = []
    if before:
        exact = sum(map(is_exact, before))
        parts.append(f"{exact} of {len(before)} recast models start with their parent’s exact predictions")
    if len(before) < len(runs):
        parts.append(f"{len(runs) - len(before)} of {len(runs)} became attention during training")
    return "; ".join(parts)


def why_no_mean(runs: Sequence[Run]) -> str:
    """Why the runs have no mean, in one sentence; empty where they are one recipe with different seeds.

    Paths count by their last name only: the same file may lie anywhere.
    """
    if len(runs) < 2:
        return "A mean needs at least two runs."
    if len({run.data_key for run in runs}) > 1:
        return "No mean is given: these runs are of different data."
    counts = sorted({row.n for run in runs for row in run.rows if row.suite == run.main[0]})
    if len(counts) > 1:
        found = " and ".join(f"{count:,}" for count in counts)
        return f"No mean is given: these runs were measured on different numbers of images ({found})."
    recipes = [{key: value for key, value in flat(run.recipe).items() if key not in MAY_DIFFER} for run in runs]
    for recipe, (section, field) in product(recipes, PATHS):
        path = recipe[f"{section}.{field}"]
        recipe[f"{section}.{field}"] = path and PurePath(path).name
    differ = sorted(key for key in recipes[0] if any(recipe[key] != recipes[0][key] for recipe in recipes))
    if differ:
        return f"No mean is given: these runs differ in more than the seed ({listed(differ, LISTED)})."
    if len({run.epochs for run in runs}) > 1:
        return "No mean is given: these runs have not been trained for the same number of epochs."
    seeds = [run.recipe.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        return "No mean is given: some of these runs have the same seed, so a mean would count one result twice."
    return ""
