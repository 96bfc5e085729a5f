"""HTML pages from the templates of `report` and `explain`: all extend base.html.j2, with style and scripts inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

LAB = Path(__file__).parents[1]
LOADER = FileSystemLoader([LAB / "report" / "templates", LAB / "explain" / "assets"])
ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=LOADER
)


def fill_page(template: str, style: str, scripts: Sequence[str] = (), **values: Any) -> str:
    """Render a template that extends base.html.j2, with the style sheet and the scripts of these names inside."""
    script = "\n".join(map(_asset, scripts))
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
        values |= {"script": Markup(script), "script_digest": digest}
    return ENVIRONMENT.get_template(template).render(style=Markup(_asset(style)), **values)


def _asset(name: str) -> str:
    return LOADER.get_source(ENVIRONMENT, name)[0]
