"""Render runs as one HTML page with style, script and pictures inside; its key numbers, and how a run was made."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recast.lab.folder.files import number
from recast.lab.folder.records import ARMS, Wakefulness
from recast.lab.pages import formats
from recast.lab.pages.formats import NBSP
from recast.lab.pages.template import fill_page
from recast.lab.report import curves, layers
from recast.lab.report.costs import COSTS, cost_charts, frontier, joint_frontier
from recast.lab.report.heat_maps import confusion_charts, similarity_charts
from recast.lab.report.labels import CORRUPTIONS, glossary, suite_title, words
from recast.lab.report.load import Run
from recast.lab.report.switches import switch_part
from recast.lab.report.tables import ARM_TABLES, arms_table, runs_table, seeds_table, steps_table, unchanged_by_reason
from recast.lab.report.verdict import accuracy, epochs_text, joint_verdict, kept_predictions, verdict, why_no_mean

Part = dict[str, Any]
"""Template variables of one run, or of several together."""


def run_part(run: Run, anchor: str, count: int) -> Part:
    """Return the variables of one of `count` runs of a page; empty for what was not measured."""
    head_layers = layers.head_charts(run)
    return {
        "anchor": anchor,
        "run": run,
        "words": words(run),
        "verdict": verdict(run),
        "tiles": tiles(run),
        **{name: arms_table(run, name) for name in ARM_TABLES},
        "has_control": run.is_plain or run.recipe.control or any(row.model == "finetuned" for row in run.rows),
        "costs": cost_charts([run]) if count == 1 else {},
        "frontier": frontier(run),
        "adversarial": curves.attacks(run),
        "relative": curves.relative(run),
        "resolutions": curves.resolutions(run),
        "predictions": _picture(run.path / "predictions.png"),
        "training": curves.training(run),
        "switches": switch_part(run),
        "head_layers": head_layers,
        "has_mean": any(layers.has_mean(chart) for charts in head_layers.values() for chart in charts),
        "fourier": layers.fourier_charts(run),
        "fourier_depth": layers.depth_charts(run),
        "similarity": similarity_charts(run),
        "confusion": confusion_charts(run),
        "plan": steps_table(run),
        "unchanged": unchanged_by_reason(run),
        "facts": facts(run),
    }


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return the key numbers: label, value and detail of each."""
    when = "at the end" if run.epochs >= run.recipe.epochs else f"after {epochs_text(run)}"
    if run.is_plain:
        return [(f"{run.judged} {when}", formats.percent(accuracy(run, "finetuned")), "nothing was recast")]
    cards = []
    if run.verify is not None:
        same, images = kept_predictions(run)
        relative = formats.error(number(run.verify["max_relative_error"]))
        detail = "outputs equal bit for bit" if run.verify["bitwise"] is True else f"max relative error {relative}"
        cards.append(("Predictions unchanged by the recast", f"{same:,} of{NBSP}{images:,}", detail))
    end = f"{run.judged} {when}" if run.epochs else f"{run.judged}, untrained"
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


def _picture(path: Path) -> str:
    """Return a PNG of the run folder as a data: URI; empty if the file is missing or not a PNG."""
    content = path.read_bytes() if path.is_file() else b""
    is_png = content.startswith(b"\x89PNG")
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii") if is_png else ""


def joint_part(runs: Sequence[Run]) -> Part:
    """Return the variables of several runs together."""
    return {
        "verdict": joint_verdict(runs),
        "table": runs_table(runs),
        "why_no_mean": why_no_mean(runs),
        "seeds": seeds_table(runs),
        "costs": cost_charts(runs),
        "frontier": joint_frontier(runs),
        "fourier": layers.joint_fourier(runs),
        "curves": curves.of_runs(runs),
    }


def render_page(parts: Sequence[Part], joint: Part | None) -> str:
    """Return the page of runs; `joint` is that of several."""
    runs = [part["run"] for part in parts]
    return fill_page(
        "page.html.j2",
        "report.css",
        ["report.js"],
        title=f"Recast report: {len(runs)} runs" if joint else f"Recast report: {runs[0].title.partition(',')[0]}",
        joint=joint,
        sections=parts,
        glossary=glossary(runs),
        costs={cost: label.partition(",")[0] for cost, (label, _) in COSTS.items()},
    )
