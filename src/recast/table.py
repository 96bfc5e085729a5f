"""A plan as a table for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from recast.steps import Plan, Step

# wider than any plan: columns keep their natural width, nothing is cut off
WIDTH = 1000


def quantity(value: float, unit: str = "", base: int = 1000) -> str:
    """A number with three digits and a prefix: 2.36 M, 1.72 MiB."""
    prefixes = ("", "k", "M", "G", "T") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti")
    size = float(value)
    for prefix in prefixes[:-1]:
        if abs(size) < base:
            # `.3g` would turn to 1e+03 here, all of 1000…1023 KiB included
            return f"{size:.0f} {prefix}{unit}".strip() if abs(size) >= 999.5 else f"{size:.3g} {prefix}{unit}".strip()
        size /= base
    return f"{size:.3g} {prefixes[-1]}{unit}"


def plan_table(plan: Plan) -> str:
    """One line per convolution: what it becomes, shapes, tokens, cost before → after; then why the others stay."""
    table = Table(title=f"{plan.model}: {len(plan.steps)} of {len(plan.steps) + len(plan.left)} convolutions recast")
    for column in ("layer", "convolution", "heads", "input → output", "tokens"):
        table.add_column(column, no_wrap=True)
    for column in ("parameters", "MACs", "activations", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in plan.steps:
        table.add_row(
            step.name or "(the model)",
            f"{step.geometry}" + (f" groups {step.groups}" if step.groups > 1 else ""),
            str(step.geometry.num_heads),
            f"{_shape(step.input)} → {_shape(step.output)}",
            f"{step.queries} × {step.keys}",
            *_costs(step.before.as_tuple(), step.after.as_tuple()),
            _exact(step),
        )
    table.add_section()
    table.add_row("whole model", "", "", "", "", *_costs(plan.before.as_tuple(), plan.after.as_tuple()), "")
    text = _render(table)
    if plan.edits:
        text += "\nalso changed: " + "; ".join(f"{e.name} ({e.action.replace('_', ' ')})" for e in plan.edits) + "\n"
    if plan.left:
        rest = Table(title=f"{len(plan.left)} left as they are", show_edge=False)
        rest.add_column("layer", no_wrap=True)
        rest.add_column("why")
        for item in plan.left:
            rest.add_row(item.name, item.reason)
        text += "\n" + _render(rest)
    return text + (f"\nnote: {plan.note}\n" if plan.note else "")


def _costs(before: tuple[int, int, int], after: tuple[int, int, int]) -> list[str]:
    units = (("", 1000), ("", 1000), ("B", 1024))
    return [f"{quantity(b, *u)} → {quantity(a, *u)}" for b, a, u in zip(before, after, units, strict=True)]


def _shape(shape: tuple[int, int, int]) -> str:
    return "×".join(map(str, shape))


def _exact(step: Step) -> str:
    if step.exact:
        return "yes"
    return "no, stride" if step.geometry != step.parent_geometry else "no, gate"


def _render(table: Table) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=WIDTH, color_system=None).print(table)
    return buffer.getvalue()
