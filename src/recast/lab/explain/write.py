"""Write a `Scene` as an HTML page. Does not import torch."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.explain.pack import pack
from recast.lab.explain.scene import Scene
from recast.lab.files import check_ours

PAGES = (".html", ".htm")
SCRIPTS = ("maps.js", "colors.js", "words.js", "page.js")


def write_scene(scene: Scene, out: Path, layer: str | None = None) -> Path:
    """Write the scene to `out`, under a temporary name that is renamed.

    Args:
        layer: layer to open first (default: `Scene.first_layer`).

    Raises:
        RecastError: the layer has no maps, or the file cannot be written.
    """
    check_target(out)
    write_text(out, _page(pack(scene, layer=layer)))
    return out


def check_target(out: Path) -> None:
    """Raise `RecastError` unless `out` can be written as a page."""
    check_place(out, "the page", "explain.html")
    if out.suffix.lower() not in PAGES:
        raise RecastError(f"unknown format of {out}: use the ending .html")
    check_ours(out)


def safe_stem(name: str) -> str:
    """Replace characters that are unsafe in a file name by "-"."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")


def _page(packed: dict[str, Any]) -> str:
    data = json.dumps(packed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # "</script>" in a name must not end the script
    return fill_page("page.html", packed["title"], data=data, script="\n".join(map(_read, SCRIPTS)))


def fill_page(template: str, title: str, **parts: str) -> str:
    """Return an HTML page: a template of assets/ inside shell.html. Placeholders in `parts` are not replaced."""
    title = html.escape(title)
    body = Template(_read(template)).substitute(title=title, **parts)
    style = _read("base.css", "report/templates") + _read("page.css")
    return Template(_read("shell.html")).substitute(title=title, style=style, body=body)


def _read(name: str, folder: str = "explain/assets") -> str:
    return files("recast.lab").joinpath(folder, name).read_text(encoding="utf-8")
