"""Summarize a run: tiles, and how it was made."""

from __future__ import annotations

import math
from collections.abc import Mapping

from recast.lab.analysis.records import Wakefulness
from recast.lab.files import number
from recast.lab.records import ARMS
from recast.lab.report import formats
from recast.lab.report.formats import NBSP
from recast.lab.report.labels import CORRUPTIONS, suite_title, words
from recast.lab.report.load import Run
from recast.lab.report.verdict import accuracy, kept_predictions


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return the key numbers: label, value and detail of each."""
    if run.is_plain:
        return [(f"{run.judged} at the end", formats.percent(accuracy(run, "finetuned")), "nothing was recast")]
    cards = []
    if run.verify is not None:
        same, images = kept_predictions(run)
        relative = formats.error(number(run.verify["max_relative_error"]))
        detail = "outputs equal bit for bit" if run.verify["bitwise"] is True else f"max relative error {relative}"
        cards.append(("Predictions unchanged by the recast", f"{same:,} of{NBSP}{images:,}", detail))
    end = f"{run.judged} at the end" if run.epochs else f"{run.judged}, untrained"
    cards.append(_compared(run, end, {arm: accuracy(run, arm) for arm in ARMS}))
    for suite in CORRUPTIONS:
        corrupted = {arm: run.value(arm, suite, "top1/mean") for arm in ARMS}
        if math.isfinite(corrupted["recast"]):
            cards.append(_compared(run, f"Top-1: {suite_title(suite, short=True)}", corrupted))
            break
    if run.plan is not None:
        before, after = run.plan.before.macs, run.plan.after.macs
        detail = f"{formats.compact(before)} → {formats.compact(after)} MACs per image"
        speeds = [run.value(arm, "cost", "images_per_second") for arm in ("finetuned", "recast")]
        if all(speed > 0 for speed in speeds):  # NaN if not measured
            old, new = (f"{1000 / speed:.3g}" for speed in speeds)
            detail += f"; measured {old} → {new}{NBSP}ms"
        cards.append(("Compute", formats.share(after, before), detail))
    if (attention := Wakefulness.of(run.metrics[-1].layers)) is not None and run.epochs:
        detail = attention.remedy(run.recipe.recast.query_key) or "beyond the effect of a global mean"
        cards.append(("Heads that are awake", f"{attention.awake} of{NBSP}{attention.heads}", detail))
    return cards


def _compared(run: Run, label: str, values: Mapping[str, float]) -> tuple[str, str, str]:
    """Compare with the fine-tuned parent, else with the parent."""
    names, detail = words(run), "no baseline"
    for arm, name in (("parent", names.parent), ("finetuned", names.control)):
        difference = values["recast"] - values[arm]
        if math.isfinite(difference) and arm in names.others:
            detail = f"{formats.signed(difference)} points against {name}"
    return label, formats.percent(values["recast"]), detail


def facts(run: Run) -> dict[str, str]:
    """Return how the run was made."""
    environment = run.environment
    versions = [f"{name} {environment[name]}" for name in ("recast", "torch", "timm", "python") if name in environment]
    machine = [str(environment[name]) for name in ("platform", "device") if name in environment]
    if count := environment.get("cpu_count"):
        machine.append(f"{count} CPUs")
    values = {
        "Command": environment.get("command"),
        "Run folder": run.name,
        "Seed": run.recipe.seed,
        "Versions": ", ".join(versions),
        "Machine": ", ".join(machine),
        "Date": environment.get("date"),
        "Time": formats.duration(number(environment.get("seconds"))),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "", formats.MISSING)}
