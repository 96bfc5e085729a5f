"""`recast explain RUN --neighbours`: the training images nearest to some images, for every arm of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from recast.errors import RecastError
from recast.files import write_text
from recast.lab.config.explain import ExplainOptions
from recast.lab.data import Data
from recast.lab.data.datasets import LabelledImages
from recast.lab.data.sources import without_unreadable
from recast.lab.evaluation.context import Batch
from recast.lab.evaluation.knn import banks, nearest, sources_knn, unit_features
from recast.lab.evaluation.runner import open_context
from recast.lab.explain.inputs import Input, find_inputs, page_stem, read_inputs, rgb_bytes
from recast.lab.explain.write import check_target
from recast.lab.folder.files import check_ours
from recast.lab.folder.records import ARMS
from recast.lab.folder.run import RunFolder
from recast.lab.open import data_of_recipe, open_run
from recast.lab.pages.formats import png
from recast.lab.pages.template import fill_page
from recast.modes import in_eval

NEAREST = 10
SIDE = 112  # longest side of a picture on the page


@dataclass(frozen=True)
class Shown:
    """An image and its class; the group of the class is empty if the data have none."""

    picture: str  # data: URI of a PNG
    name: str
    label: str
    group: str = ""
    similarity: float = 1.0  # cosine with the query

    def beside(self, query: Shown) -> str:
        """Return right, group right or wrong for a query with a label, else ""."""
        if not query.label:
            return ""
        if self.label == query.label:
            return "right"
        return "group right" if self.group and self.group == query.group else "wrong"


@dataclass(frozen=True)
class Query:
    """An image and its neighbours by arm, the nearest first."""

    image: Shown
    nearest: dict[str, list[Shown]]


def find_neighbours(
    models: Mapping[str, nn.Module], data: Data, inputs: Sequence[Input], device: str = "cpu"
) -> list[Query]:
    """Return the training images nearest to each input, by the features that the suite `knn` compares.

    Raises:
        RecastError: there are no training images, or the features of a network cannot be determined.
    """
    context = open_context(models, data, device=device)
    (source,) = sources_knn(context)
    images = torch.stack([image.pixels for image in inputs]).to(context.device)
    batch = Batch(context, source, 0, images, torch.zeros(len(inputs), dtype=torch.long))
    queries = [
        Query(Shown(png(rgb_bytes(image.pixels), SIDE), image.name, image.label or "", _group(data, image.label)), {})
        for image in inputs
    ]
    with in_eval(*context.models.values()):
        for model in context.models.values():
            model.to(context.device)
        features = banks(batch)
        for name, model in context.models.items():
            bank, _ = features[name]
            similarities, indices = nearest(unit_features(context, model, images), bank, NEAREST)
            for query, row, columns in zip(queries, similarities.tolist(), indices.tolist(), strict=True):
                query.nearest[name] = _shown(data, source.depends[0], columns, row)
    return queries


def _shown(data: Data, database: LabelledImages, indices: list[int], similarities: list[float]) -> list[Shown]:
    pixels, labels = database.batch(indices)
    names = [data.classes[label] for label in labels.tolist()]
    return [
        Shown(png(rgb_bytes(image), SIDE), database.image_name(index), name, _group(data, name), round(similarity, 4))
        for image, index, name, similarity in zip(pixels, indices, names, similarities, strict=True)
    ]


def _group(data: Data, name: str | None) -> str:
    if data.groups is None or name is None:
        return ""
    return data.groups.names[int(data.groups.of[data.classes.index(name)])]


def neighbours_page(options: ExplainOptions, size: tuple[int, int] | None) -> Path:
    """Write the page of nearest training images and return its path.

    Classes are shown even if the run was trained with groups of them, which stand beside them.
    """
    page = f"neighbours-{page_stem(options.images)}.html"
    target = Path(options.out) if options.out else RunFolder(options.subject).explain / page
    for name, value in {"layer": options.layer, "outputs": options.outputs}.items():
        if value is not None:
            raise RecastError(f"--neighbours compares features only: drop --{name}")
    if options.out:
        check_target(target)
    check_ours(target)
    images = find_inputs(options.images)
    run = open_run(options.subject, options.data_dir)
    data, trained = run.data, run.recipe.data
    if (grouping := run.recipe.grouping).learns_groups:
        data = data_of_recipe(run.recipe, grouping.with_labels(None))
    if trained.bad_image == "skip":
        data = without_unreadable(data, "train", "val")
    side = data.test_size
    names = {name: name for name in data.classes}
    inputs, notes = read_inputs(images, size or (side, side), options.num_images, names, trained.crop_pct, data)
    models = {"Network" if run.recipe.is_plain else ARMS[arm]: model for arm, model in run.models.items()}
    queries = find_neighbours(models, data, inputs, options.device)
    target.parent.mkdir(parents=True, exist_ok=True)
    title = f"Nearest training images: {run.recipe.model.name} on {run.recipe.data.title}"
    write_text(target, fill_page("neighbours.html.j2", "explain.css", title=title, notes=notes, queries=queries))
    return target
