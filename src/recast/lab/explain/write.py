"""Write a `Scene` as an HTML page. Does not import torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from markupsafe import Markup

from recast.errors import RecastError
from recast.files import check_place, write_text
from recast.lab.explain.pack import pack
from recast.lab.explain.scene import Scene
from recast.lab.files import check_ours
from recast.lab.pages import fill_page

PAGES = (".html", ".htm")
SCRIPTS = ("maps.js", "colors.js", "words.js", "explain.js")


def write_scene(scene: Scene, out: Path, layer: str | None = None) -> Path:
    """Write the scene to `out`, under a temporary name that is renamed.

    Args:
        layer: layer to open first (default: `Scene.first_layer`).

    Raises:
        RecastError: the layer has no maps, or the file cannot be written.
    """
    check_target(out)
    packed = pack(scene, layer=layer)
    data = json.dumps(packed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c")  # "</script>" in a name must not end the script
    write_text(out, fill_page("explain.html.j2", "explain.css", SCRIPTS, title=scene.title, data=Markup(data)))
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
