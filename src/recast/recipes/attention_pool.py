"""Attention pooling in the place of a network's average: the paper's ResNet-50, and two recipes for trained networks.

Paper: Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation (arXiv:2112.13692), table
of attention pooling on other architectures: a ResNet-50 trained as in "ResNet strikes back".
"""

from __future__ import annotations

from recast.recipes.entry import Entry, change, compute
from recast.recipes.rsb import OPEN, TARGETS, a2
from recast.run.config import DataConfig, OptimConfig, PoolConfig, Recipe, RegularizationConfig

__all__ = ["ENTRIES", "PAPER", "attention_pool", "attention_pool_quick"]

PAPER = "Attention pooling of a ResNet (Touvron et al. 2021, arXiv:2112.13692)"

RESNET50_GMAC = 4.54


def attention_pool() -> Recipe:
    """your trained network, its average becomes attention pooling; everything trains on

    Paper: none for this fine-tuning; the pooling is that of Touvron et al. 2021 (arXiv:2112.13692), started as exactly
        the mean over the pixels.
    Command: recast train attention_pool --model resnet50 --checkpoint FILE --data folder --data-dir DIR --out RUN
    Expected: epoch 0 is the parent's own top-1; what training on gains is not published, and not measured here.
    Cost: about that of fine-tuning the parent twice.
    Inferred: everything. 1e-4 is a rate that does not undo the parent, the pooling learns at ten times that, and labels
        are smoothed as the parent knows these images.
    """
    return Recipe(
        data=DataConfig("folder", batch_size=128),
        where=["none"],
        pool=PoolConfig("single"),
        optim=OptimConfig(lr=1e-4, pool_lr=1e-3, weight_decay=0.05),
        regularization=RegularizationConfig(label_smoothing=0.1),
        epochs=10,
    )


def attention_pool_quick() -> Recipe:
    """your trained network, its average becomes attention pooling; that and the head train

    Paper: none; the pooling is that of Touvron et al. 2021 (arXiv:2112.13692), started as exactly the mean over the
        pixels.
    Command: recast train attention_pool_quick --model resnet50 --checkpoint FILE --data folder --data-dir DIR --out RUN
    Expected: epoch 0 is the parent's own top-1; for looking where a trained network looks, not for accuracy.
    Cost: a forward pass of the network an image and epoch, the backward pass stops at the pooling.
    Inferred: everything. Rates as in attention_pool; labels are not smoothed, which cost accuracy in a first trial. The
        control arm trains its classifier alone.
    """
    return change(attention_pool(), regularization={"freeze": "trunk", "label_smoothing": 0.0}, epochs=3)


def _resnet50() -> Recipe:
    """Procedure A2 with the paper's pooling, from random weights."""
    return change(a2(), pool=PoolConfig("single", start="paper"))


ENTRIES: list[Entry] = [
    Entry(
        "resnet50_attention_pool",
        "ResNet-50 with attention pooling, procedure A2: 300 epochs at 224",
        _resnet50,
        "table of attention pooling on other architectures, with the training of rsb_a2",
        "80.1 % top-1 at 224; average pooling 79.8 %",
        f"{compute(RESNET50_GMAC, 300)}",
        f"no control arm: it is rsb_a2, the same training without the pooling. LN before the pooling and an MLP of "
        f"ratio 3 as in PatchConvNet, no change of width; as in rsb_a2: {OPEN}{TARGETS['a2']}",
    )
]
