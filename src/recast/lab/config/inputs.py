"""Which network, which images, and what training sees of them, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from recast.fields import (
    Checked,
    Count,
    CropShare,
    Finite,
    NotNegative,
    Pixels,
    Positive,
    Probability,
    ProperShare,
    Ratio,
    Share,
    Workers,
)

Crop = Literal["none", "pad", "random", "simple"]


@dataclass
class DataConfig(Checked, prefix="data."):
    """Images and how they are prepared. Pixels are in [0, 1]; normalisation happens next to the model."""

    name: str = "digits"
    """digits, cifar10, cifar100, imagenet, folder, zip (an ImageFolder tree, or a zip of one), torch/NAME
    (torchvision), hfds/NAME (Hugging Face datasets), wds/SHARDS (WebDataset). Segmentation: scenes, masks (folders
    images and masks). Detection: scene_objects, coco (images and COCO's JSON)."""
    data_dir: str | None = None
    """Folder with train/ and val/ (or test/), with train.zip and test.zip, or a .zip. None: $RECAST_DATA/NAME."""
    img_size: Pixels | None = None
    """Side in pixels. None: 32 for digits and CIFAR, 96 for scenes, the files' own (at most 224) for a zip and for a
    network that states no size, 224 otherwise."""
    test_size: Pixels | None = None
    """Side in pixels in validation. None: img_size."""
    crop_pct: CropShare | None = None
    """Share of the short side that validation's centre crop keeps. None: 0.875, and 1 for small images."""
    mean: tuple[Finite, ...] | Literal["data"] | None = None
    """Per-channel mean of the normalisation in [0, 1] pixels, or data: measured on training images. None: what the
    network was trained with, if it says so (timm's do), else the data set's own."""
    std: tuple[Positive, ...] | Literal["data"] | None = None
    """Per-channel standard deviation of the normalisation, or data. None: as for the mean."""
    batch_size: Count = 128
    """Images an update, over all processes and accumulated parts."""
    workers: Workers = 0
    """Loader processes (of each process); 0 is fastest for small images held in memory."""
    num_train: Count | None = None
    """Use only this many training images (class-balanced, seeded)."""
    num_val: Count | None = None
    """Use only this many validation images (class-balanced, seeded)."""
    data_fraction: Share | None = None
    """Use only this share of every class's training images (seeded), at least one: for data-scale studies."""
    val_fraction: ProperShare = 0.1
    """Share of every class that is held out where the data have no validation part."""
    labels: Literal["fine", "coarse"] = "fine"
    """coarse: train with the labels of coarse classes, each of which holds several of the data's own, the fine ones."""
    coarse_file: str | None = None
    """A CSV with the columns fine and coarse, a line a class. None: CIFAR-100's 20 superclasses, or `rank`."""
    rank: Literal["folder", "kingdom", "phylum", "class", "order", "family", "genus"] | None = None
    """Coarse classes in the data: folder, the outer of two levels of folders; the others, of iNaturalist's names."""
    bad_image: Literal["stop", "skip"] = "stop"
    """An image that cannot be read: stop and name it, or put the next image in its place, name and count it."""


@dataclass
class AugmentConfig(Checked, prefix="augment."):
    """What training sees of an image. Validation: short side resized, centre crop (`data.crop_pct`)."""

    crop: Crop | None = None
    """none: as in validation. pad: shifted by up to S/8 (CIFAR's 4 of 32). random: random resized crop. simple: short
    side to S, then a random S x S window of the image padded by 4 (DeiT III). None: pad for small images, random
    otherwise."""
    scale: tuple[Share, Share] = (0.08, 1.0)
    """crop=random: share of the image's area that is cut out."""
    resize: tuple[Ratio, Ratio] = (0.5, 2.0)
    """Segmentation and detection, crop=random: factor that the image is resized by before the cut; 1: the short side to
    S, in detection the long one."""
    flip: bool | None = None
    """Mirror half of the images. None: yes, but for digits."""
    auto_augment: str | None = None
    """timm's policy: rand-m9-mstd0.5-inc1 (RandAugment), 3a (3-Augment), original, augmix-m3-w3, ..."""
    color_jitter: NotNegative = 0.0
    """Strength of brightness, contrast and saturation jitter; under RandAugment and AutoAugment off, as in timm."""
    erasing: Probability = 0.0
    """Probability of random erasing (one box of noise, pixel mode)."""
    repeats: Count = 1
    """Repeated augmentation: each image that many times in a batch; an epoch stays as long, shows 1/repeats of them."""
    mixup: NotNegative = 0.0
    """Mixup's alpha of the Beta distribution; 0: off."""
    cutmix: NotNegative = 0.0
    """CutMix's alpha of the Beta distribution; 0: off."""
    mix_prob: Probability = 1.0
    """Probability that a batch is mixed at all."""
    mix_switch_prob: Probability = 0.5
    """Where both are on: probability of CutMix instead of Mixup."""
    mix_mode: Literal["batch", "pair", "elem"] = "batch"
    """One draw per batch, pair or element."""
