import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from recast.errors import RecastError
from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.data.class_order import name_other_classes, order_classes_
from recast.layers.attention_pool import AttentionPool
from recast.models.build import Images, class_names
from recast.papers.grafit.coarse import CIFAR100, read_mapping
from recast.papers.grafit.config import GrafitConfig


@pytest.fixture(scope="module")
def data() -> Data:
    return load_data(DataConfig("digits", num_train=60, num_val=40))


def stating(names: list[str], *layers: nn.Module) -> nn.Module:
    return Images(tuple(names)).note_(nn.Sequential(*layers))


def test_outputs_get_the_order_of_the_data(data: Data) -> None:
    network = stating(data.classes[::-1], nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 10))
    logits = network(images := torch.randn(5, 8))
    with pytest.warns(UserWarning, match="another order"):
        order_classes_(network, data)
    assert torch.equal(network(images), logits.flip(1))
    assert class_names(order_classes_(network, data)) == tuple(data.classes)  # no second time


def test_a_classifier_without_a_row_a_class_is_refused(data: Data) -> None:
    for layers in ((AttentionPool(8, num_classes=10), nn.Linear(8, 10)), (nn.LazyBatchNorm1d(10), nn.Linear(8, 11))):
        with pytest.raises(RecastError):
            order_classes_(stating(data.classes[::-1], *layers), data)


def test_other_names_are_named_and_left_alone(data: Data) -> None:
    network = stating(["cat", "dog", *data.classes[2:]], nn.Linear(8, 10))
    assert name_other_classes(network, data).endswith("cat, dog, 2, 3, 4 and 5 more, the data 0, 1, 2, 3, 4 and 5 more")
    before = copy.deepcopy(network)
    assert torch.equal(order_classes_(network, data)[0].weight, before[0].weight)  # type: ignore[index]
    assert name_other_classes(nn.Linear(8, 10), data) == ""


def test_the_superclasses_of_cifar100() -> None:
    """20 of 5 each; numbers as in the published files: coarse_label_names is sorted, and fine 0 (apple) is in 4."""
    assert [len(names.split()) for names in CIFAR100.values()] == [5] * 20
    fine = sorted(name for names in CIFAR100.values() for name in names.split())
    assert list(CIFAR100) == sorted(CIFAR100)
    assert len(set(fine)) == 100
    coarse = GrafitConfig().groups("cifar100", fine)
    assert coarse is not None
    # coarse labels of the first twenty fine ones in Krizhevsky's files
    assert coarse.of[:20].tolist() == [4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11]
    assert coarse.of.bincount().tolist() == [5] * 20
    assert GrafitConfig().groups("hfds/uoft-cs/cifar100", fine) is not None
    assert GrafitConfig().groups("folder", fine) is None
    assert GrafitConfig("coarse").groups("folder", fine) is not None


def test_coarse_and_fine_labels_are_of_the_same_images(tmp_path: Path) -> None:
    mapping = tmp_path / "parity.csv"
    lines = [f"{digit},{'odd' if digit % 2 else 'even'}" for digit in range(11)]  # the data have no 10
    mapping.write_text("\n".join(["fine,coarse", *lines]), encoding="utf-8")
    config = DataConfig("digits", img_size=8, num_train=50, num_val=20)
    fine, coarse = (load_data(config, None, GrafitConfig(labels, str(mapping))) for labels in ("fine", "coarse"))
    assert (coarse.classes, coarse.groups) == (["even", "odd"], None)
    assert fine.groups is not None
    assert fine.groups.of.tolist() == [0, 1] * 5
    for part, twin in ((fine.train, coarse.train), (fine.val, coarse.val)):
        assert part.plain().batch(range(20))[0].equal(twin.plain().batch(range(20))[0])
        assert twin.labels.equal(part.labels % 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fine,coarse\na,x\nb,x\na,y\n", "class 'a' is in 'x' and in 'y', expected one"),
        ("fine,coarse\na,\n", "class 'a' has no coarse name"),
        ("fine,fine,coarse\na,b,x\n", "columns fine and coarse"),
        ("fine,coarse\na,x,y\n", "line 2: expected 2 cells"),
    ],
)
def test_bad_files_of_coarse_classes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "map.csv").write_text(text, encoding="utf-8")
    with pytest.raises(RecastError, match=message):
        read_mapping(str(tmp_path / "map.csv"))


NAME = "0001_Animalia_Chordata_{}_Passeriformes_Corvidae_Corvus_corax"


def test_ranks_of_inaturalist() -> None:
    ravens = NAME.format("Aves")
    coarse = GrafitConfig(rank="genus").groups("torch/inaturalist", [ravens, ravens.replace("Corvus", "Pica")])
    assert coarse is not None
    names = [f"Animalia_Chordata_Aves_Passeriformes_Corvidae_{genus}" for genus in ("Corvus", "Pica")]
    assert (coarse.names, coarse.of.tolist()) == (names, [0, 1])


@pytest.mark.parametrize(
    ("data", "fields", "classes", "message"),
    [
        ("digits", {"labels": "coarse"}, ["0"], "digits has no coarse classes"),
        ("cifar100", {"labels": "coarse"}, ["apple", "pie"], "cifar100 has no coarse classes"),
        ("digits", {"coarse_file": "a", "rank": "genus"}, ["0"], "drop one of them"),
        ("digits", {"coarse_file": "absent.csv"}, ["0"], "no such file: absent.csv"),
        ("digits", {"rank": "genus"}, ["7"], "requires iNaturalist's class names, .* got '7'"),
        ("torch/inaturalist", {"rank": "class"}, [NAME.format("")], "rank=class requires iNaturalist's class names"),
    ],
)
def test_what_has_no_coarse_classes(data: str, fields: dict[str, str], classes: list[str], message: str) -> None:
    with pytest.raises(RecastError, match=message):
        GrafitConfig(**fields).groups(data, classes)
