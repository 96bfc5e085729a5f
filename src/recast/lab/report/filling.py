"""Pages from the templates: all extend base.html.j2, with style and script inside."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def fill_page(template: str, *, script: str | None = None, **values: Any) -> str:
    """Render a template that extends base.html.j2, with page.css and the `script` of that name inside."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=PackageLoader("recast.lab.report"),
    )  # fmt: skip
    if script is not None:
        text = _asset(script)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
        values |= {"script": text, "script_digest": digest}
    return environment.get_template(template).render(style=_asset("page.css"), **values)


def _asset(name: str) -> Markup:
    return Markup(files("recast.lab.report").joinpath("templates", name).read_text(encoding="utf-8"))
