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

from recast.errors import listed
from recast.layers.config import AttentionPooling
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
    """Return the table of layers and costs, one line each, or several for a small width."""
    table = _layers(steps, before, after, is_wide=True)
    if Console(width=WIDTH).measure(table).maximum > width:
        table = _layers(steps, before, after, is_wide=False)
    fixed = " → ".join(quantity(cost.fixed_bytes, "B", 1024) for cost in (before, after))
    note = f"MACs and activations are for one image; a training step also keeps {fixed} whatever the batch"
    return render(table, width) + "\n" + textwrap.fill(note, width)


def cost(before: Cost, after: Cost, width: int = WIDTH) -> str:
    """Return the cost of the plan in a sentence: "+7 % compute, +9 % parameters", from twice on "2.1× the compute"."""

    def more(name: str, old: int, new: int) -> str:
        ratio = new / old if old else 1.0
        return f"{ratio:.1f}× the {name}" if ratio >= 2 else f"{100 * (ratio - 1):+.0f} % {name}"

    parts = more("compute", before.macs, after.macs), more("parameters", before.parameters, after.parameters)
    return textwrap.fill("in all: {} (multiply-adds of one image), {}".format(*parts), width)


def _layers(steps: Sequence[Step], before: Cost, after: Cost, is_wide: bool) -> Table:
    """Return the table with one line per layer, or a narrower one with several."""
    between = " " if is_wide else "\n"
    first = ("layer", "convolution", "heads") if is_wide else ("layer",)
    numbers = ("parameters", "MACs", "activations", *(("exact",) if is_wide else ()))
    table = Table() if is_wide else Table(show_lines=True, box=box.HORIZONTALS, padding=(0, 1))
    for column in first:
        table.add_column(column, overflow="fold", no_wrap=is_wide)
    for column in (f"input{between}→ output", "tokens"):
        table.add_column(column, justify="left" if is_wide else "right", no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)

    def costs(old: Cost, new: Cost) -> list[str]:
        units = {"parameters": ("", 1000), "macs": ("", 1000), "activation_bytes": ("B", 1024)}
        pairs = ([quantity(getattr(cost, name), *unit) for cost in (old, new)] for name, unit in units.items())
        return [f"{before_text}{between}→ {after_text}" for before_text, after_text in pairs]

    for step in steps:
        name, heads = step.name or "(the model)", step.geometry.num_heads
        convolution = f"{step.geometry}" + (f" groups {step.groups}" if step.groups > 1 else "")
        why = "" if step.exact else "stride" if step.geometry != step.parent_geometry else "gate"
        description = f"{name}\n{convolution}, {heads} heads" + (f"\nnot exact: {why}" if why else "")
        table.add_row(
            *((name, convolution, str(heads)) if is_wide else (description,)),
            f"{'×'.join(map(str, step.input))}{between}→ {'×'.join(map(str, step.output))}",
            f"{step.queries}{between}× {step.keys}",
            *costs(step.before, step.after),
            *((f"no, {why}" if why else "yes",) if is_wide else ()),
        )
    if is_wide:
        table.add_section()
    table.add_row("whole model", *[""] * (len(first) + 1), *costs(before, after))
    return table


def left(convolutions: Sequence[Left], width: int) -> str:
    """Return the convolutions that stay, by reason."""
    reasons: dict[str, list[str]] = {}
    for item in convolutions:
        reasons.setdefault(item.reason, []).append(item.name)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for reason, names in reasons.items():
        table.add_row(str(len(names)), f"{reason}\n{listed(names, NAMED)}")
    return f"\n{len(convolutions)} left as they are\n{render(table, width)}\n"


def pooling(config: AttentionPooling, cost: Cost | None, width: int) -> str:
    """Describe the attention pooling and its cost."""
    tokens = "a single token" if config.kind == "single" else "a token for every class"
    start = "starts as the average" if config.start == "average" else "starts as in the paper: another function"
    text = f"attention pooling: {tokens}, {config.num_heads} head{'s' * (config.num_heads > 1)}, {start}"
    if cost is not None:
        activations = quantity(cost.activation_bytes, "B", 1024)
        text += f"; adds {quantity(cost.parameters)} parameters, {quantity(cost.macs)} MACs and {activations} of "
        text += "activations, counted above"
    return textwrap.fill(text, width)


def render(table: Table, width: int = WIDTH) -> str:
    """A table as plain text without spaces at the ends of lines."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
