import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import DenseNet, get_model

import recast
from recast.lab.trial.split import split_network


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("resnet10t", "layer4.0"),
        ("convnext_atto", "stages.3.blocks.0"),
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
    parts = split_network(model, layers, images)
    assert parts.tail.entry == entry
    assert not parts.is_whole
    unseen = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(parts.tail.eval()(parts.features(unseen)), model(unseen), rtol=1e-5, atol=1e-6)
    in_tail, in_model = (sum(p.numel() for p in module.parameters()) for module in (parts.tail, model))
    assert in_tail < in_model
    assert not {id(p) for p in parts.tail.parameters()} & {id(p) for p in model.parameters()}


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4))
        self.stage = nn.Sequential(nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x.mean((2, 3)), self.stage(self.stem(x)).mean((2, 3))], 1))


def test_a_network_with_a_skip_around_the_stage_runs_whole_with_its_trunk_frozen() -> None:
    model, images = Skip().eval(), torch.randn(4, 3, 8, 8)
    parts = split_network(model, ["stage.0"], images)
    assert parts.is_whole
    assert parts.tail.frozen == ("stem",)
    assert torch.equal(parts.features(images), images)
    parts.tail.train()(images).sum().backward()
    assert torch.equal(parts.tail.network.get_buffer("stem.1.running_mean"), torch.zeros(4))
    assert parts.tail.network.get_parameter("stem.0.weight").grad is None
    assert parts.tail.network.get_parameter("stage.0.weight").grad is not None
    assert torch.equal(parts.tail.eval()(images), model(images))


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


def test_a_classifier_on_the_trunk_is_seen_in_training() -> None:
    model, images = Auxiliary().eval(), torch.randn(4, 3, 8, 8)
    assert split_network(model, ["stage"], images).tail.frozen == ("stem", "between")
    with pytest.raises(recast.RecastError, match="aux"):
        split_network(model, ["aux"], images)  # is not called


def test_the_tail_can_be_recast_and_split_again() -> None:
    torch.manual_seed(0)
    model, images = timm.create_model("digits_resnet").eval(), torch.randn(3, 3, 32, 32)
    plan = recast.plan(model, images[:1])
    parts = split_network(model, [step.name for step in plan.steps], images)
    with torch.no_grad():
        features = parts.features(images)
        recast.recast_(parts.tail.network, plan)
        torch.testing.assert_close(parts.tail.eval()(features), model(images), rtol=1e-5, atol=1e-6)
        nested = split_network(parts.tail, ["network.fc"], features)
        assert nested.tail.entry == "network.fc"
        torch.testing.assert_close(nested.tail.eval()(nested.features(features)), model(images), rtol=1e-5, atol=1e-6)


def test_a_tail_that_begins_with_a_recast_layer_can_be_woken() -> None:
    torch.manual_seed(0)
    chain = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.AdaptiveAvgPool2d(1))
    model, images = nn.Sequential(*chain, nn.Flatten(), nn.Linear(8, 5)).eval(), torch.randn(4, 3, 16, 16)
    plan = recast.plan(model, images, recast.RecastConfig(query_key="images"), where=["2"])
    parts = split_network(model, ["2"], images)
    assert parts.tail.entry == "2"
    children = recast.recast_(model, plan), parts.tail
    recast.recast_(parts.tail.network, plan)
    for child, inputs in zip(children, (images, parts.features(images)), strict=True):
        recast.wake_(child, inputs, seed=0)
    first, second = (child.state_dict() for child in children)
    assert "network.2.query" in second
    for name, value in second.items():  # the tail's alone: what lies before it is not there
        torch.testing.assert_close(first[name.removeprefix("network.")], value)
