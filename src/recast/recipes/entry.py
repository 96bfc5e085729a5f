"""What a paper's recipe is made of: a function, and the docstring that says where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recast.run.config import DataConfig, Recipe

__all__ = ["Entry", "RecipeFunction", "change", "compute", "imagenet", "imagenet_21k"]

RecipeFunction = Callable[[], Recipe]

IMAGENET_IMAGES = 1_281_167
IMAGENET_21K_IMAGES = 14_197_122
"""The whole of it (Fall 2011), 21,841 classes."""

DATA_DIRS = {"imagenet": "IMAGENET", "folder": "IMAGENET21K", "cifar100": "CIFAR100"}


@dataclass(frozen=True)
class Entry:
    """One recipe of a paper; its `function` is what the registry holds."""

    name: str
    title: str
    """What it trains, in less than 90 characters: the line of `recast train --help`."""
    make: RecipeFunction
    experiment: str
    """Which of the paper's, with table or section."""
    expected: str
    """The published number."""
    cost: str
    inferred: str
    """What the paper leaves open or says in two ways, and what is taken here."""
    after: str | None = None
    """The recipe whose weights it starts from."""

    def command(self) -> str:
        """The command line; a later stage names the weights of the earlier one."""
        data_dir = DATA_DIRS[self.make().data.name]
        weights = f" --checkpoint runs/{self.after}/weights.safetensors" if self.after else ""
        return f"recast train {self.name} --data-dir {data_dir}{weights} --out runs/{self.name}"

    def function(self, paper: str) -> RecipeFunction:
        """A function without arguments that makes the recipe, with a name and a docstring of its own."""

        def recipe() -> Recipe:
            return self.make()

        recipe.__name__ = recipe.__qualname__ = self.name
        recipe.__doc__ = "\n".join(
            (
                self.title,
                "",
                f"Paper: {paper}: {self.experiment}",
                f"Command: {self.command()}",
                f"Expected: {self.expected}",
                f"Cost: {self.cost}",
                f"Inferred: {self.inferred}",
            )
        )
        return recipe


def change(recipe: Recipe, **fields: Any) -> Recipe:
    """A copy with other values; a group takes a dict: `change(recipe, epochs=400, optim={"lr": 1e-3})`."""
    values = {
        name: dataclasses.replace(getattr(recipe, name), **value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return dataclasses.replace(recipe, **values)


def imagenet(img_size: int, batch_size: int, crop_pct: float) -> DataConfig:
    """ImageNet-1k, trained and validated at one size."""
    return DataConfig("imagenet", img_size=img_size, batch_size=batch_size, crop_pct=crop_pct, workers=8)


def imagenet_21k(img_size: int, batch_size: int, crop_pct: float) -> DataConfig:
    """ImageNet-21k as a folder of classes; where it has no val/, 1 % of every class is held out."""
    data = imagenet(img_size, batch_size, crop_pct)
    return dataclasses.replace(data, name="folder", val_fraction=0.01)


def compute(gmac: float, epochs: float, *, images: int = IMAGENET_IMAGES, teacher_gmac: float = 0.0) -> str:
    """Floating-point operations of a training: images · epochs · 2 · (3 · gmac + teacher_gmac), as text.

    Two operations a multiply-add, a backward pass twice the forward pass, a teacher runs forward only.
    `gmac`: billions of multiply-adds of one image, forward.
    """
    exa = images * epochs * 2 * (3 * gmac + teacher_gmac) * 1e9 / 1e18
    return f"{exa:,.0f} EFLOP" if exa >= 100 else f"{exa:.3g} EFLOP"
