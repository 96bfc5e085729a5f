"""T-CNN*: a ResNet-50 recast in the middle of its training, with the same optimiser and learning-rate schedule.

Paper: d'Ascoli, Sagun, Biroli & Morcos 2021, Transformed CNNs: recasting pre-trained convolutional layers with
self-attention (arXiv:2106.05795), section 5: t1 epochs as a convolutional network and 400 − t1 as the hybrid. At t1 = 0
it is a hybrid from scratch, at t1 = 400 the plain network. Each comes at three scales: the paper's, one GPU in a day
(`_gpu`), two CPU cores in an hour (`_small`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from recast.recipes.deit import deit
from recast.recipes.entry import Entry, change, compute
from recast.run.config import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RecastConfig,
    Recipe,
    RegularizationConfig,
    ScheduleConfig,
    StrideMode,
)

__all__ = ["ENTRIES", "PAPER"]

PAPER = "T-CNN* in mid-training (d'Ascoli et al. 2021, arXiv:2106.05795, section 5)"

EPOCHS = 400
GMAC, GMAC_HYBRID = 4.089, 7.331
"""ResNet-50 at 224, and with its last stage recast at stride 1."""
SECONDS, SECONDS_HYBRID = 27, 77
"""CPU time of an epoch of the `_small` recipes with its validation, measured."""


class Experiment(NamedTuple):
    """A row of the paper's Table 2."""

    name: str
    t1: int
    top1: float


EXPERIMENTS = (
    Experiment("tcnn_star_100", 100, 80.44),
    Experiment("tcnn_star_200", 200, 80.28),
    Experiment("tcnn_star_300", 300, 79.28),
    Experiment("tcnn_hybrid", 0, 79.95),
    Experiment("tcnn_cnn", EPOCHS, 79.04),
)


def _paper() -> Recipe:
    """SGD with momentum 0.9, batches of 1024, 5 epochs of warm-up, cosine, DeiT's augmentation."""
    return change(
        deit("resnet50"),
        optim={"opt": "sgd", "lr": 0.4, "base_batch": None, "momentum": 0.9, "weight_decay": 1e-4, "eps": None},
        regularization={"drop_path": 0.0},
    )


def _gpu() -> Recipe:
    """The same, a batch in four parts."""
    return change(_paper(), data={"workers": 16}, accumulate=4, channels_last=True)


def _small() -> Recipe:
    """ResNet-20 on 5,000 images of CIFAR-100."""
    return Recipe(
        model=ModelConfig("cifar_resnet20"),
        data=DataConfig("cifar100", img_size=32, batch_size=128, num_train=5000, num_val=2500),
        augment=AugmentConfig(crop="pad", flip=True),
        optim=OptimConfig("sgd", lr=0.1, weight_decay=1e-4, min_lr=1e-5, warmup_prefix=False),
        regularization=RegularizationConfig(label_smoothing=0.1, drop_path=0.0),
    )


class Scale(NamedTuple):
    """A size of the experiments; `share`: how many times fewer epochs, before the switch and after it."""

    suffix: str
    share: int
    base: Callable[[], Recipe]
    stride: StrideMode
    network: str
    where: str
    inferred: str


OPEN = (
    "peak rate 0.4 (0.1 for every 256 images), decay 1e-4, Nesterov's momentum (sgd of timm and of DeiT's code), no "
    "stochastic depth; warm-up from 1e-6, cosine to 1e-5, smoothing and repeated augmentation as in DeiT's code; bf16"
)
OPEN_SMALL = (
    "scaled: ResNet-20, 5,000 images of CIFAR-100 at 32, a twentieth of the epochs, 1 of warm-up; peak rate 0.1 at "
    "batches of 128 (He et al. 2015); shifts and flips, as DeiT's augmentation needs more epochs; fp32"
)
PAPER_SCALE = Scale("", 1, _paper, "remove", "ResNet-50", "", OPEN)
GPU_SCALE = Scale(
    "_gpu", 4, _gpu, "remove", "ResNet-50", ", on one GPU",
    f"scaled: a quarter of the epochs, still 5 of warm-up; a batch in 4 parts; {OPEN}",
)  # fmt: skip
SMALL_SCALE = Scale("_small", 20, _small, "keep", "ResNet-20", ", on a CPU", OPEN_SMALL)


def _recipe(experiment: Experiment, scale: Scale) -> Recipe:
    """Convolutions for t1 epochs, then the last stage as gated attention, with one rate for everything."""
    recipe = change(scale.base(), epochs=EPOCHS // scale.share)
    if experiment.t1 == EPOCHS:
        return change(recipe, where=["none"], control=False)
    return change(
        recipe,
        recast=RecastConfig(gate="sigmoid", alpha=1.0, lambda_init=1.0, stride=scale.stride),
        where=["last_stage"],
        schedule=ScheduleConfig("at_once", conv_epochs=experiment.t1 // scale.share),
        optim={"gate_lr": recipe.optim.lr},
        control=scale is SMALL_SCALE,  # at full size tcnn_cnn is the control arm of all
    )


GATES = "λ learns at the rate of the weights (the paper's 0.1 is for AdamW on a trained network)"
STRIDE_GONE = "the stride goes, which at the switch changes the function (--stride keep leaves it)"
STRIDE_KEPT = "the stride stays: without it an epoch of the hybrid takes 5 times as long"


def _inferred(experiment: Experiment, scale: Scale) -> str:
    if experiment.t1 == EPOCHS:
        return scale.inferred
    if scale is SMALL_SCALE:
        return "; ".join((scale.inferred, GATES, STRIDE_KEPT))
    alone = f"no control arm: it is tcnn_cnn{scale.suffix}, trained once for all (--control trains it here)"
    return "; ".join((scale.inferred, GATES, STRIDE_GONE, alone))


def _cost(experiment: Experiment, scale: Scale) -> str:
    epochs, t1 = EPOCHS // scale.share, experiment.t1 // scale.share
    if scale is not SMALL_SCALE:
        return compute((GMAC * t1 + GMAC_HYBRID * (epochs - t1)) / epochs, epochs)
    seconds, both = SECONDS * t1 + SECONDS_HYBRID * (epochs - t1), t1 < epochs
    return f"{(seconds + SECONDS * epochs * both) / 60:.0f} minutes of a CPU core" + (" for both arms" if both else "")


def _title(experiment: Experiment, scale: Scale) -> str:
    epochs, t1 = EPOCHS // scale.share, experiment.t1 // scale.share
    what = {
        0: f"Hybrid {scale.network} from scratch, {epochs} epochs of SGD",
        epochs: f"Plain {scale.network}, {epochs} epochs of SGD",
    }
    return what.get(t1, f"T-CNN*: {scale.network} recast after {t1} of {epochs} epochs of SGD") + scale.where


def _entry(experiment: Experiment, scale: Scale) -> Entry:
    top1 = f"{experiment.top1:.2f} % top-1"
    return Entry(
        experiment.name + scale.suffix,
        _title(experiment, scale),
        lambda: _recipe(experiment, scale),
        "Table 2",
        top1 if scale is PAPER_SCALE else f"none published at this scale ({top1} at the paper's)",
        _cost(experiment, scale),
        _inferred(experiment, scale),
    )


ENTRIES: list[Entry] = [
    _entry(experiment, scale) for experiment in EXPERIMENTS for scale in (PAPER_SCALE, GPU_SCALE, SMALL_SCALE)
]
