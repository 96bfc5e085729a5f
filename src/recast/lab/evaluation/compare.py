"""`recast report --compare`: saved networks on the same images, with paired intervals, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from recast.errors import RecastError
from recast.files import check_ours, check_place, write_text
from recast.io import load
from recast.lab.config import DataConfig
from recast.lab.data import load_data
from recast.lab.evaluation.context import PixelModel
from recast.lab.evaluation.runner import measure, open_context
from recast.lab.report import formats
from recast.lab.suites import METRICS
from recast.models.build import input_defaults

ORDER = {2: ("finetuned", "recast"), 3: ("parent", "finetuned", "recast")}
"""How the networks are called inside, by their number: differences are of the last one to the others."""


def compare(files: Sequence[str], config: DataConfig, out: Path, trust: bool = False, device: str = "auto") -> str:
    """Measure two or three files of `recast.save` on validation images, write a page, and return its first sentence.

    Images are normalised as each network states (timm's do), else as `config` or the data set says.
    """
    if len(files) not in ORDER:
        raise RecastError(f"--compare takes two or three files, the one to judge last, got {len(files)}")
    check_place(out, "the page", "compare.html")
    check_ours(out)
    models = {arm: load(file, trust=trust) for arm, file in zip(ORDER[len(files)], files, strict=True)}
    stated = {arm: input_defaults(model) for arm, model in models.items()}
    if config.img_size is None:
        sides = {one.size[0] for one in stated.values() if one}
        if len(sides) > 1:
            raise RecastError(f"--compare: the networks take images of {sorted(sides)} pixels: choose one, --img-size")
        config = config.replace(img_size=sides.pop() if sides else None)
    data = load_data(config)
    given = config.mean is not None or config.std is not None
    pixels = {
        arm: PixelModel(model, *((own.mean, own.std) if (own := stated[arm]) and not given else (data.mean, data.std)))
        for arm, model in models.items()
    }
    results = measure(open_context(pixels, data, device=device), ("clean",))
    names = dict(zip(models, files, strict=True))
    rows = {(row.model, row.metric): row for row in results.rows}
    gaps = {(line.against, line.metric): line for line in results.differences if line.model == "recast"}
    others = [arm for arm in models if arm != "recast"]
    sentences = []
    for arm in others:
        gap = gaps[arm, "top1"]
        shown = formats.leaves_out_zero(gap.low, gap.high)
        way = f"{formats.signed(gap.value)} points {'above' if gap.value > 0 else 'below'}"
        interval = f"95 % interval {formats.interval(gap.low, gap.high)}, {gap.n:,} images"
        sentences.append(
            f"{names['recast']} is {way if shown else 'not shown to differ from'} {names[arm]} ({interval})."
        )
    heads = ["", *files, *(f"{names['recast']} − {names[arm]}" for arm in others)]
    lines = []
    for metric in dict.fromkeys(row.metric for row in results.rows):
        cells = [METRICS[metric].label if metric in METRICS else metric]
        cells += [formats.decimal(rows[arm, metric].value, 2) for arm in models]
        cells += [
            f"{gaps[arm, metric].value:+.2f} ({gaps[arm, metric].low:+.2f} to {gaps[arm, metric].high:+.2f})"
            for arm in others
        ]
        lines.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    write_text(
        out,
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        '<meta name="generator" content="recast">'
        "<title>Recast: networks compared</title><style>body{font-family:system-ui,sans-serif;max-width:60em;margin:"
        "24px auto;padding:0 16px;color:#1d2126}table{border-collapse:collapse}td,th{padding:6px 14px;text-align:"
        "right;border-top:1px solid #ddd;overflow-wrap:anywhere}td:first-child{text-align:left}</style>"
        + "".join(f"<h2>{escape(sentence)}</h2>" for sentence in sentences)
        + f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>"
        + "".join(f"<tr>{line}</tr>" for line in lines)
        + f"</table><p>Validation images of {escape(data.name)}, {data.test_size} pixels. Intervals are paired: all "
        "networks saw the same images. One seed each: they say what other images would do, not another training.</p>"
        "</html>\n",
    )
    return " ".join(sentences)
