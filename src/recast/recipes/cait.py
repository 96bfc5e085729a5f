"""CaiT: deep vision transformers with LayerScale and class attention.

Paper: Touvron et al. 2021, Going deeper with Image Transformers (arXiv:2103.17239): DeiT's recipe for 400 epochs with
stochastic depth and LayerScale by size. What it leaves open is taken from the published code and its authors' answers
(facebookresearch/deit, issues 104 and 108).
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.deit import REGNET_GMAC, REGNET_GMAC_384, deit, hard_teacher
from recast.recipes.entry import Entry, change, compute
from recast.run.config import Recipe

__all__ = ["ENTRIES", "PAPER"]

PAPER = "CaiT (Touvron et al. 2021, arXiv:2103.17239)"


class Size(NamedTuple):
    """A size of the network: timm's names, the paper's settings, GMACs and top-1 (without, with teacher)."""

    label: str
    model: str
    model_large: str
    side: int
    """Of the fine-tuning."""
    drop_path: float
    layer_scale: float
    gmac: float
    gmac_large: float
    top1: tuple[float | None, float | None]
    top1_large: tuple[float | None, float]


SIZES = {
    "xxs24": Size(
        "XXS-24", "cait_xxs24_224", "cait_xxs24_384", 384, 0.05, 1e-5, 2.523, 9.599, (77.6, 78.4), (80.4, 80.9)
    ),
    "xxs36": Size(
        "XXS-36", "cait_xxs36_224", "cait_xxs36_384", 384, 0.1, 1e-5, 3.756, 14.313, (79.1, 79.7), (81.8, 82.2)
    ),
    "xs24": Size("XS-24", "cait_xs24_384", "cait_xs24_384", 384, 0.05, 1e-5, 5.390, 19.241, (81.8, 82.0), (83.8, 84.1)),
    "s24": Size("S-24", "cait_s24_224", "cait_s24_384", 384, 0.1, 1e-5, 9.327, 32.110, (82.7, 83.5), (84.3, 85.1)),
    "s36": Size("S-36", "cait_s36_384", "cait_s36_384", 384, 0.2, 1e-6, 13.902, 47.908, (83.3, 84.0), (85.0, 85.4)),
    "m36": Size("M-36", "cait_m36_384", "cait_m36_384", 384, 0.3, 1e-6, 53.367, 172.944, (83.8, 85.1), (84.9, 86.1)),
    "m48": Size("M-48", "cait_m48_448", "cait_m48_448", 448, 0.4, 1e-6, 70.959, 329.108, (None, None), (None, 86.5)),
}
REGNET_GMAC_448 = 63.607

OPEN = "bf16 instead of fp16 (the authors: evaluate M-48 in fp32); schedule, erasing and decay are DeiT's"
OPEN_XXS36 = "; LayerScale starts at 1e-5 as in the code (the paper's table: 1e-6)"
OPEN_LARGE = (
    "the authors' settings for M-48 at 448, also for the other sizes, with stochastic depth 0.1 below the training's; "
    "cosine to 1.6e-7 instead of halving the rate every 10 epochs"
)


def _cait(size: Size, distilled: bool) -> Recipe:
    """400 epochs at 224; networks that timm builds for another size are built for 224."""
    recipe = change(
        deit(size.model),
        model={"input_size": None if size.model.endswith("_224") else 224},
        data={"crop_pct": 1.0},
        regularization={
            "drop_path": size.drop_path,
            "drop_path_mode": "uniform",
            "layer_scale": size.layer_scale,
        },
        epochs=400,
    )
    return change(recipe, distill=hard_teacher()) if distilled else recipe


def _finetune(size: Size, distilled: bool) -> Recipe:
    """60 epochs at a larger size, batches of 256 at 5e-6, decay 0.05 (the authors on M-48)."""
    return change(
        _cait(size, distilled),
        model={"name": size.model_large, "input_size": None},
        data={"img_size": size.side, "batch_size": 256},
        optim={"lr": 5e-6, "base_batch": None, "min_lr": 1.6e-7},
        regularization={"drop_path": max(0.0, round(size.drop_path - 0.1, 2)), "layer_scale": None},
        epochs=60,
    )


def _top1(value: float | None) -> str:
    return "none published" if value is None else f"{value} % top-1"


def _entries(key: str, distilled: bool) -> list[Entry]:
    size, suffix = SIZES[key], "_distilled" if distilled else ""
    with_teacher = " with a hard convolutional teacher" if distilled else ""
    paper = "results with and without distillation" if distilled else "settings and results by size"
    large = REGNET_GMAC_448 if size.side == 448 else REGNET_GMAC_384
    return [
        Entry(
            f"cait_{key}{suffix}",
            f"CaiT-{size.label} at 224, 400 epochs from scratch{with_teacher}",
            lambda: _cait(size, distilled),
            paper,
            _top1(size.top1[distilled]),
            compute(size.gmac, 400, teacher_gmac=REGNET_GMAC if distilled else 0.0),
            OPEN + (OPEN_XXS36 if key == "xxs36" else ""),
        ),
        Entry(
            f"cait_{key}{suffix}_{size.side}",
            f"CaiT-{size.label} fine-tuned at {size.side}{with_teacher}",
            lambda: _finetune(size, distilled),
            f"{paper}; facebookresearch/deit issue 108",
            _top1(size.top1_large[distilled]),
            compute(size.gmac_large, 60, teacher_gmac=large if distilled else 0.0),
            OPEN_LARGE,
            after=f"cait_{key}{suffix}",
        ),
    ]


ENTRIES: list[Entry] = [
    entry
    for key, size in SIZES.items()
    for distilled in (False, True)
    if distilled or size.top1_large[False] is not None  # M-48 was trained with the teacher only
    for entry in _entries(key, distilled)
]
