"""Runs → one HTML page: style, script and pictures inside, nothing fetched."""

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
from recast.lab.report.costs import COSTS, cost_charts, cost_figures, frontier
from recast.lab.report.labels import glossary, words
from recast.lab.report.load import Run
from recast.lab.report.maps import GATES, first_map, image_maps, map_charts
from recast.lab.report.neighbours import draw_neighbours
from recast.lab.report.switches import switch_part
from recast.lab.report.table import PageTable
from recast.lab.report.tables import head_table, left_by_reason, runs_table, seeds_table, steps_table
from recast.lab.report.verdict import joint_verdict, verdict, why_no_mean

MAP_BYTES = 1_600_000
"""Attention maps of one page; images beyond that are left out and counted."""
HEAD_BYTES = 1_200_000
"""Charts of gates and spans of one page."""
Part = dict[str, Any]
"""What the template shows of one run, or of the runs of one data set; `figures` gives those for paper."""


def run_part(run: Run, anchor: str, count: int) -> Part:
    """One of `count` runs of a page; what was not measured is empty."""
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
        **{which: arms_table(run, which) for which in LABELS},
        "chance": summary.chance(run),
        "has_control": run.is_plain or bool(run.control) or any(row.model == "finetuned" for row in run.rows),
        "costs": cost_charts([run]) if count == 1 else {},
        "frontier": frontier(run),
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
        "similarity": layers.similarity_charts(run),
        "planes": curves.planes(run),
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
    """A PNG of the run folder as a data: URI; empty where it is not there, or is none."""
    content = path.read_bytes() if path.is_file() else b""
    is_png = content.startswith(b"\x89PNG")
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii") if is_png else ""


def run_figures(part: Part) -> list[Chart]:
    """Every figure of the run for paper: small charts of one kind are the panels of one."""
    run, corruptions = part["run"], part["corruptions"]
    of_heads = [panel.chart for panels in part["head_layers"].values() for panel in panels]
    found = [
        *cost_figures(part["costs"]),
        *part["frontier"],
        *part["adversarial"],
        *part["relative"],
        joined("severity", "Top-1, %, by severity", corruptions) if corruptions else None,
        *part["sweeps"],
        *part["training"],
        *(part["switches"].get(name) for name in ("chart", "probes")),
        *of_heads,
        *part["distances"],
        *part["fourier"],
        *part["similarity"],
        *part["planes"],
        *(map_charts(run.attention, part["symbol"]) if run.attention else ()),
    ]
    return [chart for chart in found if chart]


def group_parts(runs: Sequence[Run]) -> list[Part]:
    """Runs of the same data side by side: those of different data share neither a figure nor a mean."""
    parts = []
    for place, key in enumerate(dict.fromkeys(run.data_key for run in runs)):
        of_data = {f"run{number}": run for number, run in enumerate(runs, start=1) if run.data_key == key}
        together, data = list(of_data.values()), " ".join(part for part in key[:2] if part)
        costs = cost_charts(together) if len(together) > 1 else {}
        fourier = layers.joint_fourier(together)
        figures = [*cost_figures(costs), *([fourier] if fourier else [])]
        parts.append(
            {
                "anchor": f"data{place + 1}",
                "data": data,
                "runs": together,
                "words": words(*together),
                "judged": f"{together[0].judged} on the test images",
                "table": runs_table(together, list(of_data), data, any(run.is_scheduled for run in runs)),
                "why_no_mean": why_no_mean(together) if len(together) > 1 else "",
                "seeds": seeds_table(together),
                "costs": costs,
                "fourier": fourier,
                "figures": lambda figures=figures: figures,
            }
        )
    return parts


def render_page(parts: Sequence[Part], groups: Sequence[Part]) -> str:
    """The page of parts that were read."""
    runs = [part["run"] for part in parts]
    first, several = runs[0], len(runs) > 1
    script = _source("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return _filled(
        "page.html.j2",
        title=f"Recast report: {len(runs)} runs" if several else f"Recast report: {first.title.partition(',')[0]}",
        script=Markup(script),
        script_digest=digest,
        several=several,
        verdict=joint_verdict(runs) if several else verdict(first),
        groups=groups,
        sections=parts,
        glossary=glossary(runs),
        costs={cost: label.partition(",")[0] for cost, (label, _) in COSTS.items()},
    )


def render_comparison(sentences: Sequence[str], table: PageTable, note: str) -> str:
    """The page of networks that belong to no run: what may be said of them, and what was measured."""
    return _filled("compare.html.j2", sentences=sentences, table=table, note=note)


def _filled(template: str, **values: Any) -> str:
    """A page of a template, with the style of all of them."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_source)
    )
    return environment.get_template(template).render(style=Markup(_source("page.css")), **values)


def _source(name: str) -> str:
    return files("recast.lab.report").joinpath("templates", name).read_text(encoding="utf-8")
