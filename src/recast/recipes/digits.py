"""The quickstart's two trainings: a small ResNet on scikit-learn's 1,797 handwritten digits, then both arms."""

from __future__ import annotations

from recast.run.config import DataConfig, ModelConfig, OptimConfig, Recipe


def digits_parent() -> Recipe:
    """The parent, from random weights; nothing is recast."""
    return Recipe(
        model=ModelConfig("digits_resnet", num_classes=10),
        data=DataConfig("digits", img_size=24, batch_size=64),
        where=["none"],
        optim=OptimConfig(lr=2e-3, min_lr=1e-5),
        epochs=6,
        control=False,
    )


def digits() -> Recipe:
    """the quickstart: both arms on handwritten digits, from a trained digits_resnet

    Paper: none.
    Command: recast quickstart
    Expected: top-1 of the 500 held-out digits with seed 0: parent 98.0 %, the parent trained on 99.0 %, recast 98.0 %
        at the start and 98.4 % at the end. A story, no evidence: one digit is 0.2 points.
    Cost: on 2 otherwise idle CPU cores 0.7 s an epoch for the parent, 3.5 s for the recast network.
    Inferred: everything.
    """
    return Recipe(
        model=ModelConfig("digits_resnet", num_classes=10),
        data=DataConfig("digits", img_size=24, batch_size=64),
        optim=OptimConfig(lr=3e-4, gate_lr=1e-2),
        epochs=5,
    )
