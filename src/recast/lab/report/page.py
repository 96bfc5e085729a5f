"""Render runs as one HTML page with style, script and pictures inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from recast.lab.report import curves, layers, summary
from recast.lab.report.arms_table import LABELS, arms_table, heat_tables
from recast.lab.report.charts import Chart, joined
from recast.lab.report.costs import COSTS, cost_charts, cost_figures
from recast.lab.report.labels import glossary, words
from recast.lab.report.load import Run
from recast.lab.report.maps import GATES, first_map, image_maps, map_charts
from recast.lab.report.neighbours import draw_neighbours
from recast.lab.report.switches import switch_part
from recast.lab.report.tables import head_table, left_by_reason, runs_table, seeds_table, steps_table
from recast.lab.report.verdict import joint_verdict, verdict, why_no_mean

MAP_BYTES = 1_600_000  # of attention maps per page; the page counts the images beyond it
HEAD_BYTES = 1_200_000  # of charts of gates and spans per page
Part = dict[str, Any]
"""Template variables of one run, or of the runs of one data set; `figures()` returns the charts for paper."""


def run_part(run: Run, anchor: str, count: int) -> Part:
    """Return the variables of one of `count` runs of a page; empty for what was not measured."""
    symbol, meaning = GATES.get(run.recipe.recast.gate, ("", ""))
    maps = image_maps(run.attention, symbol, MAP_BYTES // count) if run.attention else []
    head_layers, hidden = layers.head_charts(run, HEAD_BYTES // count)
    absent, command = summary.missing(run)
    part: Part = {
        "anchor": anchor,
        "run": run,
        "words": words(run),
        "hero": first_map(run.attention, symbol) if run.attention and count == 1 else None,
        "verdict": verdict(run),
        "tiles": summary.tiles(run),
        **{name: arms_table(run, name) for name in LABELS},
        "chance": summary.chance(run),
        "has_control": run.is_plain or bool(run.control) or any(row.model == "finetuned" for row in run.rows),
        "costs": cost_charts([run]) if count == 1 else {},
        "adversarial": curves.attacks(run),
        "relative": curves.relative(run),
        "heat": heat_tables(run),
        "corruptions": curves.corruptions(run),
        "sweeps": curves.sweeps(run),
        "predictions": _picture(run.path / "predictions.png"),
        "training": curves.training(run),
        "switches": switch_part(run),
        "head_layers": head_layers,
        "hidden_layers": hidden,
        "heads": head_table(run),
        "distances": layers.distance_charts(run),
        "symbol": symbol,
        "symbol_means": meaning,
        "maps": maps,
        "left_out": len(run.attention.images) - len(maps) if run.attention else 0,
        "left_out_layers": len(run.attention.layers) - len(run.attention.shown) if run.attention else 0,
        "neighbours": Markup(draw_neighbours(run.neighbours)) if run.neighbours else "",
        "fourier": layers.fourier_charts(run),
        "fourier_depth": layers.depth_charts(run),
        "similarity": layers.similarity_charts(run),
        "agreement": summary.won_and_lost(run),
        "plan": steps_table(run),
        "left": left_by_reason(run),
        "facts": summary.facts(run),
        "provenance": summary.provenance(run),
        "missing": absent,
        "missing_command": command,
    }
    part["is_robust"] = any(part[name] for name in ("adversarial", "relative", "heat", "sweeps"))
    part["cost_title"] = {(True, False): "Cost", (False, True): "Robustness"}.get(
        (bool(part["costs"]), part["is_robust"]), "Cost and robustness"
    )
    return part | {"figures": lambda: run_figures(part)}


def _picture(path: Path) -> str:
    """Return a PNG of the run folder as a data: URI; empty if the file is missing or not a PNG."""
    content = path.read_bytes() if path.is_file() else b""
    is_png = content.startswith(b"\x89PNG")
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii") if is_png else ""


def run_figures(part: Part) -> list[Chart]:
    """Return every figure of the run for paper; small charts of one kind are the panels of one figure."""
    run, corruptions = part["run"], part["corruptions"]
    figures = [
        *cost_figures(part["costs"]),
        *part["adversarial"],
        *part["relative"],
        joined("severity", "Top-1, %, by severity", corruptions) if corruptions else None,
        *part["sweeps"],
        *part["training"],
        part["switches"].get("chart"),
        *(panel.chart for panels in part["head_layers"].values() for panel in panels),
        *part["distances"],
        *part["fourier"],
        *part["fourier_depth"],
        *part["similarity"],
        *(map_charts(run.attention, part["symbol"]) if run.attention else ()),
    ]
    return [chart for chart in figures if chart]


def group_parts(runs: Sequence[Run]) -> list[Part]:
    """Return the variables of runs by data set; runs on different data share neither a figure nor a mean."""
    parts = []
    for place, key in enumerate(dict.fromkeys(run.data_key for run in runs)):
        anchors = {f"run{number}": run for number, run in enumerate(runs, start=1) if run.data_key == key}
        group, data = list(anchors.values()), " ".join(part for part in key[:2] if part)
        costs = cost_charts(group) if len(group) > 1 else {}
        fourier, by_run = layers.joint_fourier(group), curves.of_runs(group)
        figures = [*cost_figures(costs), *fourier, *by_run]
        parts.append(
            {
                "anchor": f"data{place + 1}",
                "data": data,
                "runs": group,
                "words": words(*group),
                "judged": f"{group[0].judged} on the test images",
                "table": runs_table(group, list(anchors), data, any(run.is_scheduled for run in runs)),
                "why_no_mean": why_no_mean(group) if len(group) > 1 else "",
                "seeds": seeds_table(group),
                "costs": costs,
                "fourier": fourier,
                "curves": by_run,
                "figures": lambda figures=figures: figures,
            }
        )
    return parts


def render_page(parts: Sequence[Part], groups: Sequence[Part]) -> str:
    """Return the page of runs."""
    runs = [part["run"] for part in parts]
    first, several = runs[0], len(runs) > 1
    return _filled(
        "page.html.j2",
        f"Recast report: {len(runs)} runs" if several else f"Recast report: {first.title.partition(',')[0]}",
        several=several,
        verdict=joint_verdict(runs) if several else verdict(first),
        groups=groups,
        sections=parts,
        glossary=glossary(runs),
        costs={cost: label.partition(",")[0] for cost, (label, _) in COSTS.items()},
    )


def _filled(template: str, title: str, **values: Any) -> str:
    """Render a template that extends base.html.j2."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_source)
    )
    style, script = Markup(_source("page.css")), Markup(_source("page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    page = environment.get_template(template)
    return page.render(title=title, style=style, script=script, script_digest=digest, **values)


def _source(name: str) -> str:
    return files("recast.lab.report").joinpath("templates", name).read_text(encoding="utf-8")
