"""Summarize a run: tiles, notes on chance, facts, images won and lost, and suites that are missing."""

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

MANY = 20  # comparisons of which one excludes 0 by chance, at 95 %


def tiles(run: Run) -> list[dict[str, str]]:
    """Return the key numbers: label, value and detail of each."""
    if run.is_plain:
        reached = formats.percent(accuracy(run, "finetuned"))
        return [_tile(f"{run.judged} at the end", reached, "nothing was recast")]
    cards = []
    if run.verify is not None:
        same, images = kept_predictions(run)
        relative = formats.error(number(run.verify["max_relative_error"]))
        detail = "outputs equal bit for bit" if run.verify["bitwise"] is True else f"max relative error {relative}"
        if run.is_scheduled:
            detail = f"all layers at once, before training; {detail}"
        cards.append(_tile("Predictions unchanged by the recast", f"{same:,} of{NBSP}{images:,}", detail))
    end = f"{run.judged} at the end" if run.epochs else f"{run.judged}, untrained"
    cards.append(_compared(run, end, {arm: accuracy(run, arm) for arm in ARMS}))
    for suite in CORRUPTIONS:
        corrupted = {arm: run.value(arm, suite, "top1/mean") for arm in ARMS}
        if math.isfinite(corrupted["recast"]):
            images_are = "ImageNet-C" if suite == "imagenet-c" else "corrupted images"
            cards.append(_compared(run, f"Top-1 on {images_are}", corrupted))
            break
    cards += _extremes(run)
    if totals := run.plan.totals:
        before, after = totals.before.macs, totals.after.macs
        how = "as attention" if run.recipe.recast.gate == "bias" else "with every head open"
        detail = f"{formats.compact(before)} → {formats.compact(after)} MACs per image"
        speeds = {arm: run.value(arm, "cost", "images_per_second") for arm in ARMS}
        control = "finetuned" if speeds["finetuned"] > 0 else "parent"  # the time of a detector depends on its training
        if all(speeds[arm] > 0 for arm in (control, "recast")):  # NaN if not measured
            old, new = (formats.significant(1000 / speeds[arm], 3) for arm in (control, "recast"))
            detail += f"; measured {old} → {new}{NBSP}ms"
        label = f"Compute {how if run.recipe.has_layers else 'with attention pooling'}"
        cards.append(_tile(label, formats.share(after, before), detail))
    if run.metrics and (attention := Wakefulness.of(run.metrics[-1].layers)) is not None and run.epochs:
        detail = attention.remedy if attention.slept else "beyond the effect of a global mean"
        cards.append(_tile("Heads that are awake", f"{attention.awake} of{NBSP}{attention.heads}", detail))
    return cards


def _tile(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _extremes(run: Run) -> list[dict[str, str]]:
    """Return the largest significant gain and loss against the control arm over all suites."""
    compared = [line for line in run.differences if (line.model, line.against) == ("recast", "finetuned")]
    accuracies = [line for line in compared if is_accuracy(line.metric)]
    significant = [line for line in accuracies if formats.leaves_out_zero(line.low, line.high)]
    cards = []
    for name, sign in (("loss", -1),) if harmed(run) else (("gain", 1), ("loss", -1)):
        line = max(significant, key=lambda line: sign * line.value, default=None)
        if line is not None and sign * line.value > 0:
            detail = f"{in_suite(line.suite, line.metric)}; 95 % interval {formats.interval(line.low, line.high)}"
            if len(accuracies) >= MANY:
                by_chance = round(len(accuracies) / 20)
                detail += f"; largest of {len(accuracies)} differences, of which about {by_chance} exclude 0 by chance"
            label = f"Largest {name} against {words(run).control}"
            cards.append(_tile(label, f"{formats.signed(line.value)}{NBSP}points", detail))
    return cards


def _compared(run: Run, label: str, values: Mapping[str, float]) -> dict[str, str]:
    names, detail = words(run), "no baseline"
    baselines = [("parent", names.parent), ("finetuned", names.control)]  # the last one available is shown
    if "recast" in harmed(run):
        baselines.reverse()
    for arm, name in baselines:
        difference = values["recast"] - values[arm]
        if math.isfinite(difference) and arm in names.others:
            size = formats.points(abs(difference))
            more = f"{size} points {'more' if difference > 0 else 'less'} than {name}"
            detail = more if abs(difference) >= 0.005 else f"the same as {name}"
    return _tile(label, formats.percent(values["recast"]), detail)


def chance(run: Run) -> dict[str, Any]:
    """Return the uncertainty of the accuracies, and how much fine-tuning reduced the parent's."""
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
    """Return how the run was made."""
    environment = run.environment
    versions = [f"{name} {environment[name]}" for name in ("recast", "torch", "timm", "python") if name in environment]
    machine = [str(environment[name]) for name in ("platform", "device") if name in environment]
    machine += [f"{environment['cpu_count']} CPUs"] if "cpu_count" in environment else []
    values = {
        "Command": environment.get("command"),
        "Run folder": run.name,
        "Seed": str(run.recipe.seed),
        "Versions": ", ".join(versions),
        "Machine": ", ".join(machine),
        "Date": environment.get("date"),
        "Time": formats.duration(number(environment.get("seconds"))),
        "Verified with": (run.verify or {}).get("backend"),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "", formats.MISSING)}


def provenance(run: Run) -> list[dict[str, Any]]:
    """Return the suites of evaluation.json, grouped by command and machine, then by data and options."""
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
        line["passes"].add((made.date, made.seconds))  # suites measured together share the seconds
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
    """Return the suites that were not measured and the command that measures them."""
    tables = {"fourier": run.fourier, "heads": run.heads, "cka": run.cka, "agreement": run.agreement}
    have = {row.suite for row in run.rows} | {name for name, table in tables.items() if table}
    if have & set(CORRUPTIONS):
        have.add("basic")
    if run.is_plain:
        have |= {"cka", "agreement"}  # they compare arms
    if not run.recipe.has_layers:
        have.add("heads")
    have |= set(run.task.unasked)
    absent = [name for name in suites_of(run.task) if SUITES[name].missing and name not in have]
    command = follow_up("evaluate", str(run.path), "--suite", ",".join(absent), functions=functions_of(run.recipe))
    return [SUITES[name].missing for name in absent], command if absent else ""


def won_and_lost(run: Run) -> list[dict[str, Any]]:
    """Return the images on which the recast arm and another arm differ, with a test of significance."""
    pairs = []
    names = words(run)
    for arm, name in (("finetuned", names.control), ("parent", names.parent)):
        images = [image for image in run.agreement if image.get(arm) and image.get("recast")]
        if not images or arm not in names.others:
            continue
        agreed = Agreement.of(*([image[key] for image in images] for key in ("label", "recast", arm)))
        won, lost, p = len(agreed.won), len(agreed.lost), agreed.p_value
        chance = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
        net = formats.signed(100 * (won - lost) / agreed.n, 2)
        paired = run.difference(arm, *run.main)  # that of the table, if it covers these images
        same = paired is not None and paired.n == agreed.n and paired.low < paired.high
        low, high = (paired.low, paired.high) if paired and same else net_interval(won, lost, agreed.n)
        spread = formats.interval(low, high, 2)
        sentence = (
            f"Against {name}: {formats.plural(won, 'image')} won, {lost:,} lost of {agreed.n:,}, "
            f"net {net} points (95 % interval {spread}; McNemar’s exact test {chance})."
        )
        changed = {"won": [images[i] for i in agreed.won], "lost": [images[i] for i in agreed.lost]}
        counts = {"right": agreed.both_right, "won": won, "lost": lost, "wrong": agreed.both_wrong}
        pairs.append(
            {"arm": arm, "name": name, "agreed": agreed, "counts": counts, "changed": changed, "sentence": sentence}
        )
    return pairs
