"""DeiT III: plain vision transformers with 3-Augment, LayerScale, binary cross-entropy and LAMB.

Paper: Touvron et al. 2022, DeiT III: Revenge of the ViT (arXiv:2204.07118): hyper-parameters in its Table 1, stochastic
depth in Table 13. Its best results come from the commands and logs that were published with the code
(facebookresearch/deit, README_revenge.md), which differ from Table 1 in places; each recipe says which it follows.
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.entry import IMAGENET_21K_IMAGES, Entry, change, compute, imagenet, imagenet_21k
from recast.run.config import AugmentConfig, ModelConfig, OptimConfig, Recipe, RegularizationConfig

__all__ = ["ENTRIES", "PAPER"]

PAPER = "DeiT III (Touvron et al. 2022, arXiv:2204.07118)"


class Size(NamedTuple):
    """A size of the network and what differs between the sizes."""

    label: str
    model: str
    gmac: float
    drop_path_400: float
    top1_400: float | None
    rate_800: float
    drop_path_800: float
    side_800: int
    gmac_800: float
    top1_800: float


# The long runs of B, L and H see smaller images and are fine-tuned at 224: better and cheaper than 224 throughout.
SIZES = {
    "small": Size("ViT-S", "deit3_small_patch16_224", 4.599, 0.0, 80.4, 4e-3, 0.05, 224, 4.599, 81.4),
    "medium": Size("ViT-M", "deit3_medium_patch16_224", 7.991, 0.05, None, 3e-3, 0.1, 224, 7.991, 83.0),
    "base": Size("ViT-B", "deit3_base_patch16_224", 17.564, 0.1, 83.1, 3e-3, 0.2, 192, 12.789, 82.8),
    "large": Size("ViT-L", "deit3_large_patch16_224", 61.555, 0.4, 84.2, 3e-3, 0.45, 192, 44.936, 84.0),
    "huge": Size("ViT-H", "deit3_huge_patch14_224", 167.295, 0.5, 84.8, 3e-3, 0.6, 154, 78.067, 83.5),
}

FINETUNED_224 = {"base": (0.2, 83.8), "large": (0.45, 84.9), "huge": (0.55, 85.2)}
"""Stochastic depth, top-1."""
FINETUNED_384 = {"small": (0.0, 83.4, 84.8, 15.490), "base": (0.15, 85.0, 86.7, 55.484)}
FINETUNED_384["large"] = (0.4, 85.8, 87.7, 191.066)
"""Stochastic depth, top-1 from ImageNet-1k, top-1 from ImageNet-21k, GMACs at 384."""
PRETRAINED_90 = {"small": (0.0, 82.6), "base": (0.1, 85.2), "large": (0.3, 86.8), "huge": (0.5, 87.2)}
PRETRAINED_240 = {"small": (0.05, 54.1), "medium": (0.05, None), "base": (0.1, 56.5), "large": (0.3, 57.4)}
"""Stochastic depth of the pre-training, top-1 after fine-tuning (90 epochs), top-1 on 21,841 classes (240)."""
FROM_21K = {"small": (0.05, 83.1), "medium": (0.1, 84.5), "base": (0.15, 85.7), "large": (0.4, 87.0)}
FROM_21K["huge"] = (0.45, 87.2)
"""Stochastic depth of the fine-tuning, top-1."""

OPEN = "bf16 instead of fp16; warm-up from 1e-6 and cosine to 1e-5 (code); norm clipped at 1, as the code's LAMB does"
OPEN_FINETUNE = "bf16 instead of fp16; the command's rate equals the code's lower bound 1e-5, so it is constant"
OPEN_MEDIUM = f"{OPEN}; the paper has no ViT-M, the code gives its result but no command: values between S and B"


def _deit3(model: str, drop_path: float) -> Recipe:
    """Table 1, ImageNet-1k: 400 epochs at 224."""
    return Recipe(
        model=ModelConfig(model),
        data=imagenet(224, batch_size=2048, crop_pct=1.0),
        augment=AugmentConfig(
            crop="random",
            scale=(0.08, 1.0),
            flip=True,
            auto_augment="3a",
            color_jitter=0.3,
            repeats=3,
            mixup=0.8,
            cutmix=1.0,
        ),
        where=["none"],
        optim=OptimConfig(
            opt="lamb",
            lr=3e-3,
            weight_decay=0.02,
            warmup_epochs=5.0,
            warmup_lr=1e-6,
            min_lr=1e-5,
            warmup_prefix=False,
            clip_grad=1.0,
        ),
        regularization=RegularizationConfig(
            loss="bce",
            bce_threshold=0.0,
            drop_path=drop_path,
            drop_path_mode="uniform",
            layer_scale=1e-4,
        ),
        epochs=400,
        amp="bf16",
        control=False,
    )


def _long(size: Size) -> Recipe:
    """The published commands: 800 epochs, decay 0.05, on images of `side_800`."""
    return change(
        _deit3(size.model, size.drop_path_800),
        model={"input_size": None if size.side_800 == 224 else size.side_800},
        data={"img_size": size.side_800},
        optim={"lr": size.rate_800, "weight_decay": 0.05},
        epochs=800,
    )


def _finetune(model: str, side: int, drop_path: float) -> Recipe:
    """The published commands for 224 and 384: 20 epochs of AdamW at a constant 1e-5, RandAugment, cross-entropy."""
    return change(
        _deit3(model, drop_path),
        data={"img_size": side, "batch_size": 512},
        augment={"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.0, "repeats": 1},
        optim={"opt": "adamw", "lr": 1e-5, "weight_decay": 0.1, "clip_grad": None},
        regularization={"loss": "ce", "bce_threshold": None, "label_smoothing": 0.1, "layer_scale": None},
        epochs=20,
    )


def _pretrain_21k(model: str, drop_path: float) -> Recipe:
    """Table 1, ImageNet-21k: 90 epochs, simple random crop, cross-entropy, CutMix without Mixup."""
    return change(
        _deit3(model, drop_path),
        data=imagenet_21k(224, batch_size=2048, crop_pct=1.0),
        augment={"crop": "simple", "repeats": 1, "mixup": 0.0},
        regularization={"loss": "ce", "bce_threshold": None, "label_smoothing": 0.1},
        epochs=90,
    )


def _from_21k(model: str, drop_path: float) -> Recipe:
    """Table 1 and the published commands, 21k to 1k: 50 epochs at 3e-4 with a new head, else as the pre-training."""
    return change(
        _pretrain_21k(model, drop_path),
        model={"new_head": True},
        data=imagenet(224, batch_size=2048, crop_pct=1.0),
        optim={"lr": 3e-4},
        regularization={"layer_scale": None},
        epochs=50,
    )


def _on_1k(key: str) -> list[Entry]:
    size = SIZES[key]
    is_small = size.side_800 == 224
    open_ = OPEN_MEDIUM if key == "medium" else OPEN
    command = "published result" if key == "medium" else "published command"
    return [
        Entry(
            f"deit3_{key}",
            f"{size.label} at 224, 400 epochs from scratch",
            lambda: _deit3(size.model, size.drop_path_400),
            "Tables 1 and 13 (hyper-parameters), comparison of 300 to 800 epochs (result)",
            f"{size.top1_400} % top-1" if size.top1_400 else "none published for 400 epochs (83.0 % for 800)",
            compute(size.gmac, 400),
            f"{open_}; Table 1's rate and decay (others who trained it again give decay 0.03, and 4e-3 for S)",
        ),
        Entry(
            f"deit3_{key}_800",
            f"{size.label} at {size.side_800}, 800 epochs from scratch"
            + ("" if is_small else f": then deit3_{key}_224"),
            lambda: _long(size),
            command + ("" if is_small else "; comparison of training resolutions"),
            f"{size.top1_800} % top-1" + ("" if is_small else f" at {size.side_800}, before the fine-tuning at 224"),
            compute(size.gmac_800, 800),
            open_ + ("; 154 = 11 patches of 14 for the command's 160" if key == "huge" else ""),
        ),
    ]


def _at_224(key: str) -> Entry:
    size, (drop_path, top1) = SIZES[key], FINETUNED_224[key]
    return Entry(
        f"deit3_{key}_224",
        f"{size.label} fine-tuned at 224 after training at {size.side_800}",
        lambda: _finetune(size.model, 224, drop_path),
        "comparison of training resolutions; published command",
        f"{top1} % top-1",
        compute(size.gmac, 20),
        OPEN_FINETUNE,
        after=f"deit3_{key}_800",
    )


def _at_384(key: str, from_21k: bool) -> Entry:
    size, (drop_path, top1, top1_21k, gmac) = SIZES[key], FINETUNED_384[key]
    on_1k = f"deit3_{key}_800" if key == "small" else f"deit3_{key}_224"
    before = f"deit3_{key}_21k_1k" if from_21k else on_1k
    return Entry(
        f"deit3_{key}_21k_384" if from_21k else f"deit3_{key}_384",
        f"{size.label} fine-tuned at 384 after {before}",
        lambda: _finetune(f"deit3_{key}_patch16_384", 384, drop_path),
        "results at 384" + ("" if from_21k else "; published command"),
        f"{top1_21k if from_21k else top1} % top-1",
        compute(gmac, 20),
        OPEN_FINETUNE + ("; no command is published for this one: that of ImageNet-1k" if from_21k else ""),
        after=before,
    )


def _pretrained_90(key: str) -> Entry:
    size, (drop_path, top1), is_huge = SIZES[key], PRETRAINED_90[key], key == "huge"

    def make() -> Recipe:
        recipe = _pretrain_21k(size.model, drop_path)
        if not is_huge:
            return recipe
        return change(recipe, model={"input_size": 126}, data={"img_size": 126}, optim={"lr": 1e-3})

    return Entry(
        f"deit3_{key}_21k",
        f"{size.label} on ImageNet-21k" + (" at 126" if is_huge else "") + ", 90 epochs",
        make,
        "Table 13; published command" if is_huge else "Tables 1 and 13",
        f"{top1} % top-1 on ImageNet-1k after deit3_{key}_21k_1k" + (" (58.0 % by 21k label, log)" if is_huge else ""),
        compute(52.203 if is_huge else size.gmac, 90, images=IMAGENET_21K_IMAGES),
        f"{OPEN}; "
        + ("126 = 9 patches of 14 for the command's 128" if is_huge else "Table 1's rate of 3e-3 (the command: 1e-3)"),
    )


def _pretrained_240(key: str) -> Entry:
    size, (drop_path, top1) = SIZES[key], PRETRAINED_240[key]
    return Entry(
        f"deit3_{key}_21k_240",
        f"{size.label} on ImageNet-21k, 240 epochs",
        lambda: change(_pretrain_21k(size.model, drop_path), optim={"lr": 1e-3}, epochs=240),
        "published result" if key == "medium" else "published command",
        f"{FROM_21K[key][1]} % top-1 on ImageNet-1k after deit3_{key}_21k_1k"
        + (f" ({top1} % by 21k label, log)" if top1 else ""),
        compute(size.gmac, 240, images=IMAGENET_21K_IMAGES),
        OPEN_MEDIUM if key == "medium" else f"{OPEN}; the command's rate of 1e-3 (Table 1: 3e-3)",
    )


def _finetuned_from_21k(key: str) -> Entry:
    size, (drop_path, top1) = SIZES[key], FROM_21K[key]
    return Entry(
        f"deit3_{key}_21k_1k",
        f"{size.label} at 224 on ImageNet-1k after ImageNet-21k",
        lambda: _from_21k(size.model, drop_path),
        "Table 1; published command",
        f"{top1} % top-1",
        compute(size.gmac, 50),
        OPEN_MEDIUM if key == "medium" else OPEN,
        after="deit3_huge_21k" if key == "huge" else f"deit3_{key}_21k_240",
    )


def _entries(key: str) -> list[Entry]:
    entries = _on_1k(key)
    entries += [_at_224(key)] if key in FINETUNED_224 else []
    entries += [_at_384(key, False)] if key in FINETUNED_384 else []
    entries += [_pretrained_90(key)] if key in PRETRAINED_90 else []
    entries += [_pretrained_240(key)] if key in PRETRAINED_240 else []
    entries.append(_finetuned_from_21k(key))
    return entries + ([_at_384(key, True)] if key in FINETUNED_384 else [])


ENTRIES: list[Entry] = [entry for key in SIZES for entry in _entries(key)]
