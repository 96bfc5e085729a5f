"""`recast explain RUN --neighbours`: the training images that are nearest to some images, of every arm of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

from recast.errors import RecastError
from recast.files import check_ours, write_json, write_text
from recast.lab.config.evaluation import Options
from recast.lab.config.explain import ExplainOptions
from recast.lab.data import Data, load_data
from recast.lab.data.datasets import LabelledImages
from recast.lab.evaluation.context import Batch
from recast.lab.evaluation.knn import banks, nearest, sources_knn, unit_features
from recast.lab.evaluation.run_folder import open_run
from recast.lab.evaluation.runner import open_context
from recast.lab.explain.inputs import Input, find_inputs, page_stem, read_inputs, some_of_validation
from recast.lab.explain.write import PAGES, check_target
from recast.lab.records import ARMS
from recast.lab.report.neighbours import FILE, Neighbours, Query, Shown, draw_neighbours, png
from recast.tracing.hooks import in_eval

NEAREST = 10
SIDE = 112
"""Of a picture on the page, at most."""


def find_neighbours(
    models: Mapping[str, nn.Module], data: Data, inputs: Sequence[Input], device: str = "cpu", fine: bool = False
) -> Neighbours:
    """The training images nearest to each input, by the features that suite `knn` compares.

    fine: the networks were trained with other labels than those of `data`. Raises RecastError where there are no
    training images, and where one cannot tell the features of a network.
    """
    context = open_context(models, data, device=device, options=Options(labels="fine" if fine else None))
    (source,) = sources_knn(context)
    images = torch.stack([one.pixels for one in inputs]).to(context.device)
    batch = Batch(context, source, 0, images, torch.zeros(len(inputs), dtype=torch.long))
    asked = [Shown(_png(one.pixels), one.name, one.label or "", _coarse(data, one.label)) for one in inputs]
    queries = [Query(one, {}) for one in asked]
    with in_eval(*context.models.values()):
        for model in context.models.values():
            model.to(context.device)
        found = banks(batch)
        for name, model in context.models.items():
            bank, _ = found[name]
            values, indices = nearest(unit_features(context, model, images), bank, NEAREST)
            for query, row, which in zip(queries, values.tolist(), indices.tolist(), strict=True):
                query.nearest[name] = _shown(data, source.depends[0], which, row)
    return Neighbours(queries)


def _shown(data: Data, database: LabelledImages, indices: list[int], similarities: list[float]) -> list[Shown]:
    pixels, labels = database.batch(indices)
    names = [data.classes[label] for label in labels.tolist()]
    return [
        Shown(_png(one), database.image_name(index), name, _coarse(data, name), round(similarity, 4))
        for one, index, name, similarity in zip(pixels, indices, names, similarities, strict=True)
    ]


def _png(pixels: Tensor) -> str:
    return png((pixels * 255).round().byte().permute(1, 2, 0).cpu().numpy(), SIDE)


def _coarse(data: Data, name: str | None) -> str:
    if data.coarse is None or name is None:
        return ""
    return data.coarse.names[int(data.coarse.of[data.classes.index(name)])]


def neighbours_page(asked: ExplainOptions, size: tuple[int, int] | None) -> Path:
    """Write RUN/neighbours.json, which the report shows too, and a page of it. Fine classes are shown whatever labels
    the run was trained with, and the coarse ones beside them where they are known."""
    folder = Path(asked.subject)
    target = Path(asked.out) if asked.out else folder / "explain" / f"neighbours-{page_stem(asked.images)}.html"
    if target.suffix.lower() not in PAGES:
        raise RecastError(f"--neighbours writes an HTML page, got --out {target}: name it .html")
    for name in ("layer", "outputs"):
        if getattr(asked, name) is not None:
            raise RecastError(f"--neighbours shows features alone: drop --{name}")
    if asked.out:
        check_target(target)
    check_ours(target)
    wanted = find_inputs(asked.images)
    run = open_run(folder)
    data, trained = run.data, run.recipe.data
    if fine := run.recipe.labels.labels == "coarse":
        data = load_data(trained, run.recipe.augmentation, run.recipe.labels.replace(labels="fine"))
    side = data.test_size
    names = {name: name for name in data.classes}
    inputs, notes = read_inputs(
        wanted or some_of_validation(data), size or (side, side), asked.num_images, names, trained.crop_pct, data
    )
    models = {"Network" if run.recipe.is_plain else ARMS[arm]: model for arm, model in run.models.items()}
    found = find_neighbours(models, data, inputs, asked.device, fine)
    write_json(folder / FILE, asdict(found))
    target.parent.mkdir(parents=True, exist_ok=True)
    title = escape(f"Nearest training images: {run.recipe.model.name} on {data.name}")
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    write_text(
        target,
        f"<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        '<meta name="generator" content="recast">'
        f"<title>{title}</title><body style='font-family:system-ui,sans-serif;max-width:1280px;margin:24px auto;"
        f"padding:0 16px;color:#1d2126'><h1>{title}</h1>{said}{draw_neighbours(found)}</body></html>\n",
    )
    return target
