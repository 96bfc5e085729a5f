"""Which network, which images, and what training sees of them, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Crop = Literal["none", "pad", "random", "simple"]


@dataclass
class ModelConfig:
    """The parent: a trained convolutional network (or any network, where nothing is recast)."""

    name: str = "resnet18"
    """timm:NAME (or NAME), torchvision:NAME, or pkg.module:function."""
    checkpoint: str | None = None
    """Weights of the parent, .safetensors or .pth (never unpickled)."""
    pretrained: bool = False
    """Let timm or torchvision fetch its pretrained weights."""
    num_classes: int | None = None
    """Classes of the head; None: the model's own, or the data set's when training."""
    new_head: bool = False
    """Load the checkpoint without its classifier and draw a new one: for data with other classes."""
    input_size: int | None = None
    """Side in pixels for networks built for one size (ViT, CaiT, ResMLP); positions of a checkpoint are resampled."""


@dataclass
class DataConfig:
    """Images and how they are prepared. Pixels are in [0, 1]; normalisation happens next to the model."""

    name: str = "digits"
    """digits, cifar10, cifar100, imagenet, folder, zip (an ImageFolder tree, or a zip of one), torch/NAME
    (torchvision), hfds/NAME (Hugging Face datasets), wds/SHARDS (WebDataset)."""
    data_dir: str | None = None
    """Folder with train/ and val/ (or test/), with train.zip and test.zip, or a .zip. None: $RECAST_DATA/NAME."""
    img_size: int | None = None
    """Side in pixels. None: 32 for digits and CIFAR, a zip's own (at most 224), 224 otherwise."""
    test_size: int | None = None
    """Side in pixels in validation. None: img_size."""
    crop_pct: float | None = None
    """Share of the short side that validation's centre crop keeps. None: 0.875, and 1 for small images."""
    mean: tuple[float, ...] | None = None
    """Per-channel mean of the normalisation in [0, 1] pixels. None: what the network was trained with, if it says so
    (timm's do), else the data set's own."""
    std: tuple[float, ...] | None = None
    """Per-channel standard deviation of the normalisation. None: as for the mean."""
    batch_size: int = 128
    """Images an update, over all processes and accumulated parts."""
    workers: int = 0
    """Loader processes (of each process); 0 is fastest for small images held in memory."""
    num_train: int | None = None
    """Use only this many training images (class-balanced, seeded)."""
    num_val: int | None = None
    """Use only this many validation images (class-balanced, seeded)."""
    data_fraction: float | None = None
    """Use only this share of every class's training images (seeded), at least one: for data-scale studies."""
    val_fraction: float = 0.1
    """Share of every class that is held out where the data have no validation part."""
    bad_image: Literal["stop", "skip"] = "stop"
    """An image that cannot be read: stop and name it, or put the next image in its place, name and count it."""


@dataclass
class AugmentConfig:
    """What training sees of an image. Validation: short side resized, centre crop (`data.crop_pct`)."""

    crop: Crop | None = None
    """none: as in validation. pad: shifted by up to S/8 (CIFAR's 4 of 32). random: random resized crop. simple: short
    side to S, then a random S x S window of the image padded by 4 (DeiT III). None: pad for small images, random
    otherwise."""
    scale: tuple[float, float] = (0.08, 1.0)
    """crop=random: share of the image's area that is cut out."""
    flip: bool | None = None
    """Mirror half of the images. None: yes, but for digits."""
    auto_augment: str | None = None
    """timm's policy: rand-m9-mstd0.5-inc1 (RandAugment), 3a (3-Augment), original, augmix-m3-w3, ..."""
    color_jitter: float = 0.0
    """Strength of brightness, contrast and saturation jitter; under RandAugment and AutoAugment off, as in timm."""
    erasing: float = 0.0
    """Probability of random erasing (one box of noise, pixel mode)."""
    repeats: int = 1
    """Repeated augmentation: each image that many times in a batch; an epoch stays as long, shows 1/repeats of them."""
    mixup: float = 0.0
    """Mixup's alpha of the Beta distribution; 0: off."""
    cutmix: float = 0.0
    """CutMix's alpha of the Beta distribution; 0: off."""
    mix_prob: float = 1.0
    """Probability that a batch is mixed at all."""
    mix_switch_prob: float = 0.5
    """Where both are on: probability of CutMix instead of Mixup."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """One draw per batch, pair or element."""
