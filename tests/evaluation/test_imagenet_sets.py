import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import Tensor, nn

from recast.lab.data import Data
from recast.lab.data.datasets import ImageFiles
from recast.lab.evaluation import Options
from recast.lab.evaluation.context import Context, NotMeasured
from recast.lab.evaluation.imagenet_corruptions import ALEXNET_ERRORS, KINDS
from recast.lab.evaluation.imagenet_sets import SETS, imagenet_wnids, outputs_of, real_labels, sources_imagenet_c
from recast.lab.evaluation.runner import open_context
from recast.lab.evaluation.suites import CATEGORIES, SEVERITIES

INFO = ImageNetInfo("imagenet-1k")
NAMES = [INFO.index_to_description(index) for index in range(1000)]


def encode(index: int) -> tuple[int, int, int]:
    """A colour that tells ImageNet's label."""
    return index // 100 * 20, index // 10 % 10 * 20, index % 10 * 20


class Decode(nn.Module):
    """Knows ImageNet's label from the colour; the next largest logits are of its neighbours, `loud` is above all."""

    def __init__(self, outputs: Sequence[int] = range(1000), loud: int | None = None) -> None:
        super().__init__()
        self.outputs, self.loud = torch.tensor(outputs), loud

    def forward(self, x: Tensor) -> Tensor:
        label = (255 * x.mean((2, 3)) / 20).round() @ torch.tensor([100.0, 10.0, 1.0])
        logits = torch.zeros(len(x), len(self.outputs))
        logits[:, self.outputs] = -(torch.arange(len(self.outputs)) - label[:, None]).abs()
        if self.loud is not None:
            logits[:, self.loud] = 1
        return logits


def named(digits: Data, classes: list[str] = NAMES) -> Data:
    """Data of these classes whose pixels are not normalised."""
    return replace(digits, classes=classes, mean=(0.0,) * 3, std=(1.0,) * 3)


def context(data: Data, root: Path | None = None) -> Context:
    return open_context({"m": nn.Identity()}, data, options=Options(sets=root))


def make_set(root: Path, folders: dict[str, int]) -> Path:
    """Two images in each class folder; {folder: ImageNet's label}."""
    for name, label in folders.items():
        (root / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (18, 16), encode(label)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for short in ("a", "r"):
        wnids = imagenet_wnids(f"imagenet_{short}")
        make_set(folder / f"ImageNet-{short.upper()}", {wnid: imagenet_wnids().index(wnid) for wnid in wnids})
    make_set(folder / "imagenetv2-matched-frequency-format-val", {str(label): label for label in range(1000)})
    return folder


@pytest.mark.parametrize("suite", ["imagenet-a", "imagenet-r"])
def test_only_the_200_classes_count(suite: str, sets: Path, digits: Data, score: Any) -> None:
    wnids = set(imagenet_wnids(SETS[suite][0]))
    assert len(wnids) == 200
    outside = next(index for index, wnid in enumerate(imagenet_wnids()) if wnid not in wnids)
    inside = imagenet_wnids().index(sorted(wnids)[7])
    for loud, right in ((outside, 400), (inside, 2)):
        scores = score(suite, Decode(loud=loud), named(digits), 64, sets=sets)
        assert (scores["top1"].sum(), scores["top5"].sum(), scores["top1"].size) == (right, 400, 400)


def test_classes_named_by_wnid_may_have_any_order(sets: Path, digits: Data, score: Any) -> None:
    data = named(digits, sorted(imagenet_wnids(), key=lambda wnid: wnid[::-1]))
    outputs = [data.classes.index(wnid) for wnid in imagenet_wnids()]
    assert score("imagenet-r", Decode(outputs), data, 64, sets=sets)["top1"].sum() == 400
    # a model that takes the order for ImageNet's is wrong
    assert score("imagenet-r", Decode(), data, 64, sets=sets)["top1"].sum() < 40


def test_v2_is_not_in_the_order_of_its_folders(sets: Path, digits: Data, score: Any) -> None:
    data = replace(named(digits), val=digits.train)
    assert score("imagenet-v2", Decode(), data, 64, sets=sets, num_images=200)["top1"].tolist() == [[1]] * 200
    data = named(digits, [str(index) for index in range(1000)])
    assert score("imagenet-v2", Decode(), data, 64, sets=sets)["top1"].tolist() == [[1]] * 2000


def test_wrong_class_order_is_told_by_names(digits: Data) -> None:
    for classes in (NAMES[::-1], [NAMES[1], NAMES[0], *NAMES[2:]], list(imagenet_wnids()[:100])):
        with pytest.raises(NotMeasured):
            outputs_of(named(digits, classes), imagenet_wnids(), "imagenet-a")
    short_names = ["crane bird" if index == 134 else name.split(", ")[-1] for index, name in enumerate(NAMES)]
    assert outputs_of(named(digits, short_names), imagenet_wnids()[3:5], "imagenet-a").tolist() == [3, 4]


@pytest.mark.parametrize("suite", [*SETS, "imagenet-real"])
def test_missing_sets_and_other_classes(suite: str, tmp_path: Path, digits: Data, score: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("RECAST_DATA", str(tmp_path))
    for data in (digits, named(digits)):
        with pytest.raises(NotMeasured, match=suite):
            score(suite, Decode(), data)


def test_real_counts_any_of_an_images_labels(tmp_path: Path, digits: Data, score: Any) -> None:
    labels = list(real_labels().values())
    assert len(labels) == 50_000
    assert sum(not each for each in labels) == 3_163
    unlabelled, single, several = ([i for i, each in enumerate(labels) if len(each) == count] for count in (0, 1, 2))
    shown = [(index, labels[index][-1]) for index in several[:4]]
    shown += [(unlabelled[0], 0), (single[0], labels[single[0]][0] + 2), (single[3], labels[single[3]][0] + 500)]
    paths = [tmp_path / f"ILSVRC2012_val_{index + 1:08d}.JPEG" for index, _ in shown]
    for path, (_, label) in zip(paths, shown, strict=True):
        Image.new("RGB", (16, 16), encode(label % 1000)).save(path, "PNG")
    images = ImageFiles(torch.zeros(len(paths), dtype=torch.long), 16, list(map(str, paths)))
    scores = score("imagenet-real", Decode(), replace(named(digits), val=images))
    assert scores["top1"][:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    assert scores["top5"][:, 0].tolist() == [1, 1, 1, 1, 1, 0]


WNIDS = [f"n{number:08d}" for number in (5, 7, 9)]


def make_imagenet_c(root: Path, by_category: bool) -> Path:
    """Every image has a shade that tells its class, number and severity."""
    kinds = [(category if by_category else ".", kind) for category, kinds in CATEGORIES.items() for kind in kinds]
    for (category, kind), severity, (label, wnid) in product(kinds, SEVERITIES, enumerate(WNIDS)):
        folder = root / category / kind / str(severity) / wnid
        folder.mkdir(parents=True)
        for number in range(2):
            image = Image.new("RGB", (20, 20), (80 * label + severity + 40 * number,) * 3)
            image.save(folder / f"val_{label}{number}.png")
    return root


@pytest.fixture(scope="module", params=["ImageNet-C", "imagenet-c"])
def corrupted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    make_imagenet_c(folder / request.param, by_category=request.param == "imagenet-c")
    return folder


@pytest.fixture
def three(digits: Data, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Data with three classes of the set in another order."""
    monkeypatch.setattr("recast.lab.evaluation.imagenet_sets.imagenet_wnids", lambda: tuple(WNIDS))
    return named(digits, [WNIDS[1], WNIDS[2], WNIDS[0]])


class Shades(nn.Module):
    """Knows the shades of the classes, except that class 2 is never told."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == (20, 20)
        label = (255 * x[:, 0, 0, 0] / 80).floor().clamp(max=1).long()
        return nn.functional.one_hot(torch.tensor([2, 0, 1])[label], 3).float()


def test_both_layouts_unresized_and_by_name(corrupted: Path, three: Data, score: Any) -> None:
    scores = score("imagenet-c", Shades(), three, 4, sets=corrupted)
    assert scores["top1/frost/2"].mean() == pytest.approx(4 / 6)
    assert scores["top1/mean"].mean() == pytest.approx(4 / 6)
    assert scores["top1/blur"][:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    expected = np.mean([(1 / 3) / error for error in ALEXNET_ERRORS.values()])
    assert scores["mce"].mean() == pytest.approx(expected)
    part = score("imagenet-c", Shades(), three, 4, sets=corrupted, num_images=3)
    assert part["top1/mean"][:, 0].tolist() == [1, 1, 0]


def test_the_images_are_those_of_their_folder(corrupted: Path, three: Data) -> None:
    sources = sources_imagenet_c(context(three, corrupted))
    assert [source.part for source in sources] == [f"{kind}/{severity}" for kind in KINDS for severity in SEVERITIES]
    for source in sources:
        images, labels = source.images.batch([0, 3, 4])
        severity = int(source.part[-1])
        assert (255 * images[:, 0, 5, 5]).round().tolist() == [severity, 120 + severity, 160 + severity]
        assert labels.tolist() == [2, 0, 1]  # outputs of the model


def test_everything_that_is_missing_is_in_one_error(tmp_path: Path, three: Data) -> None:
    root = make_imagenet_c(tmp_path / "imagenet-c", by_category=False)
    for missing in ("snow", "fog/2", "fog/4", f"pixelate/5/{WNIDS[2]}"):
        shutil.rmtree(root / missing)
    with pytest.raises(NotMeasured, match=f"snow/1.*fog/2, fog/4.*pixelate/5.*{WNIDS[2]}"):
        sources_imagenet_c(context(three, tmp_path))


def test_missing_and_unknown_class_folders_are_listed(tmp_path: Path, digits: Data, score: Any) -> None:
    wnids = sorted(imagenet_wnids("imagenet_a"))
    make_set(tmp_path / "imagenet-a", {wnid: 5 for wnid in wnids[7:]} | {"extra": 0})
    with pytest.raises(NotMeasured, match=f"7 missing: {wnids[0]}, .*extra"):
        score("imagenet-a", Decode(), named(digits), sets=tmp_path)
