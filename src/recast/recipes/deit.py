"""DeiT: vision transformers trained on ImageNet-1k alone, with and without a convolutional teacher.

Paper: Touvron et al. 2021, Training data-efficient image transformers & distillation through attention
(arXiv:2012.12877): hyper-parameters in its Table 9, results in Tables 3 to 5. What it leaves open is taken from the
published code, facebookresearch/deit.
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.entry import Entry, change, compute, imagenet
from recast.run.config import AugmentConfig, DistillConfig, ModelConfig, OptimConfig, Recipe, RegularizationConfig

__all__ = ["ENTRIES", "PAPER", "REGNET_GMAC", "REGNET_GMAC_384", "deit", "hard_teacher"]

PAPER = "DeiT (Touvron et al. 2021, arXiv:2012.12877)"
RANDAUGMENT = "rand-m9-mstd0.5-inc1"
TEACHER = "regnety_160.deit_in1k"
REGNET_GMAC, REGNET_GMAC_384 = 15.912, 46.735
"""Of the teacher, at 224 and 384."""


class Size(NamedTuple):
    """A size of the network, its GMACs at 224, and the paper's top-1 at 224 of each way to train it."""

    label: str
    gmac: float
    plain: float
    hard: float
    token: float
    token_1000: float


SIZES = {
    "tiny": Size("DeiT-Ti", 1.254, 72.2, 74.3, 74.5, 76.6),
    "small": Size("DeiT-S", 4.599, 79.8, 80.9, 81.2, 82.6),
    "base": Size("DeiT-B", 17.564, 81.8, 83.0, 83.4, 84.2),
}
BASE_384_GMAC = 55.484


def deit(model: str) -> Recipe:
    """DeiT's recipe, which CaiT, ResMLP and Transformed CNNs change: 300 epochs at 224, AdamW, batches of 1024."""
    return Recipe(
        model=ModelConfig(model),
        data=imagenet(224, batch_size=1024, crop_pct=0.875),
        augment=AugmentConfig(
            crop="random",
            scale=(0.08, 1.0),
            flip=True,
            auto_augment=RANDAUGMENT,
            erasing=0.25,
            repeats=3,
            mixup=0.8,
            cutmix=1.0,
        ),
        where=["none"],
        optim=OptimConfig(
            opt="adamw",
            lr=5e-4,
            base_batch=512,
            weight_decay=0.05,
            eps=1e-8,
            warmup_epochs=5.0,
            warmup_lr=1e-6,
            min_lr=1e-5,
            warmup_prefix=False,
        ),
        regularization=RegularizationConfig(label_smoothing=0.1, drop_path=0.1),
        epochs=300,
        amp="bf16",
        control=False,
    )


def hard_teacher() -> DistillConfig:
    """RegNetY-16GF (82.9 % top-1): half of the loss is cross-entropy with the class that it decides on."""
    return DistillConfig(TEACHER, teacher_pretrained=True, targets="hard", teacher_weight=0.5)


def _soft_teacher() -> DistillConfig:
    """λ = 0.1, τ = 3, the divergence averaged over classes too, as in the published code."""
    return DistillConfig(
        TEACHER, teacher_pretrained=True, targets="soft", teacher_weight=0.1, temperature=3.0, reduction="numel"
    )


def _plain(size: str) -> Recipe:
    return deit(f"deit_{size}_patch16_224")


def _token(size: str, epochs: int = 300) -> Recipe:
    return change(deit(f"deit_{size}_distilled_patch16_224"), distill=hard_teacher(), epochs=epochs)


def _finetune_384(model: str) -> Recipe:
    """The published command: batches of 512 at a constant 5e-6 after the warm-up, no decay, network in eval mode."""
    return change(
        deit(model),
        data={"img_size": 384, "batch_size": 512},
        optim={"lr": 5e-6, "min_lr": 5e-6, "weight_decay": 1e-8},
        regularization={"drop_path": 0.0},
        epochs=30,
    )


OPEN = "bf16 instead of fp16; the code's rate follows epochs, ours updates"
OPEN_384 = f"{OPEN}; 30 epochs (the code's command; the paper says 25), batches of 512, no stochastic depth (eval mode)"


def _entries(key: str) -> list[Entry]:
    size = SIZES[key]
    v100 = {"tiny": "; under 3 days on 4 GPUs", "small": "; under 3 days on 4 GPUs", "base": "; 53 hours on 8 V100"}[
        key
    ]
    with_teacher = compute(size.gmac, 300, teacher_gmac=REGNET_GMAC)
    reads = "both heads' mean"
    return [
        Entry(
            f"deit_{key}",
            f"{size.label} at 224, 300 epochs from scratch",
            lambda: _plain(key),
            "Table 9 (hyper-parameters), Table 5 (result)",
            f"{size.plain} % top-1",
            compute(size.gmac, 300) + v100,
            OPEN,
        ),
        Entry(
            f"deit_{key}_soft",
            f"{size.label} at 224 with a soft convolutional teacher, no distillation token",
            lambda: change(_plain(key), distill=_soft_teacher()),
            "section 4, Table 3 (usual distillation)",
            f"{size.plain} % top-1: soft distillation gained nothing",
            with_teacher,
            f"{OPEN}; the divergence is averaged over classes too, as in the code, which makes it 1000 times weaker",
        ),
        Entry(
            f"deit_{key}_hard",
            f"{size.label} at 224 with a hard convolutional teacher, no distillation token",
            lambda: change(_plain(key), distill=hard_teacher()),
            "section 4, Table 3 (hard distillation)",
            f"{size.hard} % top-1",
            with_teacher,
            f"{OPEN}; the teacher sees the mixed images, and its labels are not smoothed (code)",
        ),
        Entry(
            f"deit_{key}_distilled",
            f"{size.label} at 224 with a distillation token, hard labels of RegNetY-16GF",
            lambda: _token(key),
            "section 4, Table 3 (DeiT⚗: both embeddings)",
            f"{size.token} % top-1 ({reads})",
            with_teacher,
            f"{OPEN}; the heads' logits are averaged (code), the paper's text adds their softmax",
        ),
        Entry(
            f"deit_{key}_distilled_1000",
            f"{size.label} at 224 with a distillation token, 1000 epochs",
            lambda: _token(key, 1000),
            "section 5, Table 5 (1000 epochs)",
            f"{size.token_1000} % top-1 ({reads})",
            compute(size.gmac, 1000, teacher_gmac=REGNET_GMAC),
            OPEN,
        ),
    ]


ENTRIES: list[Entry] = [
    *(entry for key in SIZES for entry in _entries(key)),
    Entry(
        "deit_base_384",
        "DeiT-B fine-tuned at 384 after deit_base",
        lambda: _finetune_384("deit_base_patch16_384"),
        "section 5 (fine-tuning at another resolution), Table 5",
        "83.1 % top-1 (the published weights: 82.9)",
        f"{compute(BASE_384_GMAC, 30)}; 20 hours on 8 GPUs for 25 epochs",
        OPEN_384,
        after="deit_base",
    ),
    Entry(
        "deit_base_distilled_384",
        "DeiT-B with a distillation token fine-tuned at 384, teacher at 384 too",
        lambda: change(_finetune_384("deit_base_distilled_patch16_384"), distill=hard_teacher()),
        "section 4 (fine-tuning with distillation), Table 3",
        "84.5 % top-1; 85.2 after deit_base_distilled_1000 (both heads' mean)",
        compute(BASE_384_GMAC, 30, teacher_gmac=REGNET_GMAC_384),
        f"{OPEN_384}; the paper's teacher was itself fine-tuned at 384, ours is the one of 224 on larger images",
        after="deit_base_distilled",
    ),
]
