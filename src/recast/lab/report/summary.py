"""What a reader wants first, and would ask last: tiles, notes, facts, images won and lost, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recast.analysis.records import Wakefulness
from recast.files import number
from recast.lab.recipe import functions_of
from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import CORRUPTIONS, in_suite, is_accuracy, suite_title, words
from recast.lab.report.load import Run
from recast.lab.report.verdict import accuracy, harmed, kept_predictions, test_images
from recast.lab.statistics import Agreement, net_interval
from recast.lab.suites import SUITES
from recast.lab.tasks import suites_of
from recast.models.trust import follow_up

MANY = 20
"""Comparisons of which one leaves out 0 by chance, at 95 %."""


def tiles(run: Run) -> list[dict[str, str]]:
    """The few numbers a reader wants first."""
    if run.is_plain:
        reached = formats.percent(accuracy(run, "finetuned"))
        return [{"label": f"{run.judged} at the end", "value": reached, "detail": "nothing was recast"}]
    found = []
    if run.verify is not None:
        same, images = kept_predictions(run)
        relative = formats.error(number(run.verify["max_relative_error"]))
        detail = "outputs equal bit for bit" if run.verify["bitwise"] is True else f"max relative error {relative}"
        if run.is_scheduled:
            detail = f"all layers at once, before training; {detail}"
        same_of_all = f"{same:,} of{NBSP}{images:,}"
        found.append({"label": "Predictions kept by the recast", "value": same_of_all, "detail": detail})
    end = f"{run.judged} at the end" if run.epochs else f"{run.judged}, untrained"
    found.append(_compared(run, end, {arm: accuracy(run, arm) for arm in ARMS}))
    for suite in CORRUPTIONS:
        corrupted = {arm: run.value(arm, suite, "top1/mean") for arm in ARMS}
        if math.isfinite(corrupted["recast"]):
            images_are = "ImageNet-C" if suite == "imagenet-c" else "corrupted images"
            found.append(_compared(run, f"Top-1 on {images_are}", corrupted))
            break
    found += _extremes(run)
    if totals := run.plan.get("totals"):
        before, after = (totals[when]["macs"] for when in ("before", "after"))
        how = "as attention" if run.recipe.recast.gate == "bias" else "with every head open"
        detail = f"{formats.compact(before)} → {formats.compact(after)} MACs per image"
        speeds = {arm: run.value(arm, "cost", "images_per_second") for arm in ARMS}
        control = "finetuned" if speeds["finetuned"] > 0 else "parent"  # a detector's time hangs on what it was taught
        if all(speeds[arm] > 0 for arm in (control, "recast")):  # not where it was not measured, NaN
            old, new = (formats.significant(1000 / speeds[arm], 3) for arm in (control, "recast"))
            detail += f"; measured {old} → {new}{NBSP}ms"
        label = f"Compute {how if run.recipe.has_layers else 'with attention pooling'}"
        found.append({"label": label, "value": formats.share(after, before), "detail": detail})
    if run.metrics and (attention := Wakefulness.of(run.metrics[-1].layers)) is not None and run.epochs:
        value = f"{attention.awake} of{NBSP}{attention.heads}"
        detail = "they do what a global mean would not" if not attention.slept else attention.remedy
        found.append({"label": "Heads whose attention is awake", "value": value, "detail": detail})
    return found


def _extremes(run: Run) -> list[dict[str, str]]:
    """The largest gain and the largest loss against the control arm whose intervals leave out 0, over all suites."""
    compared = [line for line in run.differences if (line.model, line.against) == ("recast", "finetuned")]
    every = [line for line in compared if is_accuracy(line.metric)]
    clear = [line for line in every if formats.leaves_out_zero(line.low, line.high)]
    found = []
    for what, sign in (("loss", -1),) if harmed(run) else (("gain", 1), ("loss", -1)):
        line = max(clear, key=lambda line: sign * line.value, default=None)
        if line is not None and sign * line.value > 0:
            label = f"Largest {what} against {words(run).control}"
            detail = f"{in_suite(line.suite, line.metric)}; 95 % interval {formats.interval(line.low, line.high)}"
            if len(every) >= MANY:
                few = round(len(every) / 20)
                detail += f"; the largest of {len(every)} differences, about {few} of which leave out 0 by chance"
            found.append({"label": label, "value": f"{formats.signed(line.value)}{NBSP}points", "detail": detail})
    return found


def _compared(run: Run, label: str, values: Mapping[str, float]) -> dict[str, str]:
    names, detail = words(run), "nothing to compare with"
    others = [("parent", names.parent), ("finetuned", names.control)]  # the last counts
    if "recast" in harmed(run):
        others.reverse()
    for arm, name in others:
        difference = values["recast"] - values[arm]
        if math.isfinite(difference) and arm in names.others:
            size = formats.points(abs(difference))
            more = f"{size} points {'more' if difference > 0 else 'less'} than {name}"
            detail = more if abs(difference) >= 0.005 else f"the same as {name}"
    return {"label": label, "value": formats.percent(values["recast"]), "detail": detail}


def chance(run: Run) -> dict[str, Any]:
    """How far the accuracies of the table are due to chance, and how much fine-tuning cost the parent itself."""
    images, reached = test_images(run), accuracy(run, "recast")
    cost = accuracy(run, "parent") - accuracy(run, "finetuned")
    is_measured = images > 0 and math.isfinite(reached) and run.task.counts_images
    return {
        "cost": formats.points(cost) if cost > 0.5 else "",
        "images": formats.plural(images, "test image") if is_measured else "",
        "one": formats.decimal(100 / max(images, 1), 2),
        "reached": formats.percent(reached),
        "error": formats.decimal(math.sqrt(max(reached * (100 - reached), 0) / max(images, 1))),
        "paired": any(math.isfinite(gap.low) for gap in run.differences),
    }


def facts(run: Run) -> dict[str, str]:
    """What the run was made with."""
    environment = run.environment
    versions = [f"{name} {environment[name]}" for name in ("recast", "torch", "timm", "python") if name in environment]
    machine = [str(environment[name]) for name in ("platform", "device") if name in environment]
    machine += [f"{environment['cpu_count']} CPUs"] if "cpu_count" in environment else []
    found = {
        "Command": environment.get("command"),
        "Run folder": run.name,
        "Seed": str(run.recipe.seed),
        "Versions": ", ".join(versions),
        "Machine": ", ".join(machine),
        "Date": environment.get("date"),
        "Time": formats.duration(number(environment.get("seconds"))),
        "Verified with": (run.verify or {}).get("backend"),
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "", formats.MISSING)}


def provenance(run: Run) -> list[dict[str, Any]]:
    """What one command measured on one machine, as evaluation.json has it: suites of the same images and options."""
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for suite, made in run.provenance.items():
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        where = ", ".join(filter(None, (made.device, made.machine)))
        data = ", ".join(filter(None, (made.dataset, f"{made.images:,} images")))
        options = {name.replace("_", " "): value for name, value in made.options.items() if value not in (None, [], "")}
        given = ", ".join(f"{name} {_plain(value)}" for name, value in options.items())
        new = {"command": made.command, "versions": versions, "where": where, "parts": {}, "passes": set()}
        line = lines.setdefault((made.command, versions, where), new)
        line["parts"].setdefault((data, given), []).append(suite_title(suite))
        line["passes"].add((made.date, made.seconds))  # suites that share a pass over the images share its seconds
    for line in lines.values():
        days = sorted({date.partition("T")[0] for date, _ in line["passes"] if date})
        took = formats.duration(sum(seconds for _, seconds in line["passes"]))
        line["when"] = ", ".join(filter(None, (" to ".join(dict.fromkeys(days[:1] + days[-1:])), took)))
    return list(lines.values())


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def missing(run: Run) -> tuple[list[str], str]:
    """(what was not measured, the command that measures it), empty where nothing is missing."""
    tables = {"fourier": run.fourier, "heads": run.heads, "cka": run.cka, "agreement": run.agreement}
    have = {row.suite for row in run.rows} | {name for name, table in tables.items() if table}
    if have & set(CORRUPTIONS):
        have.add("basic")
    if run.is_plain:
        have |= {"cka", "agreement"}  # there is nothing to compare
    if not run.recipe.has_layers:
        have.add("heads")
    have |= set(run.task.unasked)
    absent = [name for name in suites_of(run.task) if SUITES[name].missing and name not in have]
    command = follow_up("evaluate", str(run.path), "--suite", ",".join(absent), functions=functions_of(run.recipe))
    return [SUITES[name].missing for name in absent], command if absent else ""


def won_and_lost(run: Run) -> list[dict[str, Any]]:
    """On which images the recast arm and each other arm with predictions differ, and whether that could be chance."""
    pairs = []
    names = words(run)
    for arm, name in (("finetuned", names.control), ("parent", names.parent)):
        images = [image for image in run.agreement if image.get(arm) and image.get("recast")]
        if not images or arm not in names.others:
            continue
        found = Agreement.of(*([image[key] for image in images] for key in ("label", "recast", arm)))
        won, lost, p = len(found.won), len(found.lost), found.p_value
        chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
        net = formats.signed(100 * (won - lost) / found.n, 2)
        paired = run.difference(arm, *run.main)  # the table's own, where it is of these images
        same = paired is not None and paired.n == found.n and paired.low < paired.high
        low, high = (paired.low, paired.high) if paired and same else net_interval(won, lost, found.n)
        spread = formats.interval(low, high, 2)
        sentence = (
            f"Against {name}: {formats.plural(won, 'image')} won, {lost:,} lost of {found.n:,}, "
            f"net {net} points (95 % interval {spread}; McNemar’s exact test {chance})."
        )
        changed = {"won": [images[place] for place in found.won], "lost": [images[place] for place in found.lost]}
        counts = {"right": found.both_right, "won": won, "lost": lost, "wrong": found.both_wrong}
        pairs.append(
            {"arm": arm, "name": name, "found": found, "counts": counts, "changed": changed, "sentence": sentence}
        )
    return pairs
