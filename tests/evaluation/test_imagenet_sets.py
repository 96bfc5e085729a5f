from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor, nn

from recast.data import Data
from recast.data.datasets import ImageFiles
from recast.errors import RecastError
from recast.evaluation.bench import Bench, NotMeasured, Options, PixelModel, Suite
from recast.evaluation.imagenet_real import real_labels, score_real, sources_real
from recast.evaluation.imagenet_sets import SETS, imagenet_wnids, outputs_of, score_top, set_sources
from recast.evaluation.measuring import score_suites

INFO = ImageNetInfo("imagenet-1k")
NAMES = [INFO.index_to_description(index) for index in range(1000)]


def encode(index: int) -> tuple[int, int, int]:
    """A colour that tells ImageNet's label."""
    return index // 100 * 20, index // 10 % 10 * 20, index % 10 * 20


class Decode(nn.Module):
    """Knows ImageNet's label from the colour: its largest logit is that class's output, the next ones its neighbours'.

    `loud`: an output that is larger than all the others.
    """

    def __init__(self, outputs: list[int], loud: int | None = None) -> None:
        super().__init__()
        self.outputs, self.loud = torch.tensor(outputs), loud

    def forward(self, x: Tensor) -> Tensor:
        digits = (255 * x.mean((2, 3)) / 20).round()
        label = (digits * torch.tensor([100, 10, 1])).sum(1).long()
        logits = torch.zeros(len(x), len(self.outputs))
        logits[:, self.outputs] = -(torch.arange(len(self.outputs)) - label[:, None]).abs().float()
        if self.loud is not None:
            logits[:, self.loud] = 1
        return logits


def make_bench(digits: Data, root: Path | None, classes: list[str], model: nn.Module, **options: int) -> Bench:
    data = replace(digits, classes=classes, mean=(0.0,) * 3, std=(1.0,) * 3)
    models = {"m": PixelModel(model, data.mean, data.std)}
    return Bench(models, data, 64, torch.device("cpu"), Options(sets=root, **options))  # type: ignore[arg-type]


def make_set(root: Path, folders: dict[str, int]) -> Path:
    """Two images in each class folder; {folder: ImageNet's label}."""
    for name, label in folders.items():
        (root / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (18, 16), encode(label)).save(root / name / f"{number}.png")
    return root


def run(bench: Bench, suite: str) -> dict[str, list[float]]:
    found, missing = score_suites(bench, {suite: Suite(score_top, sources=set_sources(suite))})
    if missing:
        raise missing[0]
    assert found[suite].dataset == suite
    return {metric: values[:, 0].tolist() for metric, values in found[suite].scores["m"].items()}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    order = imagenet_wnids()
    for short in ("a", "r"):
        wnids = imagenet_wnids(f"imagenet_{short}")
        make_set(folder / f"ImageNet-{short.upper()}", {wnid: order.index(wnid) for wnid in wnids})
    make_set(folder / "imagenetv2-matched-frequency-format-val", {str(label): label for label in range(1000)})
    return folder


def test_what_timm_knows() -> None:
    assert list(imagenet_wnids()) == INFO.label_names()
    for short in ("a", "r"):
        wnids = imagenet_wnids(f"imagenet_{short}")
        assert len(set(wnids)) == 200
        assert set(wnids) < set(imagenet_wnids())
    assert imagenet_wnids().index(imagenet_wnids("imagenet_a")[0]) == 6  # stingray


@pytest.mark.parametrize("suite", ["imagenet-a", "imagenet-r"])
def test_only_the_200_classes_count(suite: str, sets: Path, digits: Data) -> None:
    wnids = set(imagenet_wnids(suite.replace("-", "_")))
    outside = next(index for index, wnid in enumerate(imagenet_wnids()) if wnid not in wnids)
    bench = make_bench(digits, sets, NAMES, Decode(list(range(1000)), loud=outside))
    found = run(bench, suite)
    assert found == {"top1": [1.0] * 400, "top5": [1.0] * 400}
    inside = imagenet_wnids().index(sorted(wnids)[7])
    bench = make_bench(digits, sets, NAMES, Decode(list(range(1000)), loud=inside))
    found = run(bench, suite)
    assert sum(found["top1"]) == 2
    assert sum(found["top5"]) == 400
    (source,) = set_sources(suite)(bench)
    assert source.columns is not None
    assert {imagenet_wnids()[column] for column in source.columns} == wnids


def test_classes_named_by_wnid_may_have_any_order(sets: Path, digits: Data) -> None:
    classes = sorted(imagenet_wnids(), key=lambda wnid: wnid[::-1])
    outputs = [classes.index(wnid) for wnid in imagenet_wnids()]
    assert sum(run(make_bench(digits, sets, classes, Decode(outputs)), "imagenet-r")["top1"]) == 400
    # a model that takes the order for ImageNet's is wrong
    assert sum(run(make_bench(digits, sets, classes, Decode(list(range(1000)))), "imagenet-r")["top1"]) < 40


def test_v2_is_not_in_the_order_of_its_folders(sets: Path, digits: Data) -> None:
    found = run(make_bench(digits, sets, NAMES, Decode(list(range(1000))), num_samples=1000), "imagenet-v2")
    assert found["top1"] == [1.0] * 1000
    found = run(
        make_bench(digits, sets, [str(index) for index in range(1000)], Decode(list(range(1000)))), "imagenet-v2"
    )
    assert found["top1"] == [1.0] * 2000


def test_images_are_prepared_as_the_datas_own(sets: Path, digits: Data) -> None:
    val = ImageFiles(torch.zeros(1, dtype=torch.long), 8, ["a.png"], crop_pct=0.5)
    bench = make_bench(replace(digits, val=val), sets, NAMES, Decode(list(range(1000))))
    (source,) = set_sources("imagenet-a")(bench)
    assert source.images.batch([0])[0].shape == (1, 3, 8, 8)
    assert source.images.crop_pct == 0.5  # type: ignore[attr-defined]


def test_wrong_class_order_is_told_by_names(digits: Data) -> None:
    swapped = [NAMES[-1 - index] for index in range(1000)]
    bench = make_bench(digits, None, swapped, Decode(list(range(1000))))
    with pytest.raises(
        RecastError, match=r"classes in their order, but \d+ of digits have other names: class 0 is .*'tench"
    ):
        outputs_of(bench, imagenet_wnids(), "imagenet-a")
    swapped = [NAMES[1], NAMES[0], *NAMES[2:]]
    with pytest.raises(RecastError, match="2 of digits have other names: class 0 is"):
        outputs_of(make_bench(digits, None, swapped, Decode(list(range(1000)))), imagenet_wnids(), "imagenet-a")
    few = ["crane bird" if index == 134 else name.split(", ")[-1] for index, name in enumerate(NAMES)]
    bench = make_bench(digits, None, few, Decode(list(range(1000))))
    assert outputs_of(bench, imagenet_wnids()[3:5], "imagenet-a").tolist() == [3, 4]


def test_other_classes_are_one_clear_error(sets: Path, digits: Data) -> None:
    for suite in SETS:
        with pytest.raises(NotMeasured, match=r"1000 classes, digits has 10: .*leave imagenet-.* out"):
            set_sources(suite)(make_bench(digits, sets, digits.classes, Decode([0])))
    some = list(imagenet_wnids()[:100])
    with pytest.raises(RecastError, match=r"none of the 100 of digits: n0\d+, .* \.\.\. \(\d+ in all\)"):
        set_sources("imagenet-a")(make_bench(digits, sets, some, Decode([0])))


def test_missing_sets_are_named_with_the_way_to_get_them(
    tmp_path: Path, digits: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECAST_DATA", raising=False)
    for suite, known in SETS.items():
        for root in (tmp_path, None):
            with pytest.raises(NotMeasured, match=known.where.split()[0].replace(".", r"\.")):
                set_sources(suite)(make_bench(digits, root, NAMES, Decode([0])))
    monkeypatch.setenv("RECAST_DATA", str(tmp_path))
    with pytest.raises(NotMeasured, match=f"no folder imagenet-a in {tmp_path}"):
        set_sources("imagenet-a")(make_bench(digits, None, NAMES, Decode([0])))


def test_missing_and_unknown_class_folders_are_listed(tmp_path: Path, digits: Data) -> None:
    wnids = sorted(imagenet_wnids("imagenet_a"))
    order = imagenet_wnids()
    root = make_set(tmp_path / "imagenet-a", {wnid: order.index(wnid) for wnid in wnids[7:]} | {"extra": 0})
    bench = make_bench(digits, tmp_path, NAMES, Decode([0]))
    with pytest.raises(NotMeasured) as raised:
        set_sources("imagenet-a")(bench)
    assert f"without the class folders {', '.join(wnids[:5])} ... (7 in all)" in str(raised.value)
    assert "none of its classes: extra" in str(raised.value)
    for image in [*(root / "extra").iterdir()]:
        image.unlink()
    (root / "extra").rmdir()
    make_set(root, {wnid: 0 for wnid in wnids[:7]})
    for image in (root / wnids[3]).iterdir():
        image.unlink()
    with pytest.raises(NotMeasured, match=f"class folder without an image: .*{wnids[3]}"):
        set_sources("imagenet-a")(bench)


def real_bench(digits: Data, root: Path, numbers: list[int], decode: Callable[[int], int]) -> Bench:
    """Images whose colour tells the label that `decode` gives for their number."""
    paths = []
    for number in numbers:
        path = root / f"ILSVRC2012_val_{number:08d}.JPEG"
        Image.new("RGB", (16, 16), encode(decode(number))).save(path, "PNG")
        paths.append(str(path))
    val = ImageFiles(torch.zeros(len(paths), dtype=torch.long), 16, paths)
    return make_bench(replace(digits, val=val), None, NAMES, Decode(list(range(1000))))


def test_real_counts_any_of_an_images_labels(tmp_path: Path, digits: Data) -> None:
    labels = real_labels()
    assert len(labels) == 50_000
    assert sum(not each for each in labels) == 3_163
    numbers = {count: [i + 1 for i, each in enumerate(labels) if len(each) == count][:4] for count in (0, 1, 2)}
    (none, _, _, _), (near, _, _, far), several = numbers.values()

    def shown(number: int) -> int:
        """The last of an image's labels, or one that is a little or far off."""
        off = {near: 2, far: 500}.get(number, 0)
        return (labels[number - 1][-1] + off) % 1000 if labels[number - 1] else 0

    bench = real_bench(digits, tmp_path, [*several, none, near, far], shown)
    found, _ = score_suites(bench, {"imagenet-real": Suite(score_real, sources=sources_real)})
    scores = found["imagenet-real"].scores["m"]
    assert scores["top1"][:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    assert scores["top5"][:, 0].tolist() == [1, 1, 1, 1, 1, 0]


def test_real_agrees_with_timm(tmp_path: Path, digits: Data) -> None:
    numbers = list(range(1, 41))
    bench = real_bench(digits, tmp_path, numbers, lambda n: n * 7)
    found, _ = score_suites(bench, {"imagenet-real": Suite(score_real, sources=sources_real)})
    labels = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 50_001)]
    timm = RealLabelsImagenet(labels)
    images, _ = bench.data.val.batch(range(40))
    timm.add_result(bench.logits("m", images))
    for k in (1, 5):
        assert 100 * found["imagenet-real"].scores["m"][f"top{k}"].mean() == pytest.approx(timm.get_accuracy(k))


def test_real_needs_imagenets_own_images(tmp_path: Path, digits: Data) -> None:
    with pytest.raises(NotMeasured, match=r"ILSVRC2012_val_00000001.JPEG and so on\), but digits has image 0"):
        sources_real(make_bench(digits, None, NAMES, Decode([0])))
    none = next(number for number in range(1, 50_001) if not real_labels()[number - 1])
    with pytest.raises(NotMeasured, match="none of the 1 images of digits has a label in ReaL"):
        sources_real(real_bench(digits, tmp_path, [none], lambda n: 0))
    bench = real_bench(digits, tmp_path, [1], lambda n: 0)
    with pytest.raises(RecastError, match="1000 classes, digits has 10"):
        sources_real(replace(bench, data=replace(bench.data, classes=digits.classes)))
