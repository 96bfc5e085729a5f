"""A plan as a table for people."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from recast.run.config import PoolConfig
from recast.surgery.records import Left, Step
from recast.tracing.cost import Cost

# wider than any plan: columns keep their natural width, nothing is cut off
WIDTH = 1000
NAMED = 4
"""Layers named for each reason to leave one; plan.json names all."""


def quantity(value: float, unit: str = "", base: int = 1000) -> str:
    """A number with three digits and a prefix: 2.36 M, 1.72 MiB."""
    prefixes = ("", "k", "M", "G", "T") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti")
    size, prefix = float(value), ""
    for prefix in prefixes:
        if abs(size) < base or prefix == prefixes[-1]:
            break
        size /= base
    # `.3g` would turn to 1e+03 here, all of 1000…1023 KiB included
    return f"{size:{'.0f' if abs(size) >= 999.5 else '.3g'}} {prefix}{unit}".strip()


def terminal_width() -> int:
    """Columns of the terminal that is written to; a pipe or a file takes any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def layers(steps: Sequence[Step], before: Cost, after: Cost, width: int) -> str:
    """What every layer becomes and costs, one line each, or several where the width asks for it."""
    table = _wide(steps)
    table.add_section()
    table.add_row("whole model", "", "", "", "", *_costs(before, after), "")
    if Console(width=WIDTH).measure(table).maximum > width:
        table = _narrow(steps)
        table.add_row("whole model", "", "", *_costs(before, after, "\n→ "))
    kept = " → ".join(quantity(cost.fixed_bytes, "B", 1024) for cost in (before, after))
    note = f"MACs and activations are for one image; a training step also keeps {kept} whatever the batch"
    return render(table, width) + "\n" + textwrap.fill(note, width)


def _wide(steps: Sequence[Step]) -> Table:
    table = Table()
    for column in ("layer", "convolution", "heads", "input → output", "tokens"):
        table.add_column(column, no_wrap=True)
    for column in ("parameters", "MACs", "activations", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step.name or "(the model)",
            _convolution(step),
            str(step.geometry.num_heads),
            f"{_shape(step.input)} → {_shape(step.output)}",
            f"{step.queries} × {step.keys}",
            *_costs(step.before, step.after),
            "yes" if step.exact else f"no, {_why_inexact(step)}",
        )
    return table


def _narrow(steps: Sequence[Step]) -> Table:
    table = Table(show_lines=True, box=box.HORIZONTALS, padding=(0, 1))
    table.add_column("layer", overflow="fold")
    for column in ("input\n→ output", "tokens", "parameters", "MACs", "activations"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            f"{step.name or '(the model)'}\n{_convolution(step)}, {step.geometry.num_heads} heads"
            + ("" if step.exact else f"\nnot exact: {_why_inexact(step)}"),
            f"{_shape(step.input)}\n→ {_shape(step.output)}",
            f"{step.queries}\n× {step.keys}",
            *_costs(step.before, step.after, "\n→ "),
        )
    return table


def left(convolutions: Sequence[Left], width: int) -> str:
    """The convolutions that stay, by reason."""
    reasons: dict[str, list[str]] = {}
    for item in convolutions:
        reasons.setdefault(item.reason, []).append(item.name)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for reason, names in reasons.items():
        rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        table.add_row(str(len(names)), f"{reason}\n{', '.join(names[:NAMED])}{rest}")
    return f"\n{len(convolutions)} left as they are\n{render(table, width)}\n"


def _costs(before: Cost, after: Cost, arrow: str = " → ") -> list[str]:
    def pair(name: str, unit: str = "", base: int = 1000) -> str:
        return f"{quantity(getattr(before, name), unit, base)}{arrow}{quantity(getattr(after, name), unit, base)}"

    return [pair("parameters"), pair("macs"), pair("activation_bytes", "B", 1024)]


def pooling(config: PoolConfig, cost: Cost | None, width: int) -> str:
    """What the pooling becomes, and what that adds."""
    tokens = "a single token" if config.kind == "single" else "a token for every class"
    start = "starts as the average" if config.start == "average" else "starts as in the paper: another function"
    text = f"attention pooling: {tokens}, {config.num_heads} head{'s' * (config.num_heads > 1)}, {start}"
    if cost is not None:
        activations = quantity(cost.activation_bytes, "B", 1024)
        text += f"; adds {quantity(cost.parameters)} parameters, {quantity(cost.macs)} MACs and {activations} of "
        text += "activations, counted above"
    return textwrap.fill(text, width)


def _convolution(step: Step) -> str:
    return f"{step.geometry}" + (f" groups {step.groups}" if step.groups > 1 else "")


def _shape(shape: tuple[int, int, int]) -> str:
    return "×".join(map(str, shape))


def _why_inexact(step: Step) -> str:
    return "stride" if step.geometry != step.parent_geometry else "gate"


def render(table: Table, width: int = WIDTH) -> str:
    """A table as plain text without spaces at the ends of lines."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
