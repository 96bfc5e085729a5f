"""State what the numbers of a run support: a headline, and the numbers behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, NamedTuple

from recast.errors import listed
from recast.lab.config.text import flat, how_it_runs, paths
from recast.lab.evaluation.image_values import over_seeds
from recast.lab.evaluation.intervals import Interval, interval
from recast.lab.evaluation.suites import METRICS, base
from recast.lab.folder.files import number
from recast.lab.folder.records import Wakefulness
from recast.lab.pages import formats
from recast.lab.pages.formats import NBSP
from recast.lab.report.labels import words
from recast.lab.report.load import Run
from recast.surgery.exactness import TOLERANCE

LISTED = 4  # differences between recipes that are named


def accuracy(run: Run, model: str) -> float:
    """Return top-1 (mIoU, box AP) of an arm in percent, from rows.csv, else from its last validation."""
    measured = run.value(model, *run.main)
    if math.isfinite(measured):
        return measured
    if model == ("finetuned" if run.is_plain else "recast"):
        epochs = run.metrics[-1:]
    elif model == "parent":
        epochs = run.control[:1]
    else:
        epochs = [row for row in run.control[-1:] if row.epoch == run.epochs > 0]
    return epochs[0].metrics.get(run.main[1], math.nan) if epochs else math.nan


def harmed(run: Run) -> bool:
    """Return True if the recast network ends significantly below the parent before fine-tuning."""
    paired = run.difference("parent", *run.main) if "parent" in words(run).others and run.epochs else None
    return paired is not None and round(paired.high, 1) < 0


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
    return same == images and number(run.verify["max_relative_error"]) <= TOLERANCE


class Verdict(NamedTuple):
    """The headline of a page and the sentences with its numbers."""

    headline: str
    numbers: str


def verdict(run: Run) -> Verdict:
    """Return the verdict on a run."""
    if run.is_plain:
        result = formats.percent(accuracy(run, "finetuned"))
        headline = _not_finished(run) if run.unfinished else "Nothing was recast."
        return Verdict(headline, f"After {epochs_text(run)}: {run.judged} {result}.")
    headline, result = _end(run)
    start = _became(run) if run.is_scheduled else _start(run)
    return Verdict(headline, " ".join(part for part in (result, _attention(run), start) if part))


def _not_finished(run: Run) -> str:
    return f"The run is not finished: {run.unfinished}."


def epochs_text(run: Run) -> str:
    """Return the epochs of the network itself, as `7 of 30 epochs` before its end."""
    planned = run.recipe.epochs
    return f"{run.epochs} of {planned} epochs" if planned > run.epochs else formats.plural(run.epochs, "epoch")


def _end(run: Run) -> Verdict:
    recast, finetuned = (accuracy(run, arm) for arm in ("recast", "finetuned"))
    result = f"{run.judged} after {epochs_text(run)}: {formats.percent(recast)}"
    names, paired = words(run), run.difference("finetuned", *run.main)
    if run.unfinished:
        return Verdict(_not_finished(run), f"{result}.")
    if run.epochs == 0:
        return Verdict("The recast network has not been trained.", f"{result}.")
    headline = f"Nothing to compare with: there is no run of {names.control}."
    if math.isfinite(recast - finetuned):
        headline = f"The recast network ends {_against(recast - finetuned, names.control)}."
        difference = f"{formats.signed(recast - finetuned)} points"
        if paired is not None:
            difference += f", 95 % interval {formats.bounds(paired.low, paired.high)} over the images only"
            if not formats.leaves_out_zero(paired.low, paired.high):
                headline = f"The recast network is not shown to differ from {names.control}."
        result += f", against {formats.percent(finetuned)} ({difference}; one seed: preliminary)"
    if harmed(run):
        fall = f"{formats.percent(accuracy(run, 'parent'))} fell to {formats.percent(recast)}"
        headline = f"Training made the recast network worse than {names.parent}: {fall}."
        result += f". Try a lower --lr (here {run.recipe.optim.lr:g}), the parent's augmentation, or more --epochs"
    return Verdict(headline, f"{result}.")


def _against(difference: float, other: str) -> str:
    way = "above" if difference > 0 else "below"
    return f"{formats.decimal(abs(difference))}{NBSP}points {way} {other}" if difference else f"level with {other}"


def _attention(run: Run) -> str:
    """Return a sentence on how many heads attend; if none does, the run is no evidence about attention."""
    state = Wakefulness.of(run.metrics[-1].layers) if run.epochs else None
    if state is None:
        return ""
    text = str(state)
    return f"{text[0].upper()}{text[1:]}{': no evidence about attention' if state.slept else ''}."


def _start(run: Run) -> str:
    if run.verify is None:
        return "Whether the recast model started as its parent was not measured (no verify.json)."
    same, images = kept_predictions(run)
    error = f"max relative error {formats.error(number(run.verify['max_relative_error']))}"
    start = "starts" if is_exact(run) else "does not start"
    return f"The recast model {start} exactly as its parent: {same:,} of {images:,} predictions agree ({error})."


def _became(run: Run) -> str:
    """Return how many layers became attention, and when; verify.json only covers the network before training."""
    if run.switching is None:
        return "When layers became attention is unknown (no schedule.json)."
    epochs = [switch.epoch for switch in run.switching.switches]
    when = f", the first at epoch{NBSP}{epochs[0]}, the last at epoch{NBSP}{epochs[-1]}" if epochs else ""
    layers = formats.plural(len(run.switching.schedule.layers), "layer")
    return f"{len(run.switching.switched)} of {layers} became attention{when}."


def joint_verdict(runs: Sequence[Run]) -> Verdict:
    """Return the verdict on several runs; those that recast nothing do not count."""
    runs = [run for run in runs if not run.is_plain]
    if len(runs) < 2:
        return verdict(runs[0]) if runs else Verdict("Nothing was recast.", "")
    names, before = words(*runs), [run for run in runs if not run.is_scheduled]
    start = f"{sum(map(is_exact, before))} of {len(before)} recast models start exactly as their parent."
    if unfinished := sum(bool(run.unfinished) for run in runs):
        return Verdict(f"Not finished: {unfinished} of {len(runs)} runs.", start)
    gaps = [accuracy(run, "recast") - accuracy(run, "finetuned") for run in runs]
    compared = sum(map(math.isfinite, gaps))
    if not compared:
        return Verdict(f"Nothing to compare with: there is no run of {names.control}.", start)
    if not why_no_mean(runs) and compared == len(runs):
        line = mean_of(runs, *runs[0].main, "recast", "finetuned")
        ends = f"is not shown to differ from {names.control}"
        if formats.leaves_out_zero(line.low, line.high):
            ends = f"is on average {_against(line.mean, names.control)}"
        spread = f"95 % interval over seeds and images {formats.bounds(line.low, line.high)}"
        if not math.isfinite(line.high):
            spread = f"without an interval: {no_images(runs)}"
        headline = f"Over {len(runs)} seeds the recast network {ends}."
        numbers = f"The mean difference is {formats.signed(line.mean)} points ({spread})."
    else:
        signs = [_shown(run) for run, gap in zip(runs, gaps, strict=True) if math.isfinite(gap)]
        above = f"in {signs.count(1)} of {compared} runs"
        headline = f"The recast network ends significantly above {names.control} {above}."
        numbers = f"It ends significantly below in {signs.count(-1)}."
    if worse := sum(map(harmed, runs)):
        headline = f"In {worse} of {len(runs)} runs training made the recast network worse than {names.parent}."
    return Verdict(headline, f"{numbers} {start}" if before else numbers)


def mean_of(runs: Sequence[Run], suite: str, metric: str, arm: str, other: str = "") -> Interval:
    """Return a metric of an arm, or minus that of another, as the mean over runs that differ in the seed.

    Its interval covers seeds and images. That of a cost covers the runs. Without the values of the same images in every
    run it is infinite.
    """

    def value(run: Run, model: str) -> float:
        return accuracy(run, model) if (suite, metric) == run.main else run.value(model, suite, metric)

    values = [value(run, arm) - (value(run, other) if other else 0.0) for run in runs]
    if (entry := METRICS.get(base(metric))) and entry.is_cost:
        return interval([[value] for value in values])
    line, arms = None, [arm, other] if other else [arm]
    if all((suite, metric, each) in run.images for run in runs for each in arms):
        line = over_seeds(*([run.images[suite, metric, each] for run in runs] for each in arms))
    mean = math.fsum(values) / len(values)
    return replace(line, mean=mean) if line else Interval(mean, -math.inf, math.inf, math.inf)


def no_images(runs: Sequence[Run]) -> str:
    """Return why several runs have no interval, and what to do."""
    if missing := [run.name for run in runs if {(*run.main, "recast"), (*run.main, "finetuned")} - run.images.keys()]:
        return f"{listed(missing, 2)} lacks the scores of rows.csv in RUN/scores/images.npz; run recast evaluate"
    return "the runs were measured on different images"


def _shown(run: Run) -> int:
    """Return 1 or −1 if the recast network ends significantly above or below the fine-tuned one, else 0."""
    paired = run.difference("finetuned", *run.main)
    if paired is None or not formats.leaves_out_zero(paired.low, paired.high):
        return 0
    return 1 if paired.value > 0 else -1


def settings_of(run: Run) -> dict[str, Any]:
    """Return the fields of a recipe that may change a result, except the seed; of paths the last component."""
    may_differ = {*how_it_runs(), "seed", "compile"}
    recipe = {key: value for key, value in flat(run.recipe.plain()).items() if key not in may_differ}
    for key in map(".".join, paths()):
        if path := recipe.get(key):
            recipe[key] = PurePath(path).name
    return recipe


def differing(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the fields in which recipes differ."""
    keys = {key for recipe in recipes for key in recipe}
    return sorted(key for key in keys if any(recipe.get(key) != recipes[0].get(key) for recipe in recipes))


def why_no_mean(runs: Sequence[Run]) -> str:
    """Return why the runs cannot be averaged; empty if they are one recipe with different seeds.

    Paths are compared by their last component.
    """
    if len(runs) < 2:
        return "A mean needs at least two runs."
    if len({row.n for run in runs for row in run.rows if row.suite == run.main[0]}) > 1:
        return "No mean: the runs were measured on different numbers of images."
    if any(run.unfinished for run in runs):
        return "No mean: not all runs are finished."
    differ = differing(list(map(settings_of, runs)))
    if differ:
        return f"No mean: the runs differ in more than the seed ({listed(differ, LISTED)})."
    if len({run.epochs for run in runs}) > 1:
        return "No mean: the runs were trained for different numbers of epochs."
    if len({run.recipe.seed for run in runs}) < len(runs):
        return "No mean: some runs have the same seed, so a mean would count a result twice."
    return ""
