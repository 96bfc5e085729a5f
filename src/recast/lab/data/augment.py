"""Augmentation of one training image: crop, flip, policy, colour jitter. Erasing and mixing act on batches.

Shapes: B images of C = 3 channels and S x S pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import posterize
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms

from recast.errors import RecastError
from recast.lab.config import Augmentation, Crop
from recast.lab.data.images import PADDING, SMALL, resize_and_crop, to_bytes

Transform = Callable[[Image.Image], Tensor]
"""RGB image to (3, S, S) bytes."""
Step = Callable[[Any], Any]

SIMPLE_PADDING = 4
"""Pixels that crop=simple reflects at every side (DeiT III, §4.2)."""

TRIVIAL = "ta_wide"
"""TrivialAugment (Müller & Hutter 2021, arXiv:2103.10158) under torchvision's name; timm does not have it."""

_NUMBER = r"\d+(\.\d+)?"
_POLICY = re.compile(  # timm ignores unknown options, or fails in an assertion
    rf"rand(-(m\d+|n[1-9]\d*|p{_NUMBER}|mstd{_NUMBER}|mmax\d+|inc[01]|tweights|t3aw?))*"
    rf"|augmix(-(m\d+|w[1-9]\d*|d\d+|a{_NUMBER}|b[01]|mstd{_NUMBER}))*"
    rf"|(original|originalr|v0|v0r|3a)(-mstd{_NUMBER})*"
    rf"|{TRIVIAL}"
)


def resolve(
    augment: Augmentation | None, img_size: int, *, crop: Crop | None = None, flip: bool = True
) -> Augmentation:
    """Fill the open fields of `augment` with the data set's `crop` (None: by size) and `flip`.

    Raises RecastError for an unknown policy or reversed ranges.
    """
    augment = augment or Augmentation()
    crop = augment.crop or crop or ("pad" if img_size < SMALL else "random")
    augment = replace(augment, crop=crop, flip=flip if augment.flip is None else augment.flip)
    if augment.auto_augment is not None and not _POLICY.fullmatch(augment.auto_augment):
        raise RecastError(
            f"unknown auto_augment {augment.auto_augment!r}: expected a policy of timm with its options, such as "
            "rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0 or 3a; ta_wide; or null for none"
        )
    return augment


def file_transform(img_size: int, augment: Augmentation | None = None, crop_pct: float | None = None) -> Transform:
    """Return the transform of one image (`augment` None: of validation). It draws from the global generators.

    crop: "random", timm's random resized crop, bicubic, aspect 3/4 to 4/3; "simple", the short side to S (bicubic),
    then an S x S window of the image reflected by 4 pixels at every side (DeiT III, Touvron et al. 2022, §4.2); "pad",
    as validation, then a window of the image padded by S/8 zeros (4 of 32). Flip, timm's policy and colour jitter
    follow; timm omits the jitter with RandAugment and AutoAugment but not with 3-Augment. `TRIVIAL` is torchvision's,
    without jitter, and interpolates and fills as timm's policies do.
    """
    as_validation = partial(resize_and_crop, img_size=img_size, crop_pct=crop_pct)
    if augment is None:
        return transforms.Compose([as_validation, to_bytes])
    augment = resolve(augment, img_size)
    is_trivial = augment.auto_augment == TRIVIAL
    random_crop, policy, _ = create_transform(
        img_size,
        is_training=True,
        scale=augment.scale,
        hflip=0.0,
        auto_augment=None if is_trivial else augment.auto_augment,
        color_jitter=(not is_trivial and augment.color_jitter) or None,  # type: ignore[arg-type]  # None: no jitter
        interpolation="bicubic",
        normalize=False,
        # timm's geometric operations fill with ImageNet's mean: the network's own mean is only known after the data
        # set, and a resumed run must fill as before.
        separate=True,
    )
    if is_trivial:
        bicubic = transforms.InterpolationMode.BICUBIC
        policy = transforms.Compose([transforms.TrivialAugmentWide(interpolation=bicubic, fill=[*PADDING])])
    for step in policy.transforms:  # RandAugment and AugMix have `ops`, AutoAugment a `policy` of lists of them
        for operation in chain(getattr(step, "ops", []), *getattr(step, "policy", [])):
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize
    return transforms.Compose([*crop_and_flip(img_size, augment, as_validation, random_crop), policy, to_bytes])


def crop_and_flip(img_size: int, augment: Augmentation, as_validation: Step, random_crop: Step) -> list[Step]:
    """Return the crops and the flip of a resolved `augment`, of pictures and of tensors (C, H, W)."""
    crops: dict[Crop | None, list[Step]] = {
        "none": [as_validation],
        "pad": [as_validation, transforms.RandomCrop(img_size, padding=pad_width(img_size))],
        "random": [random_crop],
        "simple": [
            transforms.Resize(img_size, transforms.InterpolationMode.BICUBIC),
            transforms.RandomCrop(img_size, padding=SIMPLE_PADDING, padding_mode="reflect"),
        ],
    }
    return [*crops[augment.crop], *([transforms.RandomHorizontalFlip()] if augment.flip else [])]


def _posterize(image: Image.Image, bits_to_keep: int, **fill: object) -> Image.Image:
    """Posterize as timm, to black for 0 bits: newer Pillow raises ValueError there."""
    return Image.new(image.mode, image.size) if bits_to_keep <= 0 else posterize(image, bits_to_keep)


def pad_width(img_size: int) -> int:
    """Return the largest shift of crop=pad in pixels."""
    return max(1, img_size // 8)


def only_shifts(augment: Augmentation) -> bool:
    """Return True if `shift_and_flip` does all of a resolved `augment`."""
    return augment.crop in ("none", "pad") and augment.auto_augment is None and not augment.color_jitter


def shift_and_flip(images: Tensor, seeds: Tensor, augment: Augmentation) -> Tensor:
    """Shift and flip (B, C, S, S) by the digits of the seeds (B,) int64; draws nothing.

    With n = 2p + 1 places an axis: top = seed mod n, left = seed div n mod n, mirrored where seed div n² is odd.
    """
    count, channels, size, _ = images.shape
    pad = pad_width(size) if augment.crop == "pad" else 0
    places = 2 * pad + 1
    result = images.numpy()
    if pad:
        padded = np.zeros((count, channels, size + 2 * pad, size + 2 * pad), dtype=result.dtype)
        padded[:, :, pad : pad + size, pad : pad + size] = result
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))
        top, left = (seeds % places).numpy(), (seeds // places % places).numpy()
        result = windows[np.arange(count), :, top, left]
    if augment.flip:
        mirrored = (seeds // places**2 % 2 == 1).numpy()
        result = result if pad else result.copy()
        result[mirrored] = result[mirrored, :, :, ::-1]
    return torch.from_numpy(result)
