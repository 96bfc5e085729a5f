"""Runs → one HTML page: style, script and pictures inside, nothing fetched."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from recast.report.facts import plan_part
from recast.report.group import Group, read_groups
from recast.report.read.run import Run
from recast.report.section import Section, read_section
from recast.report.text import verdict


def read_parts(runs: Sequence[Run]) -> tuple[list[Section], list[Group]]:
    """Everything that the page and the folder of figures show."""
    sections = [read_section(run, f"run{index + 1}", len(runs)) for index, run in enumerate(runs)]
    return sections, read_groups(runs)


def render(runs: Sequence[Run], sections: Sequence[Section], groups: Sequence[Group]) -> str:
    """The page of parts that were read."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_source)
    )
    first, several = runs[0], len(runs) > 1
    script = _source("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return environment.get_template("page.html.j2").render(
        title=f"Recast report: {len(runs)} runs" if several else f"Recast report: {first.model} on {first.dataset}",
        style=Markup(_source("page.css")),
        script=Markup(script),
        script_digest=digest,
        several=several,
        verdict=verdict.joint_verdict(runs) if several else verdict.verdict(first),
        groups=groups,
        scheduled=any(run.is_scheduled for run in runs),
        sections=sections,
        plan_part=plan_part,
    )


def _source(name: str) -> str:
    return files("recast.report").joinpath("templates", name).read_text(encoding="utf-8")
