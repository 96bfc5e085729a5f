"""Runs → one HTML page, style and pictures inside, no script, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from recast.report import charts, formats, maps, plan_tables, tables, verdict
from recast.report.heads import head_charts
from recast.report.json_files import number
from recast.report.read import ARMS, Run
from recast.report.switches import switch_section
from recast.report.words import joint_words, words

MAP_BYTES = 1_600_000
"""Attention maps of one page; images beyond that are left out and counted."""
HEAD_BYTES = 1_400_000
"""Charts of gates and spans of one page."""


def render_page(runs: Sequence[Run]) -> str:
    """The report of one or several runs as an HTML string."""
    folder = files("recast.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(folder.joinpath("page.html.j2").read_text(encoding="utf-8"))
    lines, mean = tables.summary(runs)
    first = runs[0]
    several = len(runs) > 1
    return template.render(
        title=f"Recast report: {len(runs)} runs" if several else f"Recast report: {first.model} on {first.dataset}",
        style=Markup(folder.joinpath("page.css").read_text(encoding="utf-8")),
        several=several,
        verdict=verdict.joint_verdict(runs) if several else verdict.verdict(first),
        summary=lines,
        mean=mean,
        arms=joint_words(runs).arms,
        scheduled=any(run.is_scheduled for run in runs),
        runs=[_section(run, f"run{index + 1}", len(runs)) for index, run in enumerate(runs)],
    )


def _section(run: Run, anchor: str, count: int) -> dict[str, Any]:
    symbol = {"linear": "γ", "sigmoid": "1−σ(λ)"}.get(run.gate, "")
    panels = maps.image_maps(run.attention, symbol, MAP_BYTES // count) if run.attention else []
    layers, hidden = head_charts(run, HEAD_BYTES // count)
    return {
        "anchor": anchor,
        "run": run,
        "words": words(run),
        "verdict": verdict.verdict(run),
        "tiles": _tiles(run),
        "groups": tables.three_arms(run),
        "notes": _notes(run),
        "has_control": bool(run.control) or any(row.model == "finetuned" for row in run.rows),
        "heat": tables.heat_tables(run),
        "corruptions": charts.corruptions(run),
        "adversarial": charts.adversarial(run),
        "training": charts.training(run),
        "switches": switch_section(run),
        "head_layers": layers,
        "hidden_layers": hidden,
        "symbol": symbol,
        "panels": panels,
        "left_out": len(run.attention.images) - len(panels) if run.attention else 0,
        "plan": plan_tables.plan_lines(run),
        "totals": plan_tables.totals(run),
        "left": plan_tables.left_by_reason(run),
        "plan_lead": _plan_lead(run),
        "left_count": len(run.plan["left"]),
        "plan_note": str(run.plan.get("note") or ""),
        "edits": [_describe(edit) for edit in run.plan.get("edits") or []],
        "facts": _facts(run),
    }


def _tiles(run: Run) -> list[dict[str, str]]:
    """The few numbers a reader wants first."""
    tiles = []
    if run.verify is not None:
        same, images = verdict.agreement(run)
        relative = formats.error(number(run.verify["max_relative_error"]))
        detail = "outputs equal bit for bit" if run.verify["bitwise"] is True else f"max relative error {relative}"
        if run.is_scheduled:
            detail = f"all layers at once, before training; {detail}"
        kept = f"{same:,} of{formats.NBSP}{images:,}"
        tiles.append({"label": "Predictions kept by the recast", "value": kept, "detail": detail})
    tiles.append(
        _compared(
            run,
            "Top-1 at the end" if run.epochs else "Top-1, untrained",
            {arm: verdict.accuracy(run, arm) for arm in ARMS},
        )
    )
    corrupted = {arm: run.value(arm, "basic", "top1/mean") for arm in ARMS}
    if math.isfinite(corrupted["recast"]):
        tiles.append(_compared(run, "Top-1 on corrupted images", corrupted))
    before, after = (number((run.plan.get("totals") or {}).get(when, {}).get("macs")) for when in ("before", "after"))
    if before > 0 and math.isfinite(after):
        tiles.append(
            {
                "label": "Compute as attention" if run.gate == "bias" else "Compute with every head open",
                "value": f"{formats.signed(100 * (after - before) / before, 0)}{formats.NBSP}%",
                "detail": f"{formats.compact(before)} → {formats.compact(after)} MACs per image",
            }
        )
    return tiles


def _compared(run: Run, label: str, values: dict[str, float]) -> dict[str, str]:
    names = words(run)
    for arm, name in (("finetuned", names.control_short), ("parent", names.parent_short)):
        difference = values["recast"] - values[arm]
        if math.isfinite(difference):
            size = formats.points(abs(difference))
            more = f"{size} points {'more' if difference > 0 else 'less'} than {name}"
            detail = more if abs(difference) >= 0.005 else f"the same as {name}"
            break
    else:
        detail = "nothing to compare with"
    return {"label": label, "value": formats.percent(values["recast"]), "detail": detail}


def _notes(run: Run) -> list[str]:
    """What a careful reader would ask about the table."""
    notes = []
    images, reached = verdict.test_images(run), verdict.accuracy(run, "recast")
    if images and math.isfinite(reached):
        share = reached / 100
        error = 100 * math.sqrt(share * (1 - share) / images)
        notes.append(
            f"{images:,} test images: one image is {formats.decimal(100 / images, 2)} points, and the standard error "
            f"of an accuracy of {formats.percent(reached)} is {formats.decimal(error)} points. The shaded bands in the "
            "table are ± one standard error of a difference, as if the arms had seen different images. "
            "A bar inside its band may well be chance."
        )
    parent, finetuned = verdict.accuracy(run, "parent"), verdict.accuracy(run, "finetuned")
    if finetuned < parent - 0.5:
        notes.append(
            f"Fine-tuning cost the parent itself {formats.points(parent - finetuned)} points: with a gentler recipe "
            "(a lower learning rate) the comparison would say more."
        )
    return notes


def _plan_lead(run: Run) -> str:
    planned, left = len(run.plan["steps"]), len(run.plan["left"])
    done = len(run.schedule.switched) if run.schedule else planned
    who = f"{planned} layer{'' if planned == 1 else 's'}" if done == planned else f"{done} of these {planned} layers"
    what, how = "gated positional self-attention", " with every head open, as in training"
    if run.gate == "bias":
        what, how = "self-attention with a positional bias (C-MHSA)", ""
    return f"{who} became {what}, {left} stayed. Costs are per image{how}, before → after."


def _facts(run: Run) -> list[tuple[str, str]]:
    environment = run.environment
    command = environment.get("command")
    named = ("recast", "torch", "timm", "python")
    versions = [f"{name} {environment[name]}" for name in named if environment.get(name)]
    machine = [str(environment[name]) for name in ("platform", "device") if environment.get(name)]
    if environment.get("cpu_count"):
        machine.append(f"{environment['cpu_count']} CPUs")
    facts = {
        "Command": " ".join(map(str, command)) if isinstance(command, list) else str(command or ""),
        "Run folder": run.name,
        "Seed": str(run.recipe.get("seed", "")),
        "Versions": ", ".join(versions),
        "Machine": ", ".join(machine),
        "Date": str(environment.get("date") or ""),
        "Time": formats.duration(number(environment.get("seconds"))),
        "Verified with": str((run.verify or {}).get("backend") or ""),
    }
    return [(name, value) for name, value in facts.items() if value not in {"", formats.MISSING}]


def _describe(edit: object) -> str:
    if isinstance(edit, dict):
        return ", ".join(f"{key} {value}" for key, value in edit.items())
    return str(edit)
