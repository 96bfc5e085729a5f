"""Coarse classes, each of which holds several classes of a data set.

They are CIFAR-100's superclasses, those of a CSV, or a rank of iNaturalist's taxonomy.
"""

from __future__ import annotations

import torch

from recast.errors import RecastError, listed, shown
from recast.lab.config.recipe import Groups
from recast.lab.data.trees import composed
from recast.lab.folder.tables import read_table

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
"""The 20 superclasses of Krizhevsky 2009 in the order of their labels, and their classes."""
RANKS = ("kingdom", "phylum", "class", "order", "family", "genus")


def coarse_classes(
    data: str, classes: list[str], labels: str, coarse_file: str | None, rank: str | None
) -> Groups | None:
    """Return the coarse classes of a data set, sorted; None if none are named and labels are fine.

    Raises RecastError if the source does not fit the data, or a class has no coarse class or two.
    """
    where = coarse_file or f"rank={rank}"
    if coarse_file is not None:
        coarse_of = read_mapping(coarse_file)
    elif rank is not None:
        coarse_of = {name: _taxon(name, rank) for name in classes}
    else:
        coarse_of = {fine: coarse for coarse, names in CIFAR100.items() for fine in names.split()}
        fits = set(classes) <= coarse_of.keys()
        if labels == "fine" and not (fits and data.lower().endswith("cifar100")):
            return None  # folders of other images may have such names too
        if not fits:
            raise RecastError(
                f"{data} has no coarse classes: give papers.grafit.coarse_file, a CSV with the columns fine and "
                "coarse, or rank"
            )
    if missing := [shown(name) for name in classes if name not in coarse_of]:
        raise RecastError(
            f"{len(missing)} of {len(classes)} classes are in no coarse class of {where}: {listed(missing, 3)}"
        )
    names = sorted({coarse_of[name] for name in classes})
    return Groups(torch.tensor([names.index(coarse_of[name]) for name in classes]), names)


def read_mapping(path: str) -> dict[str, str]:
    """Read fine class → coarse class from a CSV with the columns `fine` and `coarse`, which may list other classes too.

    Raises RecastError for another table, an empty cell, or a fine class with two coarse classes.
    """
    table = read_table(path)
    if sorted(name for name in table.columns if name in ("coarse", "fine")) != ["coarse", "fine"]:
        raise RecastError(f"{path} must have the columns fine and coarse, got {', '.join(table.columns)}")
    coarse_of: dict[str, str] = {}
    for row in table.rows:
        cells = dict(zip(table.columns, row, strict=True))
        fine, coarse = (composed(str(cells[column]).strip()) for column in ("fine", "coarse"))
        if not (fine and coarse):
            raise RecastError(f"{path}: class {shown(fine or coarse)} has no {'coarse' if fine else 'fine'} name")
        if (other := coarse_of.setdefault(fine, coarse)) != coarse:
            raise RecastError(f"{path}: class {shown(fine)} is in {shown(other)} and in {shown(coarse)}, expected one")
    return coarse_of


def _taxon(name: str, rank: str) -> str:
    """Return the taxon of a class, from its kingdom down to `rank`: two taxa may have one name, as some genera do."""
    parts, end = name.split("_"), 2 + RANKS.index(rank)
    if len(parts) != len(RANKS) + 2 or not parts[end - 1]:
        expected = "NUMBER_KINGDOM_PHYLUM_CLASS_ORDER_FAMILY_GENUS_SPECIES"
        raise RecastError(f"rank={rank} requires iNaturalist's class names, {expected}, got {shown(name)}")
    return "_".join(parts[1:end])
