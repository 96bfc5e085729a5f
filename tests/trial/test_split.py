"""The tail on the trunk's features is the network, for every kind of network; what cannot be split is refused."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import DenseNet, get_model

import recast
from recast.lab.trial.split import split


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("resnet10t", "layer4.0"),
        ("convnext_atto", "stages.3.downsample.1"),
        ("mobilenetv3_small_050", "blocks.4.0.conv_dw"),
        ("densenet", "features.denseblock4"),
        ("squeezenet1_1", "features.9.squeeze_activation"),
        ("digits_resnet", "layer3.0"),
    ],
)
def test_the_tail_of_the_features_is_the_network(name: str, entry: str) -> None:
    torch.manual_seed(0)
    if name == "densenet":
        model: nn.Module = DenseNet(8, (2, 2, 2, 2), 16, num_classes=5).eval()
    else:
        model = (timm.create_model if timm.is_model(name) else get_model)(name, num_classes=5).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # that differ from what an untrained one does
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    images = torch.randn(2, 3, 64, 64)
    layers = [step.name for step in recast.plan(model, images[:1]).steps]
    parts = split(model, layers, images)
    assert parts.tail.entry == entry
    others = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(parts.tail.eval()(parts.features(others)), model(others), rtol=1e-5, atol=1e-6)
    own, every = (sum(p.numel() for p in module.parameters()) for module in (parts.tail, model))
    assert own < every
    assert not {id(p) for p in parts.tail.parameters()} & {id(p) for p in model.parameters()}


class Skip(nn.Module):
    """The trunk's map passes the last stage by."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(torch.cat([x.mean((2, 3)), self.stage(x).mean((2, 3))], 1))


class Auxiliary(nn.Module):
    """A second classifier, on the trunk, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
        self.between, self.head, self.aux = nn.Conv2d(4, 4, 1), nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        logits = self.head(self.stage(self.between(x)).mean((2, 3)))
        return (logits, self.aux(x.mean((2, 3)))) if self.training else logits


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        (Skip, "stage", "Skip cannot be split"),
        (Auxiliary, "stage", "cannot be split"),
        (Auxiliary, "aux", "not called"),
    ],
)
def test_what_cannot_be_split_is_refused(model: type[nn.Module], layer: str, message: str) -> None:
    with pytest.raises(recast.RecastError, match=message):
        split(model().eval(), [layer], torch.randn(4, 3, 8, 8))


def test_the_tail_can_be_recast_and_split_again() -> None:
    torch.manual_seed(0)
    model, images = timm.create_model("digits_resnet").eval(), torch.randn(3, 3, 32, 32)
    plan = recast.plan(model, images[:1])
    parts = split(model, [step.name for step in plan.steps], images)
    with torch.no_grad():
        features = parts.features(images)
        recast.recast_(parts.tail.network, plan)
        torch.testing.assert_close(parts.tail.eval()(features), model(images), rtol=1e-5, atol=1e-6)
        again = split(parts.tail, ["network.fc"], features)
        assert again.tail.entry == "network.fc"
        torch.testing.assert_close(again.tail.eval()(again.features(features)), model(images), rtol=1e-5, atol=1e-6)
