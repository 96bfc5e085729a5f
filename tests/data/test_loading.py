import gc
import os
import random
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms.v2.functional import normalize

from recast.errors import RecastError
from recast.lab.config import Augmentation, ClassifyConfig, DataConfig, Recipe
from recast.lab.data import Loader, load_data, sources
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages, RawData, SmallImages
from recast.lab.data.images import in_unit
from recast.lab.data.seeding import (
    balanced_epoch,
    balanced_order,
    choose_balanced,
    choose_fraction,
    choose_stratified,
    epoch_order,
    hold_out,
    mix_seed,
)
from recast.lab.evaluation.context import Context
from recast.lab.task import task_named
from recast.lab.training.step import Update
from recast.papers.grafit.views import ManyViews

SHIFTED = Augmentation(crop="pad", flip=True)
POLICY = Augmentation(crop="simple", auto_augment="rand-m9-mstd0.5-inc1")


def make_data(count: int = 23, size: int = 8, augment: Augmentation | None = SHIFTED) -> ImageTensors:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return ImageTensors(pixels, torch.arange(count), augment)


@pytest.fixture(params=["tensors", "files"])
def data(request: Any, tmp_path: Path) -> LabelledImages:
    if request.param == "tensors":
        return make_data(6, 16)
    paths = [str(tmp_path / f"{index}.png") for index in range(6)]
    for path, image in zip(paths, make_data(6, 20).pixels, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return ImageFiles(torch.arange(6), 16, paths)


def test_items_are_pixels_and_int_labels() -> None:
    data = make_data(augment=None)
    image, label = data[3]
    assert image.equal(data.pixels[3].float() / 255)
    assert (label, type(label), data[-1][1]) == (3, int, 22)
    assert len(list(data)) == 23  # iteration by index ends
    images, labels = next(iter(torch.utils.data.DataLoader(data, batch_size=5)))
    assert images.shape == (5, 3, 8, 8)
    assert labels.tolist() == [0, 1, 2, 3, 4]


def test_bytes_become_the_floats_of_a_division() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(np.arange(256, dtype=np.float32) / np.float32(255))
    assert in_unit(levels).equal(expected)
    assert in_unit(expected) is expected


class Copied(TorchDispatchMode):
    """Counts the bytes of images that are copied to the meta device, which stands for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].dim() > 1 and (kwargs or {}).get("device") == META:
            self.count += 0 if args[0].is_meta else args[0].nbytes
        return func(*args, **kwargs or {})


META = torch.device("meta")


@pytest.mark.parametrize("augment", [None, SHIFTED, POLICY])
def test_images_reach_the_device_as_bytes(data: LabelledImages, augment: Augmentation | None) -> None:
    """In training, validation and evaluation: a quarter of what float32 takes, and the same pixels to the bit."""
    data = data.augmented(augment)
    whole = load_data(DataConfig(num_train=10, num_val=10))
    whole = replace(whole, train=data, val=data)
    ((images, labels),) = Loader(data, 6, shuffle_seed=0)
    order, seeds = epoch_order(6, 0, 0), [mix_seed("augment", 0, 0, position) for position in range(6)]
    assert in_unit(images).equal(data.batch(order.tolist(), seeds)[0])
    mean, std = torch.tensor(whole.mean), torch.tensor(whole.std)
    setting = {"memory_format": torch.channels_last, "erase": None, "mix": None}
    here: Any = SimpleNamespace(device=torch.device("cpu"), mean=mean, std=std, **setting)
    normalised = normalize(data.batch(order.tolist(), seeds)[0], whole.mean, whole.std)
    assert Update.inputs(here, images, labels)[0].equal(normalised)
    assert whole.normalised(images, here.device).equal(normalised)
    there: Any = SimpleNamespace(device=META, mean=mean.to(META), std=std.to(META), **setting)
    for send in (
        lambda: Update.inputs(there, images, labels)[0],
        lambda: whole.normalised(images, META),
        lambda: next(Context({}, whole, 6, META).batches()).images,
    ):
        with Copied() as copied:
            sent = send()
        assert (sent.dtype, sent.shape) == (torch.float32, images.shape)
        assert copied.count == images.numel()


def test_images_of_bands_stay_floats() -> None:
    bands = ImageTensors(torch.rand(4, 5, 8, 8), torch.arange(4), SHIFTED, in_chans=5)
    ((images, _),) = Loader(bands, 4)
    assert images.dtype == torch.float32


@pytest.mark.parametrize("augment", [SHIFTED, POLICY, Augmentation(crop="random")])
def test_an_image_follows_from_its_seed_alone(data: LabelledImages, augment: Augmentation) -> None:
    data = data.augmented(augment)
    seeds = [2**62 + 7 * index for index in range(6)]
    images, labels = data.batch(range(6), seeds)
    assert labels.tolist() == list(range(6))
    assert images.shape == (6, 3, 16, 16)
    assert 0 <= images.min() <= images.max() <= 1
    some, _ = data.batch([4, 1, 5], [seeds[4], seeds[1], seeds[5]])
    assert some.equal(images[[4, 1, 5]])
    assert not data.batch(range(6), [seed + 1 for seed in seeds])[0].equal(images)
    torch.manual_seed(0)
    drawn, drawn_next = (data.batch(range(6))[0] for _ in range(2))
    assert not drawn.equal(drawn_next)
    torch.manual_seed(0)
    assert drawn.equal(data.batch(range(6))[0])
    state = torch.get_rng_state()
    assert data.plain().batch([4], [9])[0].equal(data.plain().batch([4])[0])
    assert torch.get_rng_state().equal(state)  # without augmentation nothing is drawn


def test_more_than_memory_allows_is_refused_before_decoding() -> None:
    with pytest.raises(RecastError, match=r"big\.zip: 100,000,000 images of 224 pixels a side need"):
        ImageFiles(torch.zeros(100_000_000), 224, [], where="big.zip:").decoded(skip=False)


def stored(sizes: list[tuple[int, int]]) -> ImageFiles:
    """Return pictures (width, height) of noise."""
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]
    return ImageFiles(torch.arange(len(sizes)), 40, range(len(sizes)), pictures.__getitem__)


@pytest.mark.parametrize("size", [(8, 8), (20, 12)])
@pytest.mark.parametrize("augment", [None, SHIFTED, Augmentation(crop="random", auto_augment="rand-m9")])
@pytest.mark.parametrize("crop_pct", [None, 0.8])
def test_images_kept_at_their_own_size_have_the_same_pixels(
    size: tuple[int, int], augment: Augmentation | None, crop_pct: float | None
) -> None:
    files = replace(stored([size] * 6), augment=augment, crop_pct=crop_pct)
    small, whole = (files.decoded(False, as_stored)[0] for as_stored in (True, False))
    assert isinstance(small, SmallImages)
    assert small.pixels.shape == (6, 3, *size[::-1])
    for ours, theirs in ((small, whole), (small.subset(torch.tensor([4, 1])), whole.subset(torch.tensor([4, 1])))):
        indices, seeds = range(len(ours)), list(range(len(ours)))
        assert ours.img_size == 40
        assert ours.batch(indices, seeds)[0].equal(theirs.batch(indices, seeds)[0])
        assert ours.batch([])[0].shape == theirs.batch([])[0].shape
        assert np.array_equal(ours.open(1), theirs.open(1))


@pytest.mark.parametrize("sizes", [[(8, 8), (9, 8)], [(40, 40)] * 2, [(50, 60)] * 2])
def test_images_of_several_sizes_and_large_ones_are_resized_once(sizes: list[tuple[int, int]]) -> None:
    small, _ = stored(sizes).decoded(False, as_stored=True)
    assert type(small) is ImageTensors
    assert small.pixels.equal(stored(sizes).decoded(False)[0].pixels)


def test_many_images_are_kept_at_their_own_size_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = RawData("small", stored([(8, 8)] * 6), stored([(8, 8)] * 4), [*"abcdef"], in_memory=True)
    args = DataConfig(img_size=40), None, raw, Recipe().grouping, None
    assert type(sources.assemble(*args).train) is ImageTensors
    monkeypatch.setattr(sources, "MOST_RESIZED", 10 * 3 * 40**2 - 1)
    with pytest.warns(UserWarning, match="small is kept in memory at its own size .* resized when read"):
        data = sources.assemble(*args)
    assert isinstance(data.train, SmallImages)
    assert isinstance(data.val, SmallImages)
    assert data.img_size == data.test_size == 40


LABELS = torch.tensor([0] * 50 + [1] * 7 + [2] * 20)[torch.randperm(77, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(("count", "expected"), [(3, [1, 1, 1]), (21, [7, 7, 7]), (30, [12, 7, 11]), (77, [50, 7, 20])])
def test_subsets_are_balanced_as_far_as_classes_go(count: int, expected: list[int]) -> None:
    counts = LABELS[choose_balanced(LABELS, count, "num_train")].bincount(minlength=3)
    assert counts[1] == expected[1]
    assert (counts - torch.tensor(expected)).abs().max() <= 1  # who gets the remainder is drawn
    assert counts.sum() == count


def test_subsets_are_nested_seeded_and_without_repetition() -> None:
    order = balanced_order(LABELS)
    assert order.sort().values.equal(torch.arange(77))
    assert set(choose_balanced(LABELS, 10, "n").tolist()) < set(choose_balanced(LABELS, 11, "n").tolist())
    assert order.equal(balanced_order(LABELS))
    assert not order.equal(balanced_order(LABELS, seed=1))
    for count in (0, 78):
        with pytest.raises(RecastError, match=f"num_val must be between 1 and 77 .* got {count}"):
            choose_balanced(LABELS, count, "num_val")


def test_fraction_is_of_every_class_nested_and_at_least_one() -> None:
    assert LABELS[choose_fraction(LABELS, 0.1)].bincount().tolist() == [5, 1, 2]
    assert LABELS[choose_fraction(LABELS, 0.001)].bincount().tolist() == [1, 1, 1]
    assert choose_fraction(LABELS, 1.0).equal(torch.arange(77))
    small, large = choose_fraction(LABELS, 0.2), choose_fraction(LABELS, 0.5)
    assert set(small.tolist()) < set(large.tolist())
    assert small.equal(small.sort().values)
    train, val = hold_out(LABELS, 0.1)
    assert torch.cat([train, val]).sort().values.equal(torch.arange(77))
    assert LABELS[val].bincount().tolist() == [5, 1, 2]
    assert 0 in hold_out(torch.tensor([0, 1, 1]), 0.5)[0]  # a single image goes to training


def test_stratified_subsets_have_the_shares_of_all_images() -> None:
    rare = torch.tensor([0] * 95 + [1] * 5).repeat(10)
    for count in (20, 100, 500, 1000):
        chosen = choose_stratified(rare, count, "n")
        assert abs(int(rare[chosen].sum()) - 0.05 * count) <= 1
        assert len(chosen.unique()) == count
    assert set(choose_stratified(rare, 20, "n").tolist()) < set(choose_stratified(rare, 21, "n").tolist())
    equal = torch.arange(10).repeat(30)
    assert all(choose_stratified(equal, n, "n").equal(choose_balanced(equal, n, "n")) for n in (3, 25, 300))
    with pytest.raises(RecastError, match="num_val must be between 1"):
        choose_stratified(rare, 1001, "num_val")


def test_balanced_epochs() -> None:
    labels = torch.tensor([0] * 70 + [1] * 7 + [2] * 23)
    order = balanced_epoch(labels, 3, 5)
    assert order.equal(balanced_epoch(labels, 3, 5))
    assert not order.equal(balanced_epoch(labels, 3, 6))
    assert sorted(labels[order].bincount().tolist()) == [33, 33, 34]
    times = order.bincount(minlength=100)
    for label, (least, most) in enumerate([(0, 1), (4, 5), (1, 2)]):  # in turns
        assert set(times[labels == label].tolist()) <= {least, most}
    assert torch.cat([balanced_epoch(labels, 3, epoch) for epoch in range(24)]).bincount(minlength=100).min() > 0
    twice = balanced_epoch(labels, 3, 5, repeats=2)
    assert len(twice) == 100
    assert twice[::2].equal(twice[1::2])
    assert sorted(labels[twice].bincount().tolist()) == [32, 34, 34]
    assert len(balanced_epoch(torch.zeros(5, dtype=torch.long), 0, 0)) == 5


def make_files(folder: Path, count: int, broken: tuple[int, ...] = ()) -> ImageFiles:
    """Image i is grey level 10 i; its label is i."""
    paths = [folder / f"{index}.png" for index in range(count)]
    for index, path in enumerate(paths):
        if index in broken:
            path.write_bytes(b"broken")
        else:
            Image.new("RGB", (8, 8), (10 * index,) * 3).save(path)
    return ImageFiles(torch.arange(count), 8, [str(path) for path in paths])


def epoch_of(data: LabelledImages, batch_size: int, parts: int = 1, **options: Any) -> tuple[Tensor, list[int]]:
    """Return all images and labels of an epoch in its order, put together from the shares of all parts."""
    rows = {}
    for part in range(parts):
        for batch, share in enumerate(Loader(data, batch_size, part=part, parts=parts, **options)):
            for place, (image, label) in enumerate(zip(*share, strict=True)):
                rows[batch, place, part] = image, int(label)
    images, labels = zip(*(row for _, row in sorted(rows.items())), strict=True)
    return torch.stack(images), list(labels)


def test_every_image_once_and_the_last_batch_is_kept_or_dropped() -> None:
    sizes = [len(labels) for _, labels in Loader(make_data(), 5, shuffle_seed=1)]
    assert sizes == [5, 5, 5, 5, 3]
    assert epoch_of(make_data(), 5)[1] == list(range(23))
    images, labels = epoch_of(make_data(), 5, shuffle_seed=1)
    assert labels != sorted(labels) == list(range(23))
    options = {"shuffle_seed": 1, "drop_last": True, "start": 1}
    assert len(Loader(make_data(), 5, **options)) == 3
    fewer_images, fewer_labels = epoch_of(make_data(), 5, **options)
    assert fewer_images.equal(images[5:20])
    assert fewer_labels == labels[5:20]


@pytest.mark.parametrize("augment", [SHIFTED, POLICY])
def test_order_and_augmentation_follow_seed_and_epoch_only(augment: Augmentation) -> None:
    data = make_data(augment=augment)
    images, labels = epoch_of(data, 5, shuffle_seed=1, epoch=2)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert epoch_of(data, 5, shuffle_seed=1, epoch=2)[0].equal(images)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected  # the global generators are left alone
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        assert epoch_of(data, 5, shuffle_seed=seed, epoch=epoch)[1] != labels
    # In the order of the data, only the augmentation is left to differ.
    assert not epoch_of(data, 5)[0].equal(epoch_of(data, 5, epoch=1)[0])


@pytest.mark.parametrize("augment", [SHIFTED, POLICY])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 23},
        {"batch_size": 5, "start": 2},
        {"batch_size": 5, "start": 2, "workers": 2},
        {"batch_size": 7, "parts": 3},
        {"batch_size": 4, "parts": 3, "workers": 1},
    ],
    ids=str,
)
def test_pixels_do_not_depend_on_batch_size_start_workers_and_parts(
    augment: Augmentation, options: dict[str, Any]
) -> None:
    data = make_data(augment=augment)
    images, labels = epoch_of(data, 5, shuffle_seed=1, epoch=2)
    rest_images, rest_labels = epoch_of(data, shuffle_seed=1, epoch=2, **options)
    start = 5 * options.get("start", 0)
    assert rest_labels == labels[start:]
    assert rest_images.equal(images[start:])


def test_there_are_at_most_as_many_loader_processes_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epoch_of(make_data(), 5, workers=2)[0].equal(epoch_of(make_data(), 5)[0])


def test_repeated_augmentation_shows_fewer_images_more_often() -> None:
    order, once = epoch_order(23, 4, 2, repeats=3).tolist(), epoch_order(23, 4, 2).tolist()
    assert order == [index for index in once for _ in range(3)][:23]
    assert len(set(order)) == 8
    data = make_data()
    images, labels = epoch_of(data, 6, shuffle_seed=4, epoch=2, repeats=3)
    assert labels == order
    assert not images[0].equal(images[1]) or not images[1].equal(images[2])  # each copy is augmented for itself
    assert epoch_of(data, 4, parts=2, shuffle_seed=4, epoch=2, repeats=3)[0].equal(images)


@pytest.mark.parametrize("data", [make_data(), make_data(augment=None)], ids=["augmented", "plain"])
def test_views_are_of_the_same_images_each_augmented_anew(data: ImageTensors) -> None:
    single, several = (list(Loader(images, 6, shuffle_seed=4, epoch=2)) for images in (data, ManyViews(data, 3)))
    shares = [list(Loader(ManyViews(data, 3), 6, shuffle_seed=4, epoch=2, part=part, parts=2)) for part in range(2)]
    for batch, (images, labels) in enumerate(several):
        assert images.shape[1:] == (3, 3, 8, 8)
        assert labels.equal(single[batch][1])
        assert images[:, 0].equal(single[batch][0])
        assert images[:, 1].equal(images[:, 2]) == (data.augment is None)
        for part in range(2):
            assert images[part::2].equal(shares[part][batch][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_named_replaced_by_the_next_one_or_left_out(tmp_path: Path, workers: int) -> None:
    data = make_files(tmp_path, 9, broken=(3, 7, 8))
    with pytest.raises(RecastError, match=r"cannot read image .*3\.png") as caught:
        list(Loader(data, 2, workers=workers))
    assert "\n" not in str(caught.value)
    order = epoch_order(9, 5, 0).tolist()
    source = Loader(data, 4, shuffle_seed=5, workers=workers, bad_image="skip")
    images, labels = (torch.cat(values) for values in zip(*source, strict=True))
    assert labels.tolist() == [{3: 4, 7: 0, 8: 0}.get(index, index) for index in order]
    assert images[:, 0, 0, 0].long().equal(10 * labels)
    assert sorted(source.bad_images) == [data.items[index] for index in (3, 7, 8)]
    assert epoch_of(data, 3, parts=2, shuffle_seed=5, bad_image="skip")[1] == labels.tolist()
    source = Loader(data, 2, workers=workers, bad_image="skip")  # evaluation
    assert [labels.tolist() for _, labels in source] == [[0, 1], [2], [4, 5], [6]]
    assert source.bad_images == [data.items[index] for index in (3, 7, 8)]


def test_a_disk_that_is_gone_is_not_skipped(tmp_path: Path) -> None:
    data = make_files(tmp_path, 3, broken=(0, 1, 2))
    with pytest.raises(RecastError, match=r"3 images in a row cannot be read; the last: .*\.png"):
        list(Loader(data, 3, shuffle_seed=0, bad_image="skip"))
    with pytest.raises(RecastError, match=r"no image could be read; the first is .*0\.png"):
        list(Loader(data, 2, bad_image="skip"))


class Dying(ImageTensors):
    """Ends the process that asks for its third item."""

    def __init__(self, end: Callable[[], object]) -> None:
        super().__init__(torch.zeros(6, 3, 2, 2, dtype=torch.uint8), torch.arange(6))
        self.end, self.pid = end, os.getpid()

    def load(self, indices: Any, seeds: Any = None) -> tuple[Tensor, Tensor]:
        if 2 in indices:
            assert os.getpid() != self.pid
            self.end()
        return super().load(indices, seeds)


# torch's signal handler raises wherever the main process happens to be: what multiprocessing (a socket) or torch's
# search for the dead (a temporary file) had just opened is closed by the collector, or the handler interrupts that.
@pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning",
    "ignore:unclosed file:ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
)
@pytest.mark.parametrize(
    ("end", "how"),
    [(lambda: os._exit(3), "exit code 3"), (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal: Killed")],
    ids=["exit", "kill"],
)
def test_a_dead_loader_process_is_explained(end: Callable[[], object], how: str) -> None:
    for _ in range(3):  # who sees it first, torch's signal handler or its queue, is a race
        message = rf"process died \(.*({how}|exited unexpectedly|Connection).* memory.*--workers 0"
        with pytest.raises(RecastError, match=message) as caught:
            list(Loader(Dying(end), 1, workers=1))
        assert "\n" not in str(caught.value)
        del caught
        gc.collect()  # here, while the warnings above are expected


def test_balanced_batches_do_not_depend_on_start_and_parts() -> None:
    data = load_data(DataConfig())
    data = replace(data, train=data.train.subset(torch.arange(len(data.train))[data.train.labels < 3][:200]))
    task = ClassifyConfig(sampler="balanced")
    options = {**task_named("classify").loading(task, data), "batch_size": 32, "shuffle_seed": 4, "drop_last": True}
    batches = [labels for _, labels in Loader(**options)]
    assert len(batches) == 6
    assert torch.cat(batches).bincount().float().std() < 5
    assert next(iter(Loader(**options, start=4)))[1].equal(batches[4])
    assert next(iter(Loader(**options, part=1, parts=2)))[1].equal(batches[0][1::2])
    assert task_named("classify").loading(ClassifyConfig(), data)["balanced"] is False
