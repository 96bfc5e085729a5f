"""The answer of a trial as a page, with the curves of the arms, and a page of what heads see on five images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup, escape
from torch import nn

from recast.files import write_text
from recast.lab.data import Data
from recast.lab.explain.inputs import Input
from recast.lab.explain.make import make_scene
from recast.lab.explain.write import write_scene
from recast.lab.folder.records import ARMS
from recast.lab.pages import formats
from recast.lab.pages.charts import Point, Role, Series, series_chart
from recast.lab.pages.template import fill_page
from recast.lab.report.tables import Cell, PageTable
from recast.lab.trial.answer import COLUMNS, Answer

PAGE, HEADS = "trial.html", "heads.html"
IMAGES = 5
ROLES: dict[str, Role] = {"finetuned": "finetuned", "longer": 0.3, "added": 0.7, "recast": "recast"}
"""Colours of the arms."""
Curve = Sequence[tuple[int, float]]


def write_page(folder: Path, answer: Answer, curves: Mapping[str, Curve], title: str) -> Path:
    """Write FOLDER/trial.html: the sentence, arms, training curves and costs; returns its path.

    curves: arm → (update, training loss), in the mean over seeds.
    """
    labels = {line.arm: line.label for line in answer.arms}
    series = [Series(labels[arm], [Point(*point) for point in curve], ROLES[arm]) for arm, curve in curves.items()]
    chart = series_chart("training", "Training loss by update", series, xlabel="update", whole_x=True)
    tiles = [
        (
            title,
            f"{formats.signed(gain.mean)} points",
            f"{100 * answer.confidence:.3g} %: {formats.bounds(gain.low, gain.high)}",
        )
        for title, gain in zip(("at equal updates", "at equal time"), answer.gains.values(), strict=False)
    ]
    tiles.append(("heads that attend", f"{answer.awake} of {answer.heads}", "in the recast arm"))
    columns, *rows = [[Cell(text) for text in row] for row in (COLUMNS, *answer.rows())]
    table = PageTable("arms", columns, {"": rows}, kind="stack")
    changes = [_with_code(change) for change in answer.changes]
    text = fill_page(
        "trial.html.j2", "report.css", title=title, answer=answer, changes=changes, tiles=tiles, table=table,
        chart=chart, heads=HEADS,
    )  # fmt: skip
    write_text(folder / PAGE, text)
    return folder / PAGE


def _with_code(text: str) -> Markup:
    """Return text as HTML, with options of the command line as code."""
    return Markup(re.sub(r"--[a-z][a-z-]*", r"<code>\g<0></code>", str(escape(text))))


def write_heads(folder: Path, parent: nn.Module, child: nn.Module, data: Data) -> Path:
    """Write FOLDER/heads.html: maps of the recast network on validation images, evenly spread; returns its path."""
    count = min(IMAGES, len(data.val))
    inputs = []
    for index in range(0, count * (len(data.val) // count), len(data.val) // count):
        pixels, labels = data.val.batch([index])
        inputs.append(Input(data.val.image_name(index), pixels[0], data.classes[int(labels[0])]))
    networks = {"parent": parent, "recast": child}
    titles = {name: ARMS[name] for name in networks}
    scene = make_scene("Where heads look", inputs, networks, data.classes, (data.mean, data.std), titles)
    return write_scene(scene, folder / HEADS)
