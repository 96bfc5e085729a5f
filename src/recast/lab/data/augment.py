"""What training sees of an image: crop, flip, policy, colour jitter. Random erasing and mixing come with the batch.

Shapes: B images of C = 3 channels and S x S pixels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import posterize
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms

from recast.errors import RecastError, suggest
from recast.lab.config import Augmentation, Crop
from recast.lab.data.images import SMALL, resize_and_crop, to_pixels

Transform = Callable[[Image.Image], Tensor]
"""From an RGB image to (3, S, S) pixels in [0, 1]."""

SIMPLE_PADDING = 4
"""crop=simple: pixels that are reflected at every side (DeiT III, §4.2)."""

_NUMBER = r"\d+(\.\d+)?"
# timm passes over options that it does not know, or ends in an assertion: every section is read here first.
_POLICIES = {
    "rand": rf"m\d+|n[1-9]\d*|p{_NUMBER}|mstd{_NUMBER}|mmax\d+|inc[01]|tweights|t3aw?",
    "augmix": rf"m\d+|w[1-9]\d*|d\d+|a{_NUMBER}|b[01]|mstd{_NUMBER}",
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), rf"mstd{_NUMBER}"),
}


def resolve(
    augment: Augmentation | None, img_size: int, *, crop: Crop | None = None, flip: bool = True
) -> Augmentation:
    """`augment` with nothing left open: `crop` (None: pad below 96 pixels, else random) and `flip` are the data set's.

    Raises RecastError for an unknown policy.
    """
    augment = augment or Augmentation()
    chosen = augment.crop or crop or ("pad" if img_size < SMALL else "random")
    augment = replace(augment, crop=chosen, flip=flip if augment.flip is None else augment.flip)
    if augment.auto_augment is not None:
        _check_policy(augment.auto_augment)
    return augment


def _check_policy(policy: str) -> None:
    name, *sections = policy.split("-")
    if name not in _POLICIES:
        raise RecastError(
            f"unknown auto_augment {policy!r}: expected {', '.join(_POLICIES)}, with options as in "
            f"rand-m9-mstd0.5-inc1 or augmix-m3-w3.{suggest(name, _POLICIES)}"
        )
    for section in sections:
        if not re.fullmatch(_POLICIES[name], section):
            letters = ", ".join(re.findall(r"(?:^|\|)([a-z]+)", _POLICIES[name]))
            raise RecastError(
                f"auto_augment {policy!r}: {name} has no option {section!r}, only numbers after {letters}"
            )


def file_transform(img_size: int, augment: Augmentation | None = None, crop_pct: float | None = None) -> Transform:
    """The transform of one image; `augment` None: that of validation. Draws from the global generators.

    random: timm's random resized crop, bicubic, aspect 3/4 to 4/3. simple: short side to S (bicubic), then an S x S
    window of the image reflected by 4 pixels at every side: the aspect never changes (DeiT III, Touvron et al. 2022,
    §4.2). pad: as validation, then a window of the image padded by S/8 zeros (4 of 32). After it the flip, then timm's
    policy, then colour jitter, which timm leaves out under RandAugment and AutoAugment but not under 3-Augment.
    """
    as_validation = partial(resize_and_crop, img_size=img_size, crop_pct=crop_pct)
    if augment is None:
        return transforms.Compose([as_validation, to_pixels])
    augment = resolve(augment, img_size)
    cut, policy, _ = create_transform(
        img_size,
        is_training=True,
        scale=augment.scale,
        hflip=0.0,
        auto_augment=augment.auto_augment,
        color_jitter=augment.color_jitter or None,  # type: ignore[arg-type]  # None: no jitter
        interpolation="bicubic",
        normalize=False,
        # The mean that timm's geometric operations fill with is left at ImageNet's: the network's own is only known
        # after the data set, and a run that goes on must fill as it did before.
        separate=True,
    )
    crops: dict[Crop | None, list[Callable[[Image.Image], Image.Image]]] = {
        "none": [as_validation],
        "pad": [as_validation, transforms.RandomCrop(img_size, padding=pad_width(img_size))],
        "random": [cut],
        "simple": [
            transforms.Resize(img_size, transforms.InterpolationMode.BICUBIC),
            transforms.RandomCrop(img_size, padding=SIMPLE_PADDING, padding_mode="reflect"),
        ],
    }
    for step in policy.transforms:  # RandAugment and AugMix have `ops`, AutoAugment a `policy` of lists of them
        for operation in chain(getattr(step, "ops", []), *getattr(step, "policy", [])):
            if operation.aug_fn is posterize:
                operation.aug_fn = _posterize
    flip = [transforms.RandomHorizontalFlip()] if augment.flip else []
    return transforms.Compose([*crops[augment.crop], *flip, policy, to_pixels])


def _posterize(image: Image.Image, bits_to_keep: int, **fill: object) -> Image.Image:
    """timm's, where 0 bits give a black image as they always did: newer Pillow raises ValueError instead."""
    if bits_to_keep <= 0:
        return Image.new(image.mode, image.size)
    return posterize(image, bits_to_keep)


def pad_width(img_size: int) -> int:
    """crop=pad: how many pixels an image is shifted at most."""
    return max(1, img_size // 8)


def only_shifts(augment: Augmentation) -> bool:
    """Whether `shift_and_flip` does all that `augment` (resolved) asks for."""
    return augment.crop in ("none", "pad") and augment.auto_augment is None and not augment.color_jitter


def shift_and_flip(images: Tensor, seeds: Tensor, augment: Augmentation) -> Tensor:
    """Padded crop and flip of (B, C, S, S) bytes, without a random generator: both are digits of the seeds (B,) int64.

    With n = 2p + 1 places an axis: top = seed mod n, left = seed div n mod n, mirrored where seed div n² is odd.
    """
    count, channels, size, _ = images.shape
    pad = pad_width(size) if augment.crop == "pad" else 0
    places = 2 * pad + 1
    result = images.numpy()
    if pad:
        padded = np.zeros((count, channels, size + 2 * pad, size + 2 * pad), dtype=np.uint8)
        padded[:, :, pad : pad + size, pad : pad + size] = result
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), axis=(2, 3))
        top, left = (seeds % places).numpy(), (seeds // places % places).numpy()
        result = windows[np.arange(count), :, top, left]
    if augment.flip:
        mirrored = (seeds // places**2 % 2 == 1).numpy()
        result = result if pad else result.copy()
        result[mirrored] = result[mirrored, :, :, ::-1]
    return torch.from_numpy(result)
