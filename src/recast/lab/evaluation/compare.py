"""`recast report --compare`: saved networks on the same images, with paired intervals, as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from recast.errors import RecastError
from recast.files import check_ours, check_place, write_text
from recast.io import load
from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.evaluation.context import PixelModel
from recast.lab.evaluation.runner import Results, measure, open_context
from recast.lab.records import Difference
from recast.lab.report import check_packages, formats
from recast.lab.report.table import Cell, Group, PageTable
from recast.lab.suites import METRICS
from recast.models.build import input_defaults

ORDER = {2: ("finetuned", "recast"), 3: ("parent", "finetuned", "recast")}
"""How the networks are called inside, by their number: differences are of the last one to the others."""


def compare(
    files: Sequence[str], config: DataConfig, out: Path, trust: bool = False, device: str = "auto",
    say: Callable[[str], object] = lambda text: None,
) -> str:  # fmt: skip
    """Measure two or three files of `recast.save` on validation images, write a page, and return its first sentence.

    Images are normalised as each network states (timm's do), else as `config` or the data set says: `say` is given a
    line on each network that states nothing.
    """
    if len(files) not in ORDER:
        raise RecastError(f"--compare takes two or three files, the one to judge last, got {len(files)}")
    check_packages()
    from recast.lab.report.page import render_comparison

    check_place(out, "the page", "compare.html")
    check_ours(out)
    names = dict(zip(ORDER[len(files)], files, strict=True))
    models = {arm: load(file, trust=trust) for arm, file in names.items()}
    data = load_data(replace(config, img_size=config.img_size or _size(models)))
    context = open_context(_on_pixels(models, names, config, data, say), data, device=device)
    results = measure(context, (data.task.main[0],))
    gaps = {
        (line.against, line.metric): line
        for line in results.differences
        if line.model == "recast" and line.against in names
    }
    others = [arm for arm in names if arm != "recast"]
    sentences = [_sentence(gaps[arm, data.task.main[1]], names[arm], names["recast"]) for arm in others]
    note = (
        f"Validation images of {data.name}, {data.test_size} pixels. Intervals are paired: all networks saw the same "
        "images. One seed each: they say what other images would do, not another training."
    )
    write_text(out, render_comparison(sentences, _table(results, names, gaps), note))
    return " ".join(sentences)


def _size(models: Mapping[str, nn.Module]) -> int | None:
    """The side of images that the networks state; None where none does. RecastError where they differ."""
    sides = {stated.size[0] for model in models.values() if (stated := input_defaults(model))}
    if len(sides) > 1:
        raise RecastError(f"--compare: the networks take images of {sorted(sides)} pixels: choose one, --img-size")
    return sides.pop() if sides else None


def _on_pixels(
    models: Mapping[str, nn.Module], names: Mapping[str, str], config: DataConfig, data: Data,
    say: Callable[[str], object],
) -> dict[str, PixelModel]:  # fmt: skip
    """The networks with their normalisation: what `config` gives, what they state, or that of the data."""
    given, pixels = config.mean is not None or config.std is not None, {}
    for arm, model in models.items():
        stated = None if given else input_defaults(model)
        if stated is None and not given:
            mean, std = (" ".join(f"{value:.3g}" for value in values) for values in (data.mean, data.std))
            say(f"{names[arm]} states no normalisation; it gets that of {data.name}: mean {mean}, std {std}")
        pixels[arm] = PixelModel(model, *((stated or data).mean, (stated or data).std))
    return pixels


def _sentence(gap: Difference, other: str, judged: str) -> str:
    way = f"{formats.signed(gap.value)} points {'above' if gap.value > 0 else 'below'}"
    interval = f"95 % interval {formats.interval(gap.low, gap.high)}, {gap.n:,} images"
    is_shown = formats.leaves_out_zero(gap.low, gap.high)
    return f"{judged} is {way if is_shown else 'not shown to differ from'} {other} ({interval})."


def _table(results: Results, names: Mapping[str, str], gaps: Mapping[tuple[str, str], Difference]) -> PageTable:
    """A row for every metric: the networks, and what the last one has more than the others."""
    values = {(row.model, row.metric): row.value for row in results.rows}
    others = [arm for arm in names if arm != "recast"]
    heads = [Cell("Measured"), *(Cell(file, kind=arm) for arm, file in names.items())]
    heads += [Cell(f"{names['recast']} − {names[arm]}") for arm in others]
    rows = []
    for metric in dict.fromkeys(row.metric for row in results.rows):
        cells = [Cell(METRICS[metric].label), *(Cell(formats.decimal(values[arm, metric], 2)) for arm in names)]
        for gap in (gaps[arm, metric] for arm in others):
            cells.append(Cell(formats.signed(gap.value, 2), (formats.interval(gap.low, gap.high, 2),)))
        rows.append(cells)
    return PageTable("The networks compared", heads, [Group("", rows)])
