"""State what the numbers of a run support: a headline, and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import PurePath
from typing import NamedTuple

from recast.analysis.records import Wakefulness
from recast.errors import listed
from recast.files import number
from recast.lab.recipe import flat, how_it_runs, paths
from recast.lab.report import formats
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import words
from recast.lab.report.load import Run
from recast.lab.statistics import mean_interval
from recast.lab.suites import METRICS

EXACT = 1e-5  # largest relative error of the outputs of the same function (fp32)
LISTED = 4  # differences between recipes that are named


def accuracy(run: Run, model: str) -> float:
    """Return top-1 (mIoU, box AP) of an arm in percent, from rows.csv, else from its last validation."""
    measured = run.value(model, *run.main)
    if math.isfinite(measured):
        return measured
    if model == ("finetuned" if run.is_plain else "recast"):
        return run.metrics[-1].metrics.get(run.main[1], math.nan) if run.metrics else math.nan
    if model == "finetuned" and run.control and run.control[-1].epoch > 0:
        return run.control[-1].metrics.get(run.main[1], math.nan)
    return run.control[0].metrics.get(run.main[1], math.nan) if model == "parent" and run.control else math.nan


def test_images(run: Run) -> int:
    """Return the number of images behind the clean accuracy; 0 if unknown."""
    row = run.row("recast", *run.main)
    return row.n if row else 0


def harmed(run: Run) -> list[str]:
    """Return the trained arms that end significantly below the parent before fine-tuning.

    The test is the paired 95 % interval, else the wider unpaired one, ± 1.96 √(Σ p (100 − p) / n).
    """
    if "parent" not in words(run).others or run.epochs == 0:
        return []
    arms = []
    for arm in ("finetuned", "recast"):
        paired = run.difference("parent", *run.main) if arm == "recast" else None
        rows = [row for name in ("parent", arm) if (row := run.row(name, *run.main)) and row.n]
        if paired is not None:
            high = paired.high
        elif len(rows) == 2 and run.task.counts_images:
            error = 1.96 * math.sqrt(sum(max(row.value * (100 - row.value), 0) / row.n for row in rows))
            high = rows[1].value - rows[0].value + error
        else:
            continue
        arms += [arm] if round(high, 1) < 0 else []
    return arms


def kept_predictions(run: Run) -> tuple[int, int]:
    """Return (predictions equal to the parent's, images) of verify.json.

    Detectors have no likeliest class: all predictions count as equal if the outputs are bitwise equal.
    """
    assert run.verify is not None
    images, share = int(number(run.verify["images"])), number(run.verify["argmax_agreement"])
    share = 1.0 if math.isnan(share) and run.verify["bitwise"] is True else share
    return round(share * images) if math.isfinite(share) else 0, images


def is_exact(run: Run) -> bool:
    """Return True if the recast model started as its parent: equal predictions, and outputs equal up to rounding."""
    if run.verify is None:
        return False
    same, images = kept_predictions(run)
    return same == images and number(run.verify["max_relative_error"]) <= EXACT


class Verdict(NamedTuple):
    """The headline of a page and the sentences with its numbers."""

    headline: str
    numbers: str


def verdict(run: Run) -> Verdict:
    """Return the verdict on a run."""
    if run.is_plain:
        trained = f"trained for {formats.plural(run.epochs, 'epoch')}" if run.epochs else "not trained"
        reached = _reaches(run, accuracy(run, "finetuned"))
        return Verdict("Nothing was recast.", f"The network, {trained}, {reached}.")
    headline, reached = _end(run)
    began = _became(run) if run.is_scheduled else _start(run)
    return Verdict(headline, " ".join(part for part in (reached, _attention(run), f"{began}.") if part))


def _attention(run: Run) -> str:
    """Return a sentence on how many heads attend; if none does, the run is no evidence about attention."""
    state = Wakefulness.of(run.metrics[-1].layers) if run.epochs and run.metrics else None
    if state is None:
        return ""
    text = str(state)
    return f"{text[0].upper()}{text[1:]}{': no evidence about attention' if state.slept else ''}."


def _start(run: Run) -> str:
    if run.verify is None:
        return "Whether the recast model started as its parent was not measured (no verify.json)"
    same, images = kept_predictions(run)
    error = f"max relative error {formats.error(number(run.verify['max_relative_error']))}"
    counts = f"{same:,}{NBSP}of{NBSP}{images:,}"
    if not is_exact(run):
        return f"The recast model does not start exactly as its parent: {counts} predictions agree ({error})"
    how = "bit for bit" if run.verify["bitwise"] is True else error
    return f"The recast model starts with the parent’s exact predictions ({counts}, {how})"


def _became(run: Run) -> str:
    """Return how many layers became attention, and when; verify.json only covers the network before training."""
    if run.switching is None:
        return "When layers became attention is unknown (no schedule.json)"
    epochs = [switch.epoch for switch in run.switching.switches]
    when = f" from epoch{NBSP}{epochs[0]} to epoch{NBSP}{epochs[-1]}" if epochs else ""
    if len(set(epochs)) == 1:
        when = f" at the start of epoch{NBSP}{epochs[0]}"
    layers = formats.plural(len(run.switching.schedule.layers), "layer")
    return f"{len(run.switching.switched)} of {layers} became attention{when}"


def _reaches(run: Run, value: float) -> str:
    label = METRICS[run.main[1]].in_text
    metric = f"a{'n' * label.startswith('m')} {label} of " * (not run.task.counts_images)
    return f"reaches {metric}{formats.percent(value)}"


def _end(run: Run) -> Verdict:
    recast, finetuned, parent = (accuracy(run, arm) for arm in ("recast", "finetuned", "parent"))
    if run.epochs == 0:
        numbers = f"Untrained, it {_reaches(run, recast)}." if math.isfinite(recast) else ""
        return Verdict("The recast network has not been trained.", numbers)
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
            caution = "more training alone may explain that" if recast > parent else "this is no fair comparison"
            reached += f", {_against(recast - parent, 'its parent')}; {caution}"
        return Verdict(f"Nothing to compare with: there is no run of {names.control}.", f"{reached}.")
    headline = f"The recast network ends {_against(recast - finetuned, names.control)}."
    behind = ""
    if run.task.counts_images and (counted := round(abs(recast - finetuned) / 100 * test_images(run))):
        behind = f"{counted:,}{NBSP}of{NBSP}{test_images(run):,} images; "
    paired = run.difference("finetuned", *run.main)
    if paired is not None and paired.low < paired.high:  # equal if no prediction changed
        behind = f"95 % interval {formats.interval(paired.low, paired.high)}, over the images; "
        if not formats.leaves_out_zero(paired.low, paired.high):
            headline = f"The recast network is not shown to differ from {names.control}."
    by_training = parent - finetuned > (parent - recast) / 2  # rather than by attention
    if "recast" in worse and (by_training or _shown(run) >= 0):
        headline = _fallen(parent, recast, finetuned if "finetuned" in worse else math.nan)
    elif worse == ["finetuned"]:
        headline = f"{headline[:-1]}, which fine-tuning made worse."
    difference = formats.signed(recast - finetuned, 2 if abs(recast - finetuned) < 0.095 else 1)
    reached += f", against {formats.percent(finetuned)}: {difference} points"
    return Verdict(headline, f"{reached} ({behind}one seed: preliminary).{advice}")


def _advice(run: Run) -> str:
    """Return what to try if an arm ends below the parent before fine-tuning."""
    paired = run.difference("parent", *run.main) if "recast" in harmed(run) else None
    gap = f" ({formats.signed(paired.value)}, {formats.interval(paired.low, paired.high)})" if paired else ""
    return (
        f" Before fine-tuning, the parent has {formats.percent(accuracy(run, 'parent'))}{gap}. Try a lower --lr (here "
        f"{run.recipe.optim.lr:g}), the augmentation of the parent's training, or more --epochs."
    )


def _fallen(parent: float, recast: float, finetuned: float = math.nan) -> str:
    both = math.isfinite(finetuned)
    fall = f"{formats.percent(parent)} fell to {formats.percent(recast)}"
    fall += f", and to {formats.percent(finetuned)} without attention" if both else ""
    networks = "networks" if both else "recast network"
    return f"Training made the {networks} worse than the parent before fine-tuning: {fall}."


def _against(difference: float, other: str) -> str:
    if abs(difference) < 0.005:
        return f"level with {other}"
    return f"{formats.points(abs(difference))}{NBSP}points {'above' if difference > 0 else 'below'} {other}"


def joint_verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on several runs."""
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
        return Verdict(
            f"Over {len(runs)} seeds the recast network {ends}.", f"The mean difference is {spread}. {start}"
        )
    signs = [_shown(run) for run, gap in zip(runs, gaps["finetuned"], strict=True) if math.isfinite(gap)]
    above, below, none = (signs.count(sign) for sign in (1, -1, 0))
    headline = f"The recast network ends significantly above {names.control} in {above} of {compared} runs."
    if worse := sum("recast" in harmed(run) for run in runs):
        headline = f"In {worse} of {len(runs)} runs training made the recast network worse than {names.parent}."
    behind = f"It ends significantly below in {below}; in {none} there is no significant difference."
    if unknown := sum(run.difference("finetuned", *run.main) is None for run in runs):
        behind += f" {unknown} have no interval (run recast evaluate)."
    return Verdict(headline, f"{behind} {start}")


def _shown(run: Run) -> int:
    """Return 1 or −1 if the recast network ends significantly above or below the fine-tuned one, else 0."""
    paired = run.difference("finetuned", *run.main)
    if paired is None or not formats.leaves_out_zero(paired.low, paired.high):
        return 0
    return 1 if paired.value > 0 else -1


def _joint_start(runs: Sequence[Run]) -> str:
    """Return how many runs started as their parents, and how many were recast during training."""
    before = [run for run in runs if not run.is_scheduled]
    parts = []
    if before:
        exact = sum(map(is_exact, before))
        parts.append(f"{exact} of {len(before)} recast models start with their parent’s exact predictions")
    if len(before) < len(runs):
        parts.append(f"{len(runs) - len(before)} of {len(runs)} became attention during training")
    return "; ".join(parts)


def why_no_mean(runs: Sequence[Run]) -> str:
    """Return why the runs cannot be averaged; empty if they are one recipe with different seeds.

    Paths are compared by their last component.
    """
    if len(runs) < 2:
        return "A mean needs at least two runs."
    if len({run.data_key for run in runs}) > 1:
        return "No mean: the runs use different data."
    counts = sorted({row.n for run in runs for row in run.rows if row.suite == run.main[0]})
    if len(counts) > 1:
        numbers = " and ".join(f"{count:,}" for count in counts)
        return f"No mean: the runs were measured on different numbers of images ({numbers})."
    may_differ = {*how_it_runs(), "seed", "compile"}
    recipes = [{key: value for key, value in flat(run.recipe).items() if key not in may_differ} for run in runs]
    for recipe, key in product(recipes, map(".".join, paths())):
        if path := recipe.get(key):
            recipe[key] = PurePath(path).name
    keys = {key for recipe in recipes for key in recipe}
    differ = sorted(key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes))
    if differ:
        return f"No mean: the runs differ in more than the seed ({listed(differ, LISTED)})."
    if len({run.epochs for run in runs}) > 1:
        return "No mean: the runs were trained for different numbers of epochs."
    seeds = [run.recipe.seed for run in runs]
    if len(set(seeds)) < len(seeds):
        return "No mean: some runs have the same seed, so a mean would count a result twice."
    return ""
