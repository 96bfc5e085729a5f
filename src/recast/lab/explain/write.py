"""Write a `Scene` as HTML (one page, or a page per image and a list of them) or as a PNG. Does not import torch."""

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
"""Longest side of a picture in the list of pages."""
PAGES, PICTURE = (".html", ".htm"), ".png"
SCRIPTS = ("maps.js", "colors.js", "words.js", "page.js")


def write_pages(
    scene: Scene, out: Path, *, limit: int = LIMIT, layer: str | None = None, make_folder: bool = False
) -> list[Path]:
    """Write the scene to `out`, HTML or PNG, and return the files written, the one to open first.

    Images share one page while their data stay below `limit` bytes. Otherwise each has its own page in the folder
    OUT_files/, and `out` lists them. Files are written under temporary names and renamed.

    Args:
        layer: layer to open first (default: `first_layer`), or to draw in a PNG (`write_sheet`).
        make_folder: create the folder of `out` once the maps are packed.

    Raises:
        RecastError: the layer has no maps, or the file cannot be written.
    """
    kind = "picture" if out.suffix.lower() == PICTURE else "page"
    try:
        packed = {} if kind == "picture" else pack(scene, limit if len(scene.pictures) == 1 else None, layer)
        if make_folder:
            out.parent.mkdir(exist_ok=True)
        check_target(out)
        if kind == "picture":
            from recast.lab.explain.sheet import write_sheet  # needs matplotlib

            return write_sheet(scene, out, layer)
        if len(scene.pictures) == 1 or len(_json(packed).encode()) <= limit:
            write_text(out, _page(packed))
            return [out]
        return _write_several(scene, out, limit, layer)
    except OSError as error:
        raise RecastError(f"cannot write the {kind} {out}: {error.strerror}") from error


def _write_several(scene: Scene, out: Path, limit: int, layer: str | None) -> list[Path]:
    """Write a page for every image, and the list of them."""
    folder = out.with_name(f"{out.stem}_files")
    folder.mkdir(exist_ok=True)
    pages = [folder / name for name in page_names([picture.name for picture in scene.pictures])]
    for page in pages:
        check_ours(page)
    for picture, page in zip(scene.pictures, pages, strict=True):
        packed = pack(replace(scene, pictures=(picture,)), limit, layer)
        write_text(page, _page(packed | {"title": f"{picture.name}: {scene.title}", "home": f"../{out.name}"}))
    items = (
        _item(scene, picture, f"{folder.name}/{page.name}") for picture, page in zip(scene.pictures, pages, strict=True)
    )
    notes = "\n".join(f'<p class="note">{html.escape(note)}</p>' for note in scene.notes)
    write_text(out, fill_page("index.html", scene.title, items="\n".join(items), notes=notes, count=str(len(pages))))
    return [out, *pages]


def check_target(out: Path) -> None:
    """Raise `RecastError` unless `out` can be written as a page, or as a PNG."""
    check_place(out, "the page", "explain.html")
    ending = out.suffix.lower()
    if ending not in (*PAGES, PICTURE):
        raise RecastError(f"unknown format of {out}: use the ending .html for a page or .png for a picture")
    check_ours(out)
    if ending == PICTURE and find_spec("matplotlib") is None:
        raise RecastError("a PNG of maps needs matplotlib: pip install matplotlib, or write an .html page")


def page_names(names: list[str]) -> list[str]:
    """Return a safe, unique file name for every image: cat.html, cat-2.html."""
    pages: dict[str, str] = {}
    for name in names:
        stem = safe_stem(Path(name).stem) or "image"
        candidates = (f"{stem}.html" if number == 1 else f"{stem}-{number}.html" for number in count(1))
        page = next(page for page in candidates if page.lower() not in pages)  # some file systems ignore the case
        pages[page.lower()] = page
    return list(pages.values())


def safe_stem(name: str) -> str:
    """Replace characters that are unsafe in a file name by "-"."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-")


def _page(packed: dict[str, Any]) -> str:
    data = _json(packed).replace("<", "\\u003c")  # "</script>" in a name must not end the script
    return fill_page("page.html", packed["title"], data=data, script="\n".join(map(_read, SCRIPTS)))


def _json(packed: dict[str, Any]) -> str:
    return json.dumps(packed, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _item(scene: Scene, picture: Picture, link: str) -> str:
    """Return the card of an image in the list of pages."""
    lines = []
    for arm, (best, *_) in picture.predictions[-1].items():
        label, value = html.escape(scene.arms.get(arm, arm)), best.value.replace(" ", "\u00a0")
        chip = f'<span class="chip {html.escape(arm)}" aria-hidden="true"></span>'
        lines.append(f"{chip}{label}: <b>{html.escape(best.name)}</b> {value}")
    if picture.label:
        lines.append(f"label: <b>{html.escape(picture.label)}</b>")
    return (
        f'<li class="card"><a href="{html.escape(link)}"><img src="{png(picture.pixels, THUMBNAIL)}" alt="">'
        f"<span>{html.escape(picture.name)}</span></a><p>{'<br>'.join(lines)}</p></li>"
    )


def fill_page(template: str, title: str, **parts: str) -> str:
    """Return an HTML page: a template of assets/ inside shell.html. Placeholders in `parts` are not replaced."""
    title, style = html.escape(title), _read("page.css")
    body = Template(_read(template)).substitute(title=title, **parts)
    return Template(_read("shell.html")).substitute(title=title, style=style, body=body)


def _read(name: str) -> str:
    return files("recast.lab.explain").joinpath("assets", name).read_text(encoding="utf-8")
