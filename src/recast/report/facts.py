"""Tiles, notes and facts: what a reader wants first, and would ask last."""

from __future__ import annotations

import math
from typing import Any

from recast.report.read.run import ARMS, Run
from recast.report.tables import plan
from recast.report.tables.names import CORRUPTIONS
from recast.report.text import formats, verdict
from recast.report.text.words import words
from recast.run.files import number


def tiles(run: Run) -> list[dict[str, str]]:
    """The few numbers a reader wants first."""
    if run.is_plain:
        reached = formats.percent(verdict.accuracy(run, "finetuned"))
        return [{"label": "Top-1 at the end", "value": reached, "detail": "nothing was recast"}]
    found = []
    if run.verify is not None:
        same, images = verdict.agreement(run)
        relative = formats.error(number(run.verify["max_relative_error"]))
        detail = "outputs equal bit for bit" if run.verify["bitwise"] is True else f"max relative error {relative}"
        if run.is_scheduled:
            detail = f"all layers at once, before training; {detail}"
        kept = f"{same:,} of{formats.NBSP}{images:,}"
        found.append({"label": "Predictions kept by the recast", "value": kept, "detail": detail})
    found.append(
        _compared(
            run,
            "Top-1 at the end" if run.epochs else "Top-1, untrained",
            {arm: verdict.accuracy(run, arm) for arm in ARMS},
        )
    )
    for suite in CORRUPTIONS:
        corrupted = {arm: run.value(arm, suite, "top1/mean") for arm in ARMS}
        if math.isfinite(corrupted["recast"]):
            label = "Top-1 on ImageNet-C" if suite == "imagenet-c" else "Top-1 on corrupted images"
            found.append(_compared(run, label, corrupted))
            break
    before, after = (number((run.plan.get("totals") or {}).get(when, {}).get("macs")) for when in ("before", "after"))
    if before > 0 and math.isfinite(after):
        found.append(
            {
                "label": _compute_label(run),
                "value": f"{formats.signed(100 * (after - before) / before, 0)}{formats.NBSP}%",
                "detail": f"{formats.compact(before)} → {formats.compact(after)} MACs per image",
            }
        )
    return found


def _compute_label(run: Run) -> str:
    if not run.has_layers:
        return "Compute with attention pooling"
    return "Compute as attention" if run.gate == "bias" else "Compute with every head open"


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


def notes(run: Run) -> list[str]:
    """What a careful reader would ask about the table."""
    found = []
    images, reached = verdict.test_images(run), verdict.accuracy(run, "recast")
    if images and math.isfinite(reached):
        one = f"{formats.plural(images, 'test image')}: one image is {formats.decimal(100 / images, 2)} points"
        if any(math.isfinite(line.low) for line in run.differences):
            found.append(
                f"{one}. Intervals are of 95 %, bootstrapped over the images; those of differences are paired, as all "
                "arms saw the same images. A difference is coloured where its interval leaves out 0. They say what "
                "other images would do, not what another seed would."
            )
        else:
            share = reached / 100
            error = 100 * math.sqrt(share * (1 - share) / images)
            found.append(
                f"{one}, and the standard error of an accuracy of {formats.percent(reached)} is "
                f"{formats.decimal(error)} points. The shaded bands in the table are ± one standard error of a "
                "difference, as if the arms had seen different images. A bar inside its band may well be chance."
            )
    parent, finetuned = verdict.accuracy(run, "parent"), verdict.accuracy(run, "finetuned")
    if finetuned < parent - 0.5:
        found.append(
            f"Fine-tuning cost the parent itself {formats.points(parent - finetuned)} points: with a gentler recipe "
            "(a lower learning rate) the comparison would say more."
        )
    return found


def plan_part(run: Run) -> dict[str, Any]:
    """The section "What was recast"."""
    return {
        "lines": plan.plan_lines(run),
        "totals": plan.totals(run),
        "left": plan.left_by_reason(run),
        "lead": _plan_lead(run),
        "left_count": len(run.plan["left"]),
        "note": str(run.plan.get("note") or ""),
        "edits": [_describe(edit) for edit in run.plan.get("edits") or []],
        "facts": _facts(run),
    }


def _plan_lead(run: Run) -> str:
    planned, left = len(run.plan["steps"]), len(run.plan["left"])
    token = {"single": "a learned token", "per_class": "a learned token for every class"}.get(run.pool_kind)
    pooling = f"The average over the last map became attention pooling with {token}. " if token else ""
    if not run.has_layers:
        return f"{pooling}No convolution was recast. Costs are per image, before → after."
    done = len(run.schedule.switched) if run.schedule else planned
    who = f"{planned} layer{'' if planned == 1 else 's'}" if done == planned else f"{done} of these {planned} layers"
    what, how = "gated positional self-attention", " with every head open, as in training"
    if run.gate == "bias":
        what, how = "self-attention with a positional bias (C-MHSA)", ""
    return f"{pooling}{who} became {what}, {left} stayed. Costs are per image{how}, before → after."


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
