"""Transformed CNNs: trained ResNets become hybrids, fine-tuned beside themselves.

Paper: d'Ascoli, Sagun, Biroli & Morcos 2021, Transformed CNNs: recasting pre-trained convolutional layers with
self-attention (arXiv:2106.05795). The last stage's 3×3 convolutions become GPSA with the sigmoid gate, α = λ = 1, its
stride 2 removed; 50 epochs of AdamW at 1e-4 with DeiT's augmentation, 0.1 for λ. Every recipe trains three arms: the
parent as it is, the parent fine-tuned the same way, and the hybrid.
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.deit import deit
from recast.recipes.entry import Entry, change, compute
from recast.run.config import RecastConfig, Recipe

__all__ = ["ENTRIES", "PAPER", "tcnn"]

PAPER = "Transformed CNNs (d'Ascoli et al. 2021, arXiv:2106.05795)"


class Parent(NamedTuple):
    """A parent, its fine-tuning, its test crop in timm, GMACs of it and of the hybrid, and the paper's top-1."""

    label: str
    model: str
    side: int
    drop_path: float
    crop_pct: float
    gmac: float
    gmac_hybrid: float
    before: float
    finetuned: float | None
    hybrid: float


RESNET_RS = {
    "resnetrs50": Parent("ResNet50-RS", "resnetrs50", 224, 0.1, 0.91, 4.454, 7.697, 78.8, 80.4, 81.0),
    "resnetrs101": Parent("ResNet101-RS", "resnetrs101", 224, 0.1, 0.94, 8.176, 11.418, 80.3, 81.9, 82.4),
    "resnetrs152": Parent("ResNet152-RS", "resnetrs152", 320, 0.2, 1.0, 24.246, 32.181, 81.2, 83.4, 83.7),
    "resnetrs200": Parent("ResNet200-RS", "resnetrs200", 320, 0.2, 1.0, 31.379, 39.313, 82.8, 83.7, 84.0),
    "resnetrs270": Parent("ResNet270-RS", "resnetrs270", 320, 0.2, 1.0, 42.086, 52.560, 83.8, 83.9, 84.3),
    "resnetrs350": Parent("ResNet350-RS", "resnetrs350", 320, 0.2, 1.0, 53.684, 64.158, 84.0, 84.1, 84.5),
}
RESNET_D = {
    "resnet50d": Parent("ResNet50-D", "resnet50d.ra2_in1k", 320, 0.1, 0.95, 8.832, 16.766, 80.6, None, 81.6),
    "resnet101d": Parent("ResNet101-D", "resnet101d.ra2_in1k", 384, 0.2, 1.0, 23.627, 36.671, 82.3, None, 83.1),
    "resnet152d": Parent("ResNet152-D", "resnet152d.ra2_in1k", 384, 0.2, 1.0, 34.536, 47.580, 83.1, None, 83.8),
    "resnet200d": Parent("ResNet200-D", "resnet200d.ra2_in1k", 384, 0.2, 1.0, 44.804, 57.848, 83.2, None, 83.9),
}

OPEN = (
    "decay 0.05, warm-up from 1e-6, cosine to 1e-5, label smoothing 0.1, Mixup, CutMix, erasing and repeated "
    "augmentation are DeiT's; λ's rate follows the schedule; timm's test crop; bf16; BatchNorm trains on"
)


def _tcnn(parent: Parent) -> Recipe:
    """Both arms of one parent."""
    return change(
        deit(parent.model),
        model={"pretrained": True},
        data={"img_size": parent.side, "crop_pct": parent.crop_pct},
        recast=RecastConfig(gate="sigmoid", alpha=1.0, lambda_init=1.0, stride="remove"),
        where=["last_stage"],
        optim={"lr": 1e-4, "base_batch": None, "gate_lr": 0.1},
        regularization={"drop_path": parent.drop_path},
        epochs=50,
        control=True,
    )


def tcnn() -> Recipe:
    """T-ResNet50-RS at 224."""
    return _tcnn(RESNET_RS["resnetrs50"])


def _entry(name: str, parent: Parent, title: str = "") -> Entry:
    is_rs = parent.finetuned is not None
    fine_tuned = f"{parent.finetuned} % fine-tuned the same way, " if is_rs else ""
    where = "at its own training size" if is_rs else "as published"
    both = compute(parent.gmac + parent.gmac_hybrid, 50)
    depth = "" if is_rs else "; stochastic depth (0.1 for 50, 0.2 for the deeper ones) and timm's ra2 weights"
    hours = "; 6 hours on 16 V100 for the hybrid" if parent.model == "resnetrs50" else ""
    return Entry(
        name,
        title or f"T-{parent.label} at {parent.side}: sigmoid gate, stride removed, 50 epochs, three arms",
        lambda: _tcnn(parent),
        "section 3, Table 1 (settings, results)" if is_rs else "Table 5 (result)",
        f"{parent.hybrid} % top-1 the hybrid; the parent {fine_tuned}{parent.before} % {where}",
        f"{both} for both trained arms{hours}",
        OPEN + depth,
    )


ENTRIES: list[Entry] = [
    _entry("tcnn", RESNET_RS["resnetrs50"], "the paper's main case, = tcnn_resnetrs50: T-ResNet50-RS, three arms"),
    *(_entry(f"tcnn_{name}", parent) for name, parent in (RESNET_RS | RESNET_D).items()),
]
