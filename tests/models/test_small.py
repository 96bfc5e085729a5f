import os
from pathlib import Path

import pytest
import timm
import torch
from torchvision.transforms.v2.functional import normalize

from recast.lab.config import DataConfig
from recast.lab.data import Loader, load_data
from recast.lab.networks import CifarResNet, SubsampleShortcut
from recast.models.build import build, input_defaults
from recast.models.config import ModelConfig


def test_subsample_shortcut_is_option_a() -> None:
    x = torch.randn(2, 16, 9, 7)
    y = SubsampleShortcut(stride=2, pad_channels=8)(x)
    assert y.shape == (2, 32, 5, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


@pytest.mark.parametrize(
    ("depth", "shortcut", "parameters"),
    # 0.27M and 0.85M: table 6 of the paper. 1×1 shortcuts with norms add 16·32 + 64 + 32·64 + 128.
    [(20, "option_a", 269722), (20, "conv", 272474), (56, "option_a", 853018), (56, "conv", 855770)],
)
def test_parameter_counts_of_the_paper(depth: int, shortcut: str, parameters: int) -> None:
    model = CifarResNet(((depth - 2) // 6,) * 3, shortcut=shortcut)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "classes", "red"), [("cifar_resnet20.cifar10", 10, 0.4914), ("cifar_resnet20", 100, 0.5071)]
)
def test_normalisation_differs_by_tag(name: str, classes: int, red: float) -> None:
    model = timm.create_model(name)
    size, _, mean, _ = input_defaults(model)
    assert (model.num_classes, size, mean[0]) == (classes, (32, 32), red)


slow = pytest.mark.skipif(
    not (os.environ.get("RECAST_SLOW") and os.environ.get("RECAST_DATA")),
    reason="needs RECAST_SLOW=1 and trained weights in RECAST_DATA",
)


@slow
@pytest.mark.parametrize(
    ("name", "data", "weights", "top1"),
    [
        ("cifar_resnet20_a", "cifar10", "cifar10_resnet20_akamaster", 91.92),
        ("cifar_resnet20", "cifar100", "cifar100_resnet20_chenyaofo", 68.90),
        ("cifar_resnet56_a", "cifar10", "cifar10_resnet56_akamaster", 93.40),
        ("cifar_resnet56", "cifar100", "cifar100_resnet56_chenyaofo", 72.58),
    ],
)
def test_published_weights_reach_their_accuracy(name: str, data: str, weights: str, top1: float) -> None:
    checkpoint = Path(os.environ["RECAST_DATA"]) / "weights" / f"{weights}.safetensors"
    model = build(ModelConfig(name, checkpoint=str(checkpoint))).eval()
    defaults = input_defaults(model)
    correct, val = 0, load_data(DataConfig(data, num_train=10)).val
    assert len(val) == 5000
    with torch.inference_mode():
        for images, labels in Loader(val, 250):
            logits = model(normalize(images, list(defaults.mean), list(defaults.std)))
            correct += int((logits.argmax(1) == labels).sum())
    assert correct / 50 == pytest.approx(top1, abs=0.005)
