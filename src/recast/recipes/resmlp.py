"""ResMLP: networks of linear layers only, over patches and over channels.

Paper: Touvron et al. 2021, ResMLP: Feedforward networks for image classification with data-efficient training
(arXiv:2105.03404): DeiT's recipe with LAMB at 5e-3, decay 0.2, 400 epochs. Batch size and stochastic depth of S12 are
the first author's answer in facebookresearch/deit issue 106.
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.deit import REGNET_GMAC, deit, hard_teacher
from recast.recipes.entry import Entry, change, compute
from recast.run.config import Recipe

__all__ = ["ENTRIES", "PAPER"]

PAPER = "ResMLP (Touvron et al. 2021, arXiv:2105.03404)"


class Size(NamedTuple):
    """A size of the network, its settings, GMACs and top-1 without and with teacher."""

    label: str
    drop_path: float
    layer_scale: float
    gmac: float
    top1: tuple[float, float]


SIZES = {
    "12": Size("S12", 0.05, 0.1, 3.010, (76.6, 77.8)),
    "24": Size("S24", 0.1, 1e-5, 5.961, (79.4, 80.8)),
    "36": Size("S36", 0.2, 1e-6, 8.913, (79.8, 81.1)),
    "big_24": Size("B24/8", 0.2, 1e-6, 100.231, (81.0, 83.6)),
}
NOTES = {
    "12": "stochastic depth 0.05 is the author's",
    "24": "stochastic depth 0.1: CaiT's at depth 24, as the author says, and his for S24 on CIFAR",
    "36": "stochastic depth 0.2: CaiT's at depth 36; without teacher the number is that of the published weights",
    "big_24": "stochastic depth 0.2: CaiT's M-24",
}
OPEN = "fp32, as the authors trained; norm clipped at 1, as the LAMB of that time does; cosine to 1e-5 (DeiT's code)"


def _resmlp(key: str, distilled: bool) -> Recipe:
    """400 epochs of LAMB at 224, batches of 2048."""
    size = SIZES[key]
    recipe = change(
        deit(f"resmlp_{key}_224"),
        data={"batch_size": 2048, "crop_pct": 0.9},
        optim={"opt": "lamb", "lr": 5e-3, "base_batch": None, "weight_decay": 0.2, "eps": None, "clip_grad": 1.0},
        regularization={
            "drop_path": size.drop_path,
            "drop_path_mode": "uniform",
            "layer_scale": size.layer_scale,
        },
        epochs=400,
        amp="off",
    )
    return change(recipe, distill=hard_teacher()) if distilled else recipe


def _entry(key: str, distilled: bool) -> Entry:
    size = SIZES[key]
    return Entry(
        f"resmlp_{key}" + ("_distilled" if distilled else ""),
        f"ResMLP-{size.label} at 224, 400 epochs from scratch"
        + (" with a hard convolutional teacher" if distilled else ""),
        lambda: _resmlp(key, distilled),
        "section 3 (settings), results " + ("with distillation" if distilled else "with supervised training"),
        f"{size.top1[distilled]} % top-1",
        compute(size.gmac, 400, teacher_gmac=REGNET_GMAC if distilled else 0.0),
        f"{OPEN}; {NOTES[key]}",
    )


ENTRIES: list[Entry] = [_entry(key, distilled) for key in SIZES for distilled in (False, True)]
