"""What was recast, what it costs, and what was left: the plan as cells of text."""

from __future__ import annotations

import math
import re
from itertools import groupby
from typing import Any

from recast.report.read.run import Run
from recast.report.text import formats
from recast.run.files import number


def plan_lines(run: Run) -> list[dict[str, Any]]:
    """One line per recast convolution."""
    return [
        {
            "name": str(step["name"]),
            "kernel": _kernel(step),
            "shape": " → ".join("×".join(map(str, step[key])) for key in ("input", "output") if step.get(key)),
            "heads": step.get("heads", formats.MISSING),
            "tokens": _tokens(step),
            "costs": _costs(step["before"], step["after"]),
            "exact": step.get("exact"),
        }
        for step in run.plan["steps"]
    ]


def totals(run: Run) -> list[dict[str, str]]:
    """Before and after for the whole model, empty if the plan does not say."""
    both = run.plan.get("totals")
    return _costs(both.get("before") or {}, both.get("after") or {}) if isinstance(both, dict) else []


def _tokens(step: dict[str, Any]) -> str:
    return f"{step['queries']:,} × {step['keys']:,}" if {"queries", "keys"} <= set(step) else formats.MISSING


def _kernel(step: dict[str, Any]) -> str:
    text = "×".join(str(size) for size in step.get("kernel") or []) or formats.MISSING
    for key, sign in (("stride", "stride"), ("dilation", "dilation")):
        sizes = step.get(key) or [1]
        if any(size != 1 for size in sizes):
            text += f", {sign} " + ("×".join(map(str, sizes)) if len(set(sizes)) > 1 else str(sizes[0]))
    if step.get("groups", 1) != 1:
        text += f", {step['groups']} groups"
    return text


def _costs(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, str]]:
    costs = []
    for key, write in (
        ("parameters", formats.compact),
        ("macs", formats.compact),
        ("activation_bytes", formats.memory),
    ):
        old, new = number(before.get(key)), number(after.get(key))
        grown = math.isfinite(old) and math.isfinite(new)
        costs.append(
            {
                "before": write(old),
                "after": write(new),
                "change": f"{formats.signed(100 * (new - old) / old, 0)}{formats.NBSP}%" if grown and old else "",
                "title": f"{old:,.0f} → {new:,.0f}" if grown else "unknown",
            }
        )
    return costs


def left_by_reason(run: Run) -> list[tuple[str, int, str]]:
    """(reason, how many layers, which) of what was left, the most frequent first.

    Reasons that differ in their numbers only are one: its words stand above, the numbers beside the layers.
    """

    def words(left: dict[str, Any]) -> str:
        return re.sub(r"\d+(?:[.,]\d+)*", "…", str(left["reason"]))

    groups = []
    for pattern, members in groupby(sorted(run.plan["left"], key=words), words):
        layers: dict[str, list[str]] = {}
        for left in members:
            layers.setdefault(str(left["reason"]), []).append(str(left["name"]))
        count = sum(map(len, layers.values()))
        if len(layers) == 1:
            (reason,) = layers
            groups.append((reason, count, ", ".join(layers[reason])))
        else:
            heading = pattern.partition("…")[0].rstrip(" (:,") or pattern
            each = [
                f"{', '.join(names)}: {reason.removeprefix(heading).lstrip(' :,')}" for reason, names in layers.items()
            ]
            groups.append((heading, count, "\n".join(each)))
    return sorted(groups, key=lambda group: -group[1])
