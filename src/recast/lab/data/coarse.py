"""Coarse classes above the classes of a data set, each fine class in one of them: CIFAR-100's superclasses, a CSV, the
outer of two levels of folders, a rank of iNaturalist's taxonomy."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from recast.errors import RecastError, shown
from recast.lab.config import LabelsConfig
from recast.lab.data.trees import composed
from recast.reading import decode, read_bytes

CIFAR100 = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
"""The 20 superclasses of Krizhevsky 2009, in the order of their numbers, and their classes."""
RANKS = ("kingdom", "phylum", "class", "order", "family", "genus")


class Coarse(NamedTuple):
    """The level above the classes of a data set."""

    of: Tensor
    """(classes,) int64: the coarse class of every class."""
    names: list[str]


def coarse_classes(data: str, config: LabelsConfig, classes: list[str]) -> Coarse | None:
    """The coarse classes that `config` names of a data set, sorted; None where it names none and labels are to be fine.

    Raises RecastError for a source that does not fit the data, and for a class that is in no coarse class or in two.
    """
    where = f"rank={config.rank}"
    if config.coarse_file is not None:
        where, found = config.coarse_file, read_mapping(config.coarse_file)
    elif config.rank == "folder":
        found = _outer_folders(data, classes)
    elif config.rank is not None:
        found = dict(zip(classes, _ranks(classes, config.rank), strict=True))
    else:
        found = {fine: coarse for coarse, names in CIFAR100.items() for fine in names.split()}
        if not set(classes) <= found.keys():
            if config.labels == "fine":
                return None
            raise RecastError(
                f"{data} has no coarse classes of its own: give papers.grafit.coarse_file, a CSV with the columns fine "
                "and coarse, or rank"
            )
    if missing := [name for name in classes if name not in found]:
        named = f"{', '.join(map(shown, missing[:3]))}{', …' * (len(missing) > 3)}"
        raise RecastError(f"{len(missing)} of {len(classes)} classes are in no coarse class of {where}: {named}")
    names = sorted({found[name] for name in classes})
    return Coarse(torch.tensor([names.index(found[name]) for name in classes]), names)


def read_mapping(path: str) -> dict[str, str]:
    """Fine class → coarse class of a CSV with the columns `fine` and `coarse`, which may name classes that are not in
    the data. Raises RecastError for another file, an empty cell, and a fine class with two coarse ones."""
    try:
        reader = csv.DictReader(decode(read_bytes(path), path).splitlines())
    except FileNotFoundError:
        raise RecastError(f"no such file of coarse classes: {path}") from None
    found: dict[str, str] = {}
    try:
        columns = list(reader.fieldnames or ())
        if missing := [name for name in ("fine", "coarse") if name not in columns]:
            raise RecastError(f"{path} must have the columns fine and coarse, missing: {', '.join(missing)}")
        if twice := [name for name in ("fine", "coarse") if columns.count(name) > 1]:
            raise RecastError(f"{path} has the column {twice[0]} twice, expected it once")
        for row in reader:
            if None in row:
                raise RecastError(f"{path} line {reader.line_num}: more cells than columns, quote names with a comma")
            fine, coarse = (composed((row[name] or "").strip()) for name in ("fine", "coarse"))
            if not (fine and coarse):
                raise RecastError(f"{path} line {reader.line_num}: fine or coarse is empty, name both")
            if (before := found.setdefault(fine, coarse)) != coarse:
                raise _in_two(f"{path} line {reader.line_num}", fine, (before, coarse))
    except csv.Error as error:
        raise RecastError(f"{path} line {reader.line_num}: {error}") from None
    return found


def _in_two(where: str, fine: str, both: Iterable[str]) -> RecastError:
    return RecastError(f"{where}: class {shown(fine)} is in {' and in '.join(map(shown, both))}, expected one of them")


def _outer_folders(data: str, classes: list[str]) -> dict[str, str]:
    if data != "folder":
        raise RecastError(f"rank=folder is for folders COARSE/FINE/IMAGE (data.name=folder), got {data}")
    outer: dict[str, str] = {}
    for name in classes:
        coarse, _, fine = name.partition("/")
        if (before := outer.setdefault(fine, coarse)) != coarse:
            raise _in_two("the folders of coarse classes", fine, (before, coarse))
    return {name: name.partition("/")[0] for name in classes}


def _ranks(classes: list[str], rank: str) -> list[str]:
    """A rank of the taxonomy in iNaturalist's names, NUMBER_KINGDOM_PHYLUM_CLASS_ORDER_FAMILY_GENUS_SPECIES.

    Two that bear the same name, as genera of a bird and of a plant do, are told apart by the ranks above them.
    """
    found: list[tuple[str, str]] = []
    for name in classes:
        parts = name.split("_")
        if len(parts) != len(RANKS) + 2:
            wanted = "NUMBER_KINGDOM_PHYLUM_CLASS_ORDER_FAMILY_GENUS_SPECIES"
            raise RecastError(f"rank={rank} reads iNaturalist's class names, {wanted}, got {shown(name)}")
        if not (own := parts[1 + RANKS.index(rank)]):
            raise RecastError(f"rank={rank} is empty in the class name {shown(name)}: choose another rank")
        found.append((own, "_".join(parts[1 : 2 + RANKS.index(rank)])))
    alike = Counter(own for own, _ in set(found))
    return [own if alike[own] == 1 else path for own, path in found]
