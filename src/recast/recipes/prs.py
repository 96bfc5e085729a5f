"""PRS and C-MHSA: a vision transformer that begins as a convolutional network and becomes attention while it trains.

Paper: Lee et al. 2022, Towards Flexible Inductive Bias via Progressive Reparameterization Scheduling
(arXiv:2210.01370): PRS (section 6, Eq. 7); C-MHSA in two stages, which it is compared with (Table 3; Li et al. 2021,
Can Vision Transformers Perform Convolution?, arXiv:2111.01353); the interpolation between convolution and attention
(section 5, Fig. 3). It gives epochs, layers, heads and width; the rest is DeiT's. Each experiment comes at three
scales: the paper's, one GPU in a day (`_gpu`), two CPU cores in an hour (`_small`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from recast.recipes.deit import deit
from recast.recipes.entry import IMAGENET_IMAGES, Entry, change, compute
from recast.run.config import (
    AugmentConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RecastConfig,
    Recipe,
    RegularizationConfig,
    ScheduleConfig,
)

__all__ = ["ENTRIES", "PAPER"]

PAPER = "PRS (Lee et al. 2022, arXiv:2210.01370)"
Scale = Literal["", "_gpu", "_small"]
"""The paper's, one GPU, a CPU: as the recipes' names end."""

CIFAR_IMAGES = 50_000
GMAC = {3: 11.907, 5: 5.732}
"""By kernel: of the convolutional network at 224."""
GMAC_ATTENTION = 16.506
"""Of either network as attention."""
SECONDS, SECONDS_ATTENTION = 15, 50
"""CPU time of an epoch of the `_small` recipes with its validation, measured."""


class Experiment(NamedTuple):
    """What the paper trained, and for how long at each scale."""

    name: str
    what: str
    kernel: int
    epochs: dict[Scale, int]
    conv_epochs: int | None
    """The paper's epochs before all layers become attention at once; None: one after the other (PRS)."""
    source: str
    top1: float | None

    @property
    def is_interpolation(self) -> bool:
        """On a tenth of ImageNet."""
        return self.source == SPECTRA

    @property
    def is_plain(self) -> bool:
        """Never attention."""
        return self.conv_epochs == self.epochs[""]

    def conv_epochs_at(self, scale: Scale) -> int | None:
        """In proportion to the epochs."""
        return None if self.conv_epochs is None else self.conv_epochs * self.epochs[scale] // self.epochs[""]

    def has_control(self, scale: Scale) -> bool:
        """At full size the convolutional network is trained once for all experiments that share it: beside PRS."""
        return not self.is_plain and (scale == "_small" or self.conv_epochs is None)


TABLE_3, SPECTRA = "Table 3", "section 5.2, Fig. 3"
EPOCHS: dict[Scale, int] = {"": 400, "_gpu": 400, "_small": 28}
EPOCHS_INTERPOLATION: dict[Scale, int] = {"": 300, "_gpu": 120, "_small": 30}
EXPERIMENTS = (
    Experiment("prs_cmhsa3", "PRS with C-MHSA-3", 3, EPOCHS, None, TABLE_3, 79.09),
    Experiment("prs_cmhsa5", "PRS with C-MHSA-5", 5, EPOCHS, None, "not in the paper: PRS as with C-MHSA-3", None),
    Experiment("cmhsa3", "Two-stage C-MHSA-3", 3, EPOCHS, 200, TABLE_3, 76.72),
    Experiment("cmhsa5", "Two-stage C-MHSA-5", 5, EPOCHS, 200, TABLE_3, 78.74),
    *(
        Experiment(f"prs_interpolation_{conv}_{300 - conv}", "Interpolation with C-MHSA-3", 3,
                   EPOCHS_INTERPOLATION, conv, SPECTRA, None)
        for conv in (300, 250, 150, 50)
    ),
)  # fmt: skip


def _recipe(experiment: Experiment, scale: Scale) -> Recipe:
    """The network trained for the scale's epochs, every mixer becoming C-MHSA on its date."""
    recipe = change(_small(experiment) if scale == "_small" else _full(experiment), epochs=experiment.epochs[scale])
    if scale == "_gpu":
        recipe = change(recipe, data={"workers": 16}, accumulate=8, channels_last=True)
    if experiment.is_plain:
        return change(recipe, where=["none"], control=False)
    conv_epochs, schedule = experiment.conv_epochs_at(scale), ScheduleConfig("progressive")
    if conv_epochs is not None:
        schedule = ScheduleConfig("at_once", conv_epochs=conv_epochs)
    return change(
        recipe,
        recast=RecastConfig(gate="bias", bias_init=10.0),
        where=["blocks.*.mixer"],
        schedule=schedule,
        control=experiment.has_control(scale),
    )


def _full(experiment: Experiment) -> Recipe:
    """DeiT's training of the network of width 768 at 224."""
    data = {"data_fraction": 0.1} if experiment.is_interpolation else {"name": "cifar100", "crop_pct": 1.0}
    return change(deit(f"cmhsa_vit_{experiment.kernel}"), data=data)


def _small(experiment: Experiment) -> Recipe:
    """The network of width 48 at 32 on 5,000 images of CIFAR-100."""
    return Recipe(
        model=ModelConfig(f"cmhsa_vit_{experiment.kernel}_tiny"),
        data=DataConfig("cifar100", img_size=32, batch_size=128, num_train=5000, num_val=2500),
        augment=AugmentConfig(crop="pad", flip=True),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, min_lr=1e-5, warmup_prefix=False),
        regularization=RegularizationConfig(label_smoothing=0.1, drop_path=0.0),
    )


OPEN = (
    "DeiT's AdamW (1e-3 at batches of 1024), decay, warm-up, cosine, augmentation, smoothing and stochastic depth 0.1; "
    "MLP ratio 4, LN before the pooling; bf16"
)
OPEN_SWITCH = (
    "M = 10 (with the 20 of an exact start the attention hardly learns); the same optimiser through the switches"
)
OPEN_CIFAR = "images enlarged to 224, patches of 16 (768 = 16·16·3), ImageNet's normalisation"
OPEN_SMALL = (
    "scaled: width 48, patches of 4 at 32, 5,000 images of CIFAR-100, {} epochs in the same proportions; AdamW 1e-3 at "
    "batches of 128, 1 epoch of warm-up; shifts and flips, as DeiT's augmentation needs more epochs; fp32"
)
KERNEL = {3: "the 3×3 convolution is of tokens", 5: "the 5×5 convolution is of pixels, which gives the table's 9 heads"}


def _inferred(experiment: Experiment, scale: Scale) -> str:
    epochs, said = experiment.epochs[scale], [KERNEL[experiment.kernel]]
    if not experiment.is_plain:
        said.append(OPEN_SWITCH)
    if experiment.conv_epochs == experiment.epochs[""] // 2 and not experiment.is_interpolation:
        said.append("half of the epochs in each stage")
    if scale == "_small":
        return "; ".join([OPEN_SMALL.format(epochs), *said])
    said = [OPEN, *said] if experiment.is_interpolation else [OPEN, OPEN_CIFAR, *said]
    if scale == "_gpu":
        same = epochs == experiment.epochs[""]
        what = "nothing" if same else f"{epochs} of {experiment.epochs['']} epochs in the same proportions"
        said = [f"scaled: {what}; a batch in 8 parts", *said]
    if not (experiment.has_control(scale) or experiment.is_plain):
        plain = "prs_interpolation_300_0" if experiment.is_interpolation else f"the one of prs_{experiment.name}"
        said.append(f"no control arm: it is {plain}{scale}, trained once for all (--control trains it here)")
    return "; ".join(said)


def _cost(experiment: Experiment, scale: Scale) -> str:
    control, epochs, conv_epochs = (
        experiment.has_control(scale),
        experiment.epochs[scale],
        experiment.conv_epochs_at(scale),
    )
    arms = " for both arms" if control else ""
    as_attention = 0.5 if conv_epochs is None else 1 - conv_epochs / epochs  # PRS: the average over its layers

    def total(as_conv: float, attention: float) -> float:
        """Of an epoch, both arms."""
        return as_conv + (attention - as_conv) * as_attention + (as_conv if control else 0.0)

    if scale == "_small":
        return f"{total(SECONDS, SECONDS_ATTENTION) * epochs / 60:.0f} minutes of a CPU core{arms}"
    images = IMAGENET_IMAGES // 10 if experiment.is_interpolation else CIFAR_IMAGES
    return compute(total(GMAC[experiment.kernel], GMAC_ATTENTION), epochs, images=images) + arms


def _title(experiment: Experiment, scale: Scale) -> str:
    epochs, conv_epochs = experiment.epochs[scale], experiment.conv_epochs_at(scale)
    long = f"{epochs}" if conv_epochs is None else f"{conv_epochs} + {epochs - conv_epochs}"
    full = "10 % of ImageNet" if experiment.is_interpolation else "CIFAR-100 at 224"
    data = "5,000 images of CIFAR-100" if scale == "_small" else full
    where = {"": "", "_gpu": ", on one GPU", "_small": ", on a CPU"}[scale]
    return f"{experiment.what}: {long} epochs on {data}{where}"


def _expected(experiment: Experiment, scale: Scale) -> str:
    if experiment.is_interpolation:
        return "no accuracy published; with more attention Δ log amplitude rises in early layers and falls in late ones"
    if experiment.top1 is None:
        return "none published"
    top1 = f"{experiment.top1} % top-1"
    return f"none published at this scale ({top1} at the paper's)" if scale == "_small" else top1


def _entry(experiment: Experiment, scale: Scale) -> Entry:
    return Entry(
        experiment.name + scale,
        _title(experiment, scale),
        lambda: _recipe(experiment, scale),
        experiment.source,
        _expected(experiment, scale),
        _cost(experiment, scale),
        _inferred(experiment, scale),
    )


ENTRIES: list[Entry] = [_entry(experiment, scale) for experiment in EXPERIMENTS for scale in get_args(Scale)]
