"""ResNet strikes back: the three procedures A1, A2 and A3 for a plain ResNet-50.

Paper: Wightman, Touvron & Jégou 2021, ResNet strikes back: an improved training procedure in timm (arXiv:2110.00476),
Table 2. Another network of timm is trained the same way with `--model NAME`.
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.entry import Entry, change, compute, imagenet
from recast.run.config import AugmentConfig, ModelConfig, OptimConfig, Recipe, RegularizationConfig

__all__ = ["ENTRIES", "OPEN", "PAPER", "TARGETS", "a2"]

PAPER = "ResNet strikes back (Wightman et al. 2021, arXiv:2110.00476)"


class Procedure(NamedTuple):
    """What the paper prints of a procedure."""

    title: str
    expected: str
    cost: str


PROCEDURES = {
    "a1": Procedure(
        "ResNet-50, procedure A1: 600 epochs at 224, the best",
        "80.4 % top-1 at 224",
        f"{compute(4.089, 600)}; 4.6 days on 4 V100",
    ),
    "a2": Procedure(
        "ResNet-50, procedure A2: 300 epochs at 224",
        "79.8 % top-1 at 224 (100 seeds: 79.72 ± 0.10)",
        f"{compute(4.089, 300)}; half of A1's time",
    ),
    "a3": Procedure(
        "ResNet-50, procedure A3: 100 epochs at 160, tested at 224",
        "78.1 % top-1 at 224",
        f"{compute(2.087, 100)}; a twelfth of A1's operations",
    ),
}
OPEN = (
    "warm-up from 1e-4 and cosine to 1e-6 (timm's defaults then); norm clipped at 1, as timm's LAMB does; linear "
    "stochastic depth; bf16 instead of fp16; targets "
)


def a2() -> Recipe:
    """300 epochs at 224."""
    return Recipe(
        model=ModelConfig("resnet50"),
        data=imagenet(224, batch_size=2048, crop_pct=0.95),
        augment=AugmentConfig(
            crop="random",
            scale=(0.08, 1.0),
            flip=True,
            auto_augment="rand-m7-mstd0.5-inc1",
            repeats=3,
            mixup=0.1,
            cutmix=1.0,
        ),
        where=["none"],
        optim=OptimConfig(
            opt="lamb",
            lr=5e-3,
            weight_decay=0.02,
            warmup_epochs=5.0,
            warmup_lr=1e-4,
            min_lr=1e-6,
            warmup_prefix=False,
            clip_grad=1.0,
        ),
        regularization=RegularizationConfig(loss="bce", bce_threshold=0.2, drop_path=0.05),
        epochs=300,
        amp="bf16",
        channels_last=True,
        control=False,
    )


def _a1() -> Recipe:
    """600 epochs at 224, with label smoothing, less decay and more Mixup."""
    return change(
        a2(),
        augment={"mixup": 0.2},
        optim={"weight_decay": 0.01},
        regularization={"label_smoothing": 0.1, "bce_threshold": None},
        epochs=600,
    )


def _a3() -> Recipe:
    """100 epochs at 160, validated at 224, without repeated augmentation and stochastic depth."""
    return change(
        a2(),
        data={"img_size": 160, "test_size": 224},
        augment={"auto_augment": "rand-m6-mstd0.5-inc1", "repeats": 1},
        optim={"lr": 8e-3},
        regularization={"drop_path": 0.0},
        epochs=100,
    )


MADE_BY = {"a1": _a1, "a2": a2, "a3": _a3}
TARGETS = {"a1": "stay soft, so that smoothing acts", "a2": "above 0.2 count as 1", "a3": "above 0.2 count as 1"}

ENTRIES: list[Entry] = [
    Entry(f"rsb_{key}", p.title, MADE_BY[key], "Table 2", p.expected, p.cost, OPEN + TARGETS[key])
    for key, p in PROCEDURES.items()
]
