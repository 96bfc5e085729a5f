import pytest
import torch
from torch import nn

import recast
from recast.lab.config import DataConfig
from recast.lab.data import Data, load_data
from recast.lab.data.class_order import name_other_classes, order_classes_
from recast.layers.attention_pool import AttentionPool
from recast.models.build import Images, class_names

pytest.importorskip("sklearn")


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
    assert name_other_classes(network, data) == ""


def test_a_classifier_without_a_row_a_class_is_refused(data: Data) -> None:
    for layers in ((AttentionPool(8, num_classes=10), nn.Linear(8, 10)), (nn.LazyBatchNorm1d(10), nn.Linear(8, 11))):
        with pytest.raises(recast.RecastError):
            order_classes_(stating(data.classes[::-1], *layers), data)


def test_other_names_are_named_and_left_alone(data: Data) -> None:
    network = stating(["cat", "dog", *data.classes[2:]], nn.Linear(8, 10))
    before = network[0].weight.clone()  # type: ignore[index]
    assert name_other_classes(network, data) == (
        "the network has the classes cat, dog, 2, 3, 4 and 5 more, the data 0, 1, 2, 3, 4 and 5 more"
    )
    assert torch.equal(order_classes_(network, data)[0].weight, before)  # type: ignore[index]
    assert name_other_classes(nn.Linear(8, 10), data) == ""
