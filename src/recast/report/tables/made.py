"""How each number was made, and which commands make those that are missing."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from recast.report.read.made import Made
from recast.report.read.run import Run
from recast.report.tables.names import CORRUPTIONS, MISSING, SUITES
from recast.report.text import formats

TABLES = {"fourier": "Fourier curves", "heads": "Heads", "cka": "Similarity (CKA)", "agreement": "Agreement"}


@dataclass(frozen=True)
class Entry:
    """Suites that went over the same images with the same options."""

    suites: str
    data: str
    options: str


@dataclass(frozen=True)
class MadeLine:
    """What one command measured on one machine."""

    entries: list[Entry]
    command: str
    versions: str
    where: str
    when: str


def made_lines(run: Run) -> list[MadeLine]:
    """A line per command, as evaluation.json has it."""
    found: dict[tuple[str, str, str], list[Made]] = {}
    for made in run.made:
        versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
        where = ", ".join(part for part in (made.device, made.machine) if part)
        found.setdefault((made.command, versions, where), []).append(made)
    return [MadeLine(_entries(suites), *key, _when(suites)) for key, suites in found.items()]


def _entries(suites: Sequence[Made]) -> list[Entry]:
    found: dict[tuple[str, str], list[str]] = {}
    for made in suites:
        count = f"{made.images:,.0f} images" if math.isfinite(made.images) else ""
        data = ", ".join(part for part in (made.dataset, count) if part)
        options = [
            f"{name.replace('_', ' ')} {_plain(value)}"
            for name, value in made.options.items()
            if value not in (None, [], "")
        ]
        name = (SUITES | TABLES).get(made.suite, made.suite)
        found.setdefault((data, ", ".join(options)), []).append(name)
    return [Entry("; ".join(names), *key) for key, names in found.items()]


def _when(suites: Sequence[Made]) -> str:
    """The days, and the time: suites that share a pass over the images have the same date and share its seconds."""
    days = sorted({made.date.partition("T")[0] for made in suites if made.date})
    passes = {(made.date, made.seconds) for made in suites if math.isfinite(made.seconds)}
    seconds = formats.duration(sum(seconds for _, seconds in passes)) if passes else ""
    return ", ".join(part for part in (" to ".join(dict.fromkeys(days[:1] + days[-1:])), seconds) if part)


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return (
        "yes" if value is True else "no" if value is False else f"{value:g}" if isinstance(value, float) else str(value)
    )


def missing(run: Run) -> tuple[list[str], str]:
    """(what was not measured, the command that measures it), empty where nothing is missing."""
    have = {row.suite for row in run.rows}
    analysis = run.analysis
    tables = {
        "fourier": analysis.fourier,
        "heads": analysis.heads,
        "cka": analysis.cka,
        "agreement": analysis.agreement,
    }
    have |= {name for name, table in tables.items() if table}
    if have & set(CORRUPTIONS):
        have.add("basic")
    if run.is_plain:
        have |= {"cka", "agreement"}  # there is nothing to compare
    if not run.has_layers:
        have.add("heads")
    absent = [suite for suite in MISSING if suite not in have]
    command = shlex.join(["recast", "evaluate", str(run.path), "--suite", ",".join(absent)])
    return [MISSING[suite] for suite in absent], command if absent else ""
