"""Data sets by name: training and validation images, class names, normalisation and sizes."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError, listed, shown, suggest
from recast.lab.config import Augmentation, DataConfig, Recipe, TaskConfig
from recast.lab.config.inputs import SOURCES, is_of_lab
from recast.lab.config.recipe import Groups, PaperConfig, extend
from recast.lab.data.augment import resolve
from recast.lab.data.datasets import SIZED, ImageFiles, LabelledImages, RawData, SmallImages
from recast.lab.data.digits import find_canvases, find_digits
from recast.lab.data.folders import data_dir, find_archives, find_folder
from recast.lab.data.images import ORIENTATION, PHOTO, bits_of, in_unit, opened
from recast.lab.data.libraries import NORMS, find_in_torchvision, find_on_hub, read_vision
from recast.lab.data.loading import Loader
from recast.lab.data.seeding import choose_balanced, choose_fraction, choose_stratified, hold_out
from recast.lab.data.table import find_csv
from recast.lab.plugins import FINDERS, plugged
from recast.models.build import InputDefaults, input_defaults
from recast.models.register import IMAGENET, Stats

MOST_RESIZED = 2**30
"""Largest number of bytes of images in memory at the size of the network, in each process; above, at their own size."""

MEASURED = 2048
"""Number of images that mean and deviation are measured on."""


@dataclass(frozen=True)
class Data:
    """Images of one data set. Items of `train` and `val` are (float32 (3, S, S) in [0, 1], int label)."""

    name: str
    train: LabelledImages
    """With augmentation; `train.plain()` has none. Empty if the data can only be evaluated on."""
    val: LabelledImages
    classes: list[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    img_size: int
    """Side of the training images in pixels."""
    groups: Groups | None = None
    """Groups of the `classes`; None if there are none, or if these are the groups."""
    is_relabelled: bool = False
    """True if the labels are others than those that a network was trained with."""
    bad_images: tuple[str, ...] = ()
    """Skipped images of an archive that could not be decoded (`bad_image: skip`)."""
    kinds: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Groups of classes that are also measured separately: name → classes."""
    in_chans: int | None = None
    """Number of bands of an image; None: RGB pictures."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values of `img_size`, `test_size`, `mean` and `std` in the config; what it leaves open is missing."""
    is_held_out: bool = False
    """True if the validation images are a share of the training images."""

    @property
    def test_size(self) -> int:
        """Return the side of the validation images in pixels."""
        return self.val.img_size

    @property
    def example(self) -> Tensor:
        """Return an empty training image, (1, C, S, S)."""
        return torch.zeros(1, self.in_chans or 3, self.img_size, self.img_size)

    def normalised(self, pixels: Tensor, device: torch.device) -> Tensor:
        """Normalise pixels (B, C, H, W), bytes or floats, on a device."""
        return normalize(in_unit(pixels.to(device)), list(self.mean), list(self.std))

    def some(
        self, part: LabelledImages, count: int, config: DataConfig, seed: int, device: torch.device, whole: bool = False
    ) -> Iterator[Tensor]:
        """Yield `count` images in the order of a seed, normalised, in batches; `whole`: the last one uncut."""
        size, missing = min(config.batch_size, 128), count
        for images, _ in Loader(part, size, shuffle_seed=seed, bad_image=config.bad_image):
            yield self.normalised(images if whole else images[:missing], device)
            missing -= len(images)
            if missing <= 0:
                return

    def check_logits(
        self, logits: object, images: int, of: str = "the model", remedy: str = "set model.num_classes"
    ) -> None:
        """Raise RecastError unless `logits`, the output of the network `of`, is a tensor (images, classes).

        remedy: what the message on another number of classes says to do.
        """
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        must = f"{of} must give logits"
        if not isinstance(got, tuple) or len(got) != 2 or got[0] != images:
            raise RecastError(f"{must} ({images}, classes), a tensor with a row for each image, got {got}")
        if got[1] != len(self.classes):
            raise RecastError(f"{must} ({images}, {len(self.classes)}) for {self.name}, got {got}: {remedy}")

    def fitted_to(self, model: nn.Module) -> tuple[Data, str]:
        """Return the data with size, mean and deviation for a network, and a line with them and where they come from.

        Values in `given` stay. Others are those that the network states, mean and deviation only if their number of
        channels fits. Without a stated size the images keep theirs.
        """
        defaults = input_defaults(model)
        sized, size_from = self._sized_for(model, defaults)
        data, norm_from = sized._normalised_for(defaults)
        norm = (" ".join(f"{value:.3g}" for value in values) for values in (data.mean, data.std))
        side, test, crop = data.img_size, data.test_size, data.val.crop_pct
        size = f"{side}x{side} pixels{size_from}" + f", tested at {test}x{test}" * (test != side)
        size += "" if crop in (None, 1) else f", test crop {crop:g}"
        validation = f"{len(data.val):,} validation{' (held out)' * data.is_held_out}"
        count = f"{len(data.train):,} training, {validation}, {len(data.classes)} classes"
        return data, "images: {}; {}, mean {}, std {} ({})".format(count, size, *norm, norm_from)

    def _sized_for(self, model: nn.Module, defaults: InputDefaults | None) -> tuple[Data, str]:
        """Return the data with the size for a network, and where it comes from; "" if it stays."""
        states_224 = type(model).__module__.startswith("torchvision.")
        if "img_size" in self.given or not isinstance(self.train, ImageFiles) or states_224:
            return self, ""
        file_size = self.train.own_size()
        size = max(defaults.size) if defaults else file_size
        origin = "the network's" if defaults else "the files' own, as the network states none"
        if size != file_size:
            origin += f"; the files have {file_size}" + " or more" * (file_size == PHOTO)
        val = self.val if "test_size" in self.given else self.val.resized(size, self.val.crop_pct)
        return replace(
            self, train=replace(self.train, img_size=size), val=val, img_size=size
        ), f" ({origin}; --img-size)"

    def _normalised_for(self, defaults: InputDefaults | None) -> tuple[Data, str]:
        """Return the data with mean and deviation for a network, and where they come from."""
        data, origin = self, "the data set's"
        if self.in_chans is not None:
            origin = "measured on training images, as the network states none for these channels"
        if defaults is not None and len(defaults.mean) == len(self.mean):
            if self.in_chans is None or _fits_unit(self.mean, self.std):
                mean = self.mean if "mean" in self.given else defaults.mean
                data = replace(self, mean=mean, std=self.std if "std" in self.given else defaults.std)
                origin = "the network's"
            else:
                origin = "measured on training images, which unlike the network's are not in [0, 1]"
        elif (self.mean, self.std) == IMAGENET:
            origin = "ImageNet's, as the network states none; --mean data --std data measures the images"
        if not {"mean", "std"}.isdisjoint(self.given):
            origin = "as given" if "data" not in self.given.values() else "measured on training images"
        return data, origin


def without_unreadable(data: Data, *parts: Literal["train", "val"]) -> Data:
    """Return the data without the images of `parts` that cannot be read; a warning names them."""
    bad: list[str] = []
    for part in parts:
        images = getattr(data, part)
        readable = torch.tensor(list(map(images.plain().is_readable, range(len(images)))), dtype=torch.bool)
        bad += [images.image_name(index) for index in (~readable).nonzero().flatten().tolist()]
        data = replace(data, **{part: images.subset(readable.nonzero().flatten())})
    if bad:
        warnings.warn(f"skipped unreadable images ({len(bad)}): {listed(bad, 5)}", stacklevel=2)
    return data


def load_data(
    config: DataConfig,
    augment: Augmentation | None = None,
    grouping: PaperConfig | None = None,
    in_chans: int | None = None,
) -> Data:
    """Load a data set by name.

    Subsets and splits are always the same: num_train is class-balanced, num_val has the class shares of all images.

    Args:
        config: name, folder, sizes and subsets.
        augment: of the training images; None: the defaults of the data set.
        grouping: settings that group classes (`Recipe.grouping`); the labels are the groups if it learns these.
        in_chans: number of bands of an image, also 3 and 1; None: RGB pictures.

    Returns:
        Training and validation images, class names and normalisation.

    Raises:
        RecastError: for an unknown name, a missing folder, a class without images, a label out of range, an unreadable
            archive or image (of those decoded here), or an unknown policy.

    Example:
        >>> data = recast.lab.data.load_data(recast.lab.config.DataConfig("digits"))
        >>> len(data.train), len(data.val), data.img_size
        (1297, 500, 32)
    """
    if not is_of_lab(config.name):
        extend()
    prefix, slash, rest = config.name.partition("/")
    sources = [*_SOURCES, *(name for task in TaskConfig.members.values() for name in task.data_sets)]
    source = _LIBRARIES.get(prefix) if slash and rest else _SOURCES.get(config.name)
    if source is None and config.name in sources:
        source = plugged(FINDERS, config.name)
    if source is None:
        names = ", ".join([*sources, *(f"{library}/NAME" for library in _LIBRARIES)])
        raise RecastError(f"unknown data set {config.name!r}: expected one of {names}.{suggest(config.name, sources)}")
    raw = source(config)
    notes = [*raw.notes, *_alike(raw.name, raw.classes or ()), *([] if in_chans else _rgb_notes(raw.train or raw.val))]
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return assemble(config, augment, raw, grouping or Recipe().grouping, in_chans)


def assemble(
    config: DataConfig, augment: Augmentation | None, raw: RawData, grouping: PaperConfig, in_chans: int | None
) -> Data:
    """Return the `Data` made of a data set: hold out images, choose subsets, set sizes and augmentation.

    Raises RecastError for an image with a wrong label.
    """
    train, val, is_held_out = raw.train, raw.val, raw.is_held_out or raw.val is None
    if val is None:
        assert train is not None
        indices, held_out = hold_out(train.labels, config.val_fraction)
        train, val = train.subset(indices), train.subset(held_out)
    elif train is None:
        train = val.subset(torch.empty(0, dtype=torch.long))
    if in_chans is not None:
        train, val = train.banded(in_chans), val.banded(in_chans)
    classes = raw.classes or [str(n) for n in range(int(torch.cat([train.labels, val.labels]).max()) + 1)]
    groups = grouping.groups(config.name, classes)
    for part, images in (("training", train), ("validation", val)):
        _check_labels(images, classes, part)
    skip, img_size = config.bad_image == "skip", config.img_size or val.img_size
    if raw.in_memory and config.img_size is None and isinstance(val, ImageFiles):
        img_size = val.own_size()
    if isinstance(config.num_train, int):
        train = train.subset(choose_balanced(train.labels, config.num_train, "num_train"))
    elif config.num_train is not None:
        train = train.subset(choose_fraction(train.labels, config.num_train))
    if config.num_val is not None:
        val = val.subset(choose_stratified(val.labels, config.num_val, "num_val"))
    bad: list[str] = []
    parts = [train.resized(img_size, config.crop_pct), val.resized(config.test_size or img_size, config.crop_pct)]
    whole = sum(len(images) * 3 * images.img_size**2 for images in parts)
    for number, images in enumerate(parts):
        if raw.in_memory and isinstance(images, ImageFiles):
            parts[number], names = images.decoded(skip, whole > MOST_RESIZED)
            bad += names
    train, val = parts
    if small := [images.pixels.nbytes for images in parts if isinstance(images, SmallImages)]:
        warnings.warn(
            f"{raw.name} is kept in memory at its own size ({sum(small) / 2**30:.1f} GiB) and each image resized when "
            f"read, as all take {whole / 2**30:.1f} GiB at {img_size} pixels",
            stacklevel=2,
        )
    if in_chans is not None and augment is not None:
        augment = replace(augment, auto_augment=None, color_jitter=0.0)
    train = train.augmented(resolve(augment, train.img_size, crop=raw.crop, flip=raw.flip))
    mean, std = _norm(config, raw, train if len(train) else val)
    if grouping.learns_groups and groups is not None:  # after the subsets, which are chosen by classes
        train, val = (part.relabelled(groups.of[part.labels]) for part in (train, val))
        classes, groups = groups.names, None
    options = ("img_size", "test_size", "mean", "std")
    given = {name: value for name in options if (value := getattr(config, name)) is not None}
    others = (groups, False, tuple(bad), raw.kinds, in_chans, given, is_held_out)
    return Data(raw.name, train, val, classes, mean, std, train.img_size, *others)


def _norm(config: DataConfig, raw: RawData, images: LabelledImages) -> Stats:
    """Return the given mean and deviation, measured ones ("data", and by default of bands), or the data set's."""
    defaults = raw.norm if images.in_chans is None else ("data", "data")
    chosen: list[Any] = [config.mean or defaults[0], config.std or defaults[1]]
    measured = measured_norm(images, config.bad_image) if "data" in chosen else raw.norm
    mean, std = (tuple(value if norm == "data" else norm) for norm, value in zip(chosen, measured, strict=True))
    if {len(mean), len(std)} != {images.in_chans or 3}:
        raise RecastError(
            f"data.mean and data.std require {images.in_chans or 3} numbers each, one per channel, got {len(mean)} and "
            f"{len(std)}"
        )
    if images.in_chans is None and max(map(abs, (*mean, *std))) > 1:
        raise RecastError(
            f"data.mean and data.std are of pixels in [0, 1], got {mean} and {std}: divide those of 0 to 255 by 255"
        )
    return mean, std


def measured_norm(images: LabelledImages, bad_image: Literal["stop", "skip"]) -> Stats:
    """Return mean and standard deviation of each channel over MEASURED images as validation sees them."""
    sums, count = torch.zeros(2, images.in_chans or 3, dtype=torch.float64), 0
    for pixels, _ in islice(Loader(images.plain(), 64, shuffle_seed=0, bad_image=bad_image), MEASURED // 64):
        sums += torch.stack([(in_unit(pixels).double() ** power).sum((0, 2, 3)) for power in (1, 2)])
        count += pixels[:, 0].numel()
    mean, square = sums / count
    least = 1 / 255**2 if images.in_chans is None else 1e-12  # images may be of one grey
    std = (square - mean**2).clamp(min=least).sqrt()
    form = ".4f" if images.in_chans is None else ".4g"  # bands may have any scale
    rounded_mean, rounded_std = (tuple(float(f"{x:{form}}") for x in values.tolist()) for values in (mean, std))
    return rounded_mean, rounded_std


def _fits_unit(mean: Sequence[float], std: Sequence[float]) -> bool:
    """Return False for mean and deviation that numbers in [0, 1] cannot have."""
    return all(0 <= average <= 1 for average in mean) and all(deviation <= 0.5 for deviation in std)


def _rgb_notes(images: LabelledImages | None) -> list[str]:
    """Return a line each, over a few files, on pages, on bits that RGB does not keep, and on orientations; or none."""
    items, notes = getattr(images, "items", ()), dict[str, str]()
    content = getattr(getattr(images, "read", None), "content", lambda path: (path, path))  # of a zip
    for item in items[:: max(1, len(items) // SIZED)] if isinstance(items, list) else ():
        with suppress(RecastError), opened(*content(item)) as image:
            _, name = content(item)
            if image.format != "MPO" and (pages := getattr(image, "n_frames", 1)) > 1:  # MPO: previews of a camera
                cure = "; --in-chans N reads them as bands" * (
                    image.format == "TIFF" and isinstance(images, ImageFiles)
                )
                notes.setdefault("pages", f"{name} has {pages} pages and is read as the first{cure}")
            if bits_of(image) == 16:
                cure = "--in-chans N keeps all" if isinstance(images, ImageFiles) else "scale its values to 8 bits"
                notes.setdefault("bits", f"{name} has 16-bit pixels, of which RGB keeps the upper 8 bits; {cure}")
            if image.getexif().get(ORIENTATION, 1) != 1:
                cure = "rotate such images first if they should stand upright"
                notes.setdefault("orientation", f"{name} has an EXIF orientation and is read as stored; {cure}")
    return [*notes.values()]


def _alike(where: str, classes: Sequence[str]) -> list[str]:
    """Return a line about classes whose names differ only in case, spaces, `_`, `-` or what cannot be seen."""
    groups = defaultdict[str, list[str]](list)
    for name in dict.fromkeys(classes):
        text = unicodedata.normalize("NFKC", name).casefold()
        text = "".join(mark for mark in text if unicodedata.category(mark) != "Cf")
        spelling = text[:1] + re.sub("[_-]", " ", text[1:])  # -1 is not 1
        key = str(int(spelling)) if spelling.isdecimal() and len(spelling) < 19 else " ".join(spelling.split())
        groups[key].append(shown(name))
    alike = [" and ".join(names) for names in groups.values() if len(names) > 1]
    return [f"{where}: names that hardly differ are classes of their own: {listed(alike, 3)}"] if alike else []


def _check_labels(images: LabelledImages, classes: list[str], part: str) -> None:
    wrong = ((images.labels < 0) | (images.labels >= len(classes))).nonzero().flatten()
    if len(wrong):
        index = int(wrong[0])
        raise RecastError(
            f"labels must be 0 to {len(classes) - 1} ({len(classes)} classes), but {len(wrong)} {part} images have "
            f"others: {images.image_name(index)} has {int(images.labels[index])}"
        )


def _zip(config: DataConfig) -> RawData:
    if (images := find_archives(config)) is None:
        raise RecastError(
            f"--data zip requires a .zip file, or a folder with train.zip and val.zip (or test.zip), got "
            f"{data_dir(config)}"
        )
    return images


def _cifar(config: DataConfig) -> RawData:
    """Read train.zip and test.zip if the folder has them, else the files of torchvision; download nothing."""
    return find_archives(config, norm=NORMS[config.name]) or read_vision(config.name, data_dir(config))


_FINDERS = (find_digits, find_canvases, find_canvases, find_folder, find_csv, _zip, _cifar, _cifar, find_folder)
_SOURCES: dict[str, Callable[[DataConfig], RawData]] = dict(zip(SOURCES, _FINDERS, strict=True))

_LIBRARIES: dict[str, Callable[[DataConfig], RawData]] = {"torch": find_in_torchvision, "hfds": find_on_hub}
