"""A plan as tables to read."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from recast.errors import listed
from recast.layers.pool_config import AttentionPooling
from recast.surgery.records import Left, Step
from recast.tracing.cost import Cost

# wider than any plan: columns keep their natural width, nothing is cut off
WIDTH = 1000
NAMED = 4
"""Layers named for each reason to keep convolutions; plan.json names all."""


def quantity(value: float, unit: str = "", base: int = 1000) -> str:
    """Return a number with three digits and a prefix: 2.36 M, 1.72 MiB."""
    prefixes = ("", "k", "M", "G", "T") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti")
    size, prefix = float(value), ""
    for prefix in prefixes:
        if abs(size) < base or prefix == prefixes[-1]:
            break
        size /= base
    # `.3g` would turn to 1e+03 here, all of 1000…1023 KiB included
    return f"{size:{'.0f' if abs(size) >= 999.5 else '.3g'}} {prefix}{unit}".strip()


def terminal_width() -> int:
    """Return the columns of the terminal; a pipe or a file takes any width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def layers(steps: Sequence[Step], before: Cost, after: Cost) -> str:
    """Return the table of layers and costs, one line each."""

    def costs(old: Cost, new: Cost) -> list[str]:
        units = {"parameters": ("", 1000), "macs": ("", 1000), "activation_bytes": ("B", 1024)}
        return [" → ".join(quantity(getattr(cost, name), *unit) for cost in (old, new)) for name, unit in units.items()]

    table = Table()
    for column in ("layer", "convolution", "heads", "input → output", "tokens"):
        table.add_column(column, overflow="fold")
    for column in ("parameters", "MACs", "activations", "exact"):
        table.add_column(column, justify="right", overflow="fold")
    for step in steps:
        convolution = f"{step.geometry}" + (f" groups {step.groups}" if step.groups > 1 else "")
        convolution = "none: after the blocks" if step.is_after_block else convolution
        why = "" if step.exact else "stride" if step.geometry != step.parent_geometry else "gate"
        sizes = " → ".join("×".join(map(str, size)) for size in (step.input, step.output))
        words = step.name or "(the model)", convolution, str(step.heads), sizes, f"{step.queries} × {step.keys}"
        table.add_row(*words, *costs(step.before, step.after), f"no, {why}" if why else "yes")
    table.add_section()
    table.add_row("whole model", "", "", "", "", *costs(before, after))
    fixed = " → ".join(quantity(cost.fixed_bytes, "B", 1024) for cost in (before, after))
    note = f"MACs and activations are for one image; a training step also keeps {fixed} whatever the batch"
    return f"{render(table, terminal_width())}\n{note}"


def cost(before: Cost, after: Cost) -> str:
    """Return the cost of the plan in a sentence: "+7 % compute, +9 % parameters", from twice on "2.1× the compute"."""

    def more(name: str, old: int, new: int) -> str:
        ratio = new / old if old else 1.0
        return f"{ratio:.1f}× the {name}" if ratio >= 2 else f"{100 * (ratio - 1):+.0f} % {name}"

    compute = more("compute", before.macs, after.macs)
    parameters = more("parameters", before.parameters, after.parameters)
    return f"in all: {compute} (multiply-adds of one image), {parameters}"


def left(convolutions: Sequence[Left]) -> str:
    """Return the convolutions that stay, by reason."""
    reasons: dict[str, list[str]] = {}
    for item in convolutions:
        reasons.setdefault(item.reason, []).append(item.name)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for reason, names in reasons.items():
        table.add_row(str(len(names)), f"{reason}\n{listed(names, NAMED)}")
    return f"{len(convolutions)} left as they are\n{render(table, terminal_width())}"


def pooling(config: AttentionPooling, cost: Cost | None) -> str:
    """Describe the attention pooling and its cost."""
    tokens = "a single token" if config.kind == "single" else "a token for every class"
    text = f"attention pooling: {tokens}, start={config.start}"
    if cost is None:
        return text
    return f"{text}; adds {quantity(cost.parameters)} parameters, {quantity(cost.macs)} MACs, counted above"


def render(table: Table, width: int = WIDTH) -> str:
    """Return a table as plain text without trailing spaces."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
