"""Render runs as one HTML page with style, script and pictures inside."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recast.lab.pages import fill_page
from recast.lab.report import curves, layers, summary
from recast.lab.report.costs import COSTS, cost_charts, frontier, joint_frontier
from recast.lab.report.heat_maps import confusion_charts, similarity_charts
from recast.lab.report.labels import glossary, words
from recast.lab.report.load import Run
from recast.lab.report.switches import switch_part
from recast.lab.report.tables import LABELS, arms_table, runs_table, seeds_table, steps_table, unchanged_by_reason
from recast.lab.report.verdict import joint_verdict, verdict, why_no_mean

Part = dict[str, Any]
"""Template variables of one run, or of several together."""


def run_part(run: Run, anchor: str, count: int) -> Part:
    """Return the variables of one of `count` runs of a page; empty for what was not measured."""
    return {
        "anchor": anchor,
        "run": run,
        "words": words(run),
        "verdict": verdict(run),
        "tiles": summary.tiles(run),
        **{name: arms_table(run, name) for name in LABELS},
        "has_control": run.is_plain or bool(run.control) or any(row.model == "finetuned" for row in run.rows),
        "costs": cost_charts([run]) if count == 1 else {},
        "frontier": frontier(run),
        "adversarial": curves.attacks(run),
        "relative": curves.relative(run),
        "resolutions": curves.resolutions(run),
        "predictions": _picture(run.path / "predictions.png"),
        "training": curves.training(run),
        "switches": switch_part(run),
        "head_layers": layers.head_charts(run),
        "fourier": layers.fourier_charts(run),
        "fourier_depth": layers.depth_charts(run),
        "similarity": similarity_charts(run),
        "confusion": confusion_charts(run),
        "plan": steps_table(run),
        "unchanged": unchanged_by_reason(run),
        "facts": summary.facts(run),
    }


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
