"""A `Scene` as HTML files: one page, or a page for every image and one that leads to them; or as a PNG.

No torch is needed.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from string import Template
from typing import Any

from recast.errors import RecastError
from recast.files import check_ours, check_place, write_text
from recast.lab.explain.pack import LIMIT, pack
from recast.lab.explain.scene import Picture, Scene
from recast.lab.report.neighbours import png

THUMBNAIL = 240
"""Sides of the pictures of a list, at most."""
PAGES, PICTURE = (".html", ".htm"), ".png"
SCRIPTS = ("maps.js", "colors.js", "words.js", "page.js")


def write_pages(scene: Scene, out: Path, *, limit: int = LIMIT, layer: str | None = None) -> list[Path]:
    """Write the scene to the file `out`, HTML or PNG; returns the files written, the one to open first.

    Several images share one page while its data stay below `limit` bytes. Otherwise every image has a page of its own
    in the folder OUT_files/ beside `out`, which lists them. `layer` is open first (default: `first_layer`), and the one
    that a PNG draws (`write_sheet`). Written under temporary names and renamed. Raises `RecastError` where nothing can
    be written, and for a layer without maps.
    """
    check_target(out)
    is_picture = out.suffix.lower() == PICTURE
    try:
        if is_picture:
            from recast.lab.explain.sheet import write_sheet  # which needs matplotlib

            return write_sheet(scene, out, layer)
        return _write_html(scene, out, limit, layer)
    except OSError as error:
        kind = "picture" if is_picture else "page"
        raise RecastError(f"cannot write the {kind} {out}: {error.strerror}") from error


def one_page(scene: Scene, layer: str | None = None) -> str:
    """The page of a scene of one image, as text."""
    return _page(pack(scene, LIMIT, layer))


def _write_html(scene: Scene, out: Path, limit: int, layer: str | None) -> list[Path]:
    alone = len(scene.pictures) == 1
    packed = pack(scene, limit if alone else None, layer)
    if alone or len(_json(packed).encode()) <= limit:
        write_text(out, _page(packed))
        return [out]
    folder = out.with_name(f"{out.stem}_files")
    folder.mkdir(exist_ok=True)
    names = page_names([picture.name for picture in scene.pictures])
    items = []
    for name in names:
        check_ours(folder / name)
    for picture, name in zip(scene.pictures, names, strict=True):
        one = pack(replace(scene, pictures=(picture,)), limit, layer)
        one |= {"title": f"{picture.name}: {scene.title}", "home": f"../{out.name}"}
        write_text(folder / name, _page(one))
        items.append(_item(scene, picture, f"{folder.name}/{name}"))
    notes = "\n".join(f'<p class="note">{html.escape(note)}</p>' for note in scene.notes)
    count = str(len(scene.pictures))
    write_text(out, fill_page("index.html", scene.title, items="\n".join(items), notes=notes, count=count))
    return [out, *(folder / name for name in names)]


def check_target(out: Path) -> None:
    """Raise `RecastError` unless `out` can be the name of a page, or of a picture that can be drawn here."""
    check_place(out, "the page", "explain.html")
    ending = out.suffix.lower()
    if ending in (".jpg", ".jpeg"):
        raise RecastError(f"maps are drawn as PNG, JPEG would blur them, got {out}: give it the ending .png")
    if ending not in (*PAGES, PICTURE):
        raise RecastError(f"maps are written as an HTML page or a PNG, got {out}: give it the ending .html or .png")
    check_ours(out)
    if ending == PICTURE and find_spec("matplotlib") is None:
        raise RecastError("a PNG of maps needs matplotlib: pip install matplotlib, or write an .html page")


def page_names(names: list[str]) -> list[str]:
    """A file name for every image, safe and no two alike: cat.html, cat-2.html."""
    found: list[str] = []
    for name in names:
        stem = safe_stem(Path(name).stem) or "image"
        tries = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        taken = {other.lower() for other in found}
        found.append(next(f"{chosen}.html" for chosen in tries if f"{chosen}.html".lower() not in taken))
    return found


def safe_stem(name: str) -> str:
    """A name with nothing in it that a file's name should not have."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")


def _page(packed: dict[str, Any]) -> str:
    data = _json(packed).replace("<", "\\u003c")  # "</script>" in a name must not end the script
    return fill_page("page.html", packed["title"], data=data, script="\n".join(map(_read, SCRIPTS)))


def _json(packed: dict[str, Any]) -> str:
    return json.dumps(packed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _item(scene: Scene, picture: Picture, link: str) -> str:
    """A card of the page that leads to the images' own."""
    said = []
    for arm, (best, *_) in picture.predictions[-1].items():
        label, share = html.escape(scene.arms.get(arm, arm)), best.value.replace(" ", "\u00a0")
        chip = f'<span class="chip {html.escape(arm)}" aria-hidden="true"></span>'
        said.append(f"{chip}{label}: <b>{html.escape(best.name)}</b> {share}")
    labelled = f"<br>labelled <b>{html.escape(picture.label)}</b>" if picture.label else ""
    return (
        f'<li class="card"><a href="{html.escape(link)}"><img src="{png(picture.pixels, THUMBNAIL)}" alt="">'
        f"<span>{html.escape(picture.name)}</span></a><p>{'<br>'.join(said)}{labelled}</p></li>"
    )


def fill_page(template: str, title: str, **parts: str) -> str:
    """A template with its parts in their places: what a part says is never looked at again."""
    return Template(_read(template)).substitute(title=html.escape(title), style=_read("page.css"), **parts)


def _read(name: str) -> str:
    return files("recast.lab.explain").joinpath("assets", name).read_text(encoding="utf-8")
