"""PatchConvNet: columnar convolutional networks with attention-based pooling.

Paper: Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation (arXiv:2112.13692):
settings in its section on training and its ablations, results in its Tables. No training command was published.
"""

from __future__ import annotations

from typing import NamedTuple

from recast.recipes.entry import IMAGENET_21K_IMAGES, Entry, change, compute, imagenet, imagenet_21k
from recast.run.config import AugmentConfig, ModelConfig, OptimConfig, Recipe, RegularizationConfig

__all__ = ["ENTRIES", "PAPER"]

PAPER = "PatchConvNet (Touvron et al. 2021, arXiv:2112.13692)"


class Size(NamedTuple):
    """A size of the network: its stochastic depth on ImageNet-1k, GMACs at 224, top-1 at 224 and 384 without 21k."""

    drop_path: float
    gmac: float
    top1: float | None
    top1_384: float | None = None


SIZES = {
    "s20": Size(0.0, 1.637, 78.7),
    "s36": Size(0.05, 2.574, 80.7),
    "s60": Size(0.15, 3.980, 82.1, 83.7),
    "s120": Size(0.2, 7.493, 83.2),
    "b36": Size(0.2, 10.214, 82.8),
    "b60": Size(0.3, 15.803, 83.5),
    "b120": Size(0.4, 29.775, 84.1, 85.2),
    "l60": Size(0.3, 28.043, None),
    "l120": Size(0.4, 52.846, None),
}
GMAC = {
    "s60": {288: 6.574, 384: 11.683, 512: 20.764},
    "b60": {288: 26.107, 384: 46.394},
    "l60": {288: 46.329, 384: 82.329},
    "b120": {288: 49.192, 384: 87.420},
    "l120": {288: 87.308, 384: 155.157},
}
FROM_21K = {
    "s60": {224: 82.9, 288: 84.0, 384: 84.6, 512: 85.0},
    "b60": {224: 85.0, 288: 85.7, 384: 86.1},
    "l60": {224: 85.6, 288: 86.1, 384: 86.4},
    "b120": {224: 86.0, 288: 86.6, 384: 86.9},
    "l120": {224: 86.1, 288: 86.6, 384: 87.1},
}
"""Top-1 by size of the image after ImageNet-21k (the shorter of the paper's pre-trainings)."""
MULTI_GMAC = 5.31

OPEN = (
    "label smoothing 0.1, rand-m7-mstd0.5-inc1, 5 epochs of warm-up from 1e-6, cosine to 1e-5, test crop 1.0, bf16; "
    "no clipping, as the paper says, although the usual LAMB clips the norm at 1 (--clip-grad 1)"
)
OPEN_L = "; L has the stochastic depth of B at its depth"


def _patchconvnet(key: str) -> Recipe:
    """ImageNet-1k: 400 epochs of LAMB at 3e-3, batches of 2048."""
    return Recipe(
        model=ModelConfig(f"patchconvnet_{key}"),
        data=imagenet(224, batch_size=2048, crop_pct=1.0),
        augment=AugmentConfig(
            crop="random",
            scale=(0.08, 1.0),
            flip=True,
            auto_augment="rand-m7-mstd0.5-inc1",
            repeats=3,
            mixup=0.8,
            cutmix=1.0,
        ),
        where=["none"],
        optim=OptimConfig(
            opt="lamb",
            lr=3e-3,
            weight_decay=0.01 if key.startswith("s") else 0.05,
            warmup_epochs=5.0,
            warmup_lr=1e-6,
            min_lr=1e-5,
            warmup_prefix=False,
        ),
        regularization=RegularizationConfig(
            label_smoothing=0.1, drop_path=_size(key).drop_path, drop_path_mode="uniform"
        ),
        epochs=400,
        amp="bf16",
        control=False,
    )


def _size(key: str) -> Size:
    return SIZES[key.removesuffix("_multi")]


def _less_drop_path(key: str) -> float:
    """Every fine-tuning: 0.1 below the training's."""
    return max(0.0, round(_size(key).drop_path - 0.1, 2))


def _larger(key: str, side: int) -> Recipe:
    """10 epochs at a larger size, batches of 1024 at 1e-5."""
    return change(
        _patchconvnet(key),
        data={"img_size": side, "batch_size": 1024},
        augment={"repeats": 1},
        optim={"lr": 1e-5, "weight_decay": 0.01, "min_lr": 1e-6},
        regularization={"drop_path": _less_drop_path(key)},
        epochs=10,
    )


def _pretrain_21k(key: str) -> Recipe:
    """ImageNet-21k: 90 epochs as on ImageNet-1k, without repeated augmentation."""
    return change(
        _patchconvnet(key),
        data=imagenet_21k(224, batch_size=2048, crop_pct=1.0),
        augment={"repeats": 1},
        optim={"weight_decay": 0.01},
        epochs=90,
    )


def _from_21k(key: str, side: int) -> Recipe:
    """ImageNet-1k after 21k: 100 epochs at 5e-4 with a new head, batches of 1024."""
    return change(
        _patchconvnet(key),
        model={"new_head": True},
        data={"img_size": side, "batch_size": 1024},
        augment={"repeats": 1},
        optim={"lr": 5e-4, "weight_decay": 0.01},
        regularization={"drop_path": _less_drop_path(key)},
        epochs=100,
    )


def _multi_finetune() -> Recipe:
    """The per-class network, started from the trained single-token one."""
    return change(
        _patchconvnet("s60_multi"),
        data={"batch_size": 1024},
        augment={"repeats": 1},
        optim={"lr": 5e-4},
        regularization={"drop_path": _less_drop_path("s60")},
        epochs=30,
    )


def _on_1k(key: str, size: Size) -> list[Entry]:
    name = key.upper()
    entries = [
        Entry(
            f"patchconvnet_{key}",
            f"PatchConvNet-{name} at 224, 400 epochs from scratch",
            lambda: _patchconvnet(key),
            "section on training, ablations on depth and width",
            f"{size.top1} % top-1",
            compute(size.gmac, 400),
            OPEN,
        )
    ]
    if size.top1_384 is not None:
        entries.append(
            Entry(
                f"patchconvnet_{key}_384",
                f"PatchConvNet-{name} fine-tuned at 384 after patchconvnet_{key}",
                lambda: _larger(key, 384),
                "section on training, results at 384",
                f"{size.top1_384} % top-1",
                compute(GMAC[key][384], 10),
                f"{OPEN}; here cosine to 1e-6",
                after=f"patchconvnet_{key}",
            )
        )
    return entries


def _pretrained_21k(key: str) -> Entry:
    size = SIZES[key]
    return Entry(
        f"patchconvnet_{key}_21k",
        f"PatchConvNet-{key.upper()} on ImageNet-21k, 90 epochs",
        lambda: _pretrain_21k(key),
        "section on training, results with ImageNet-21k",
        f"{FROM_21K[key][224]} % top-1 on ImageNet-1k after patchconvnet_{key}_21k_1k",
        compute(size.gmac, 90, images=IMAGENET_21K_IMAGES),
        OPEN + (OPEN_L if key.startswith("l") else ""),
    )


def _finetuned_from_21k(key: str, side: int) -> Entry:
    return Entry(
        f"patchconvnet_{key}_21k_1k" + ("" if side == 224 else f"_{side}"),
        f"PatchConvNet-{key.upper()} at {side} on ImageNet-1k after ImageNet-21k",
        lambda: _from_21k(key, side),
        "section on training, results with ImageNet-21k",
        f"{FROM_21K[key][side]} % top-1",
        compute(SIZES[key].gmac if side == 224 else GMAC[key][side], 100),
        f"{OPEN}; decay 0.01; every size of image straight from 21k" + (OPEN_L if key.startswith("l") else ""),
        after=f"patchconvnet_{key}_21k",
    )


MULTI = [
    Entry(
        "patchconvnet_s60_multi",
        "PatchConvNet-S60 with a token for every class, from scratch",
        lambda: _patchconvnet("s60_multi"),
        "section on per-class attention, ablation of S60",
        "81.1 % top-1",
        compute(MULTI_GMAC, 400),
        OPEN,
    ),
    Entry(
        "patchconvnet_s60_multi_finetune",
        "PatchConvNet-S60 with a token for every class, after patchconvnet_s60",
        _multi_finetune,
        "section on per-class attention",
        "82.0 % top-1",
        compute(MULTI_GMAC, 30),
        f"{OPEN}; the paper says only that batch and rate are smaller: 30 epochs, batches of 1024, 5e-4. The token "
        "of patchconvnet_s60 is repeated for every class as its weights are loaded",
        after="patchconvnet_s60",
    ),
]

ENTRIES: list[Entry] = [
    *(entry for key, size in SIZES.items() if size.top1 is not None for entry in _on_1k(key, size)),
    *MULTI,
    *(_pretrained_21k(key) for key in FROM_21K),
    *(_finetuned_from_21k(key, side) for key, sides in FROM_21K.items() for side in sides),
]
