"""Taking a stride out: the paper's shapes, known shortcuts."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from layer_helpers import InCode, recast_copy, unchanged, without_values
from timm.models import resnet
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock as TorchvisionBlock

import recast.models.cifar
from recast import Plan, RecastConfig, RecastError, plan, recast_
from recast.surgery.stride import Edit

REMOVE = RecastConfig("linear", stride="remove")


def timm_resnet(block: Any, **options: Any) -> nn.Module:
    """A narrow ResNet of timm: the real blocks and shortcuts, a fraction of the weights."""
    return resnet.ResNet(block, (1, 1, 1, 2), num_classes=7, channels=(8, 8, 16, 16), stem_width=8, **options)


def cifar(shortcut: Any) -> nn.Module:
    return recast.models.cifar.CifarResNet((1, 1, 2), (8, 8, 16), shortcut=shortcut)


# deep stem and pooled shortcuts, as in ResNet-RS
RS = {"avg_down": True, "stem_type": "deep", "replace_stem_pool": True}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "timm resnet18": lambda: timm_resnet(resnet.BasicBlock),
    "timm resnet50": lambda: timm_resnet(resnet.Bottleneck),
    "timm resnetrs50 without SE": lambda: timm_resnet(resnet.Bottleneck, **RS),
    "torchvision resnet18": lambda: torchvision.models.ResNet(TorchvisionBlock, [1, 1, 1, 2], num_classes=7),
    "cifar resnet, x[::2] shortcut": lambda: cifar("option_a"),
    "cifar resnet, 1×1 shortcut": lambda: cifar("conv"),
}


# spec: tokens with padding of the last stage of the whole ResNet-RS family; queries are the unpadded map
def test_remove_has_the_papers_shapes() -> None:
    side, queries, keys = 224, 196, 256
    with without_values():
        model = timm.create_model("resnetrs50")
    x = torch.zeros(1, 3, side, side, device="meta")
    removed = plan(model, x, REMOVE)
    assert [step.name for step in removed.steps] == [f"layer4.{i}.conv2" for i in range(3)]
    assert [(step.queries, step.keys) for step in removed.steps] == [(queries, keys)] * 3
    assert [step.exact for step in removed.steps] == [False, True, True]
    assert removed.edits == (Edit("layer4.0.downsample.0", "identity"),)
    kept = plan(model, x, RecastConfig("linear"))
    assert [(step.queries, step.keys) for step in kept.steps] == [(queries // 4, keys)] + [
        (queries // 4, (side // 32 + 2) ** 2)
    ] * 2
    # table of parameters: 35.69 M + 2.36 M, with D_h = 56 instead of 512/9 and four scalars a head in the sigmoid gate
    paper = plan(model, x, RecastConfig(gate="sigmoid", stride="remove"))
    assert paper.before.parameters == pytest.approx(35.69e6, rel=1e-4)
    assert paper.after.parameters - paper.before.parameters == 3 * (512 * 512 + 2 * 9 * 56 * 512 + 4 * 9)


@pytest.mark.parametrize("name", NETWORKS)
def test_remove_is_the_parent_with_stride_1(name: str) -> None:
    """The fourth arm of a comparison: the same edits on the parent alone give the same function."""
    parent = NETWORKS[name]().eval()
    side = 96 if hasattr(parent, "layer4") else 32
    x = torch.randn(1, 3, side, side)
    child, arm = recast_copy(parent, x, REMOVE), copy.deepcopy(parent)
    for module in (arm.layer4 if hasattr(arm, "layer4") else arm.layer3).modules():
        if isinstance(module, nn.AvgPool2d):
            module.kernel_size = module.stride = 1
        elif hasattr(module, "stride"):
            module.stride = (1, 1) if isinstance(module.stride, tuple) else 1
    assert torch.equal(child(x), arm(x))
    assert not torch.allclose(child(x), parent(x))


def skip(x: Tensor) -> Tensor:
    return x[:, :, ::2, ::2]


@pytest.mark.parametrize(
    ("shortcut", "size", "message"),
    [
        (InCode(lambda _, x: skip(x)), 8, r"0\.conv: its shortcut 0\.shortcut is InCode, not a .*stride='keep'"),
        (nn.Sequential(nn.AvgPool2d(3, 2, 1), nn.Conv2d(8, 8, 1)), 8, "not a known kind"),
        (nn.Sequential(nn.Conv2d(8, 8, 1, 2), nn.ReLU()), 8, "not a known kind"),
        (nn.Sequential(nn.ConvTranspose2d(8, 8, 1, stride=2), nn.MaxPool2d(4, ceil_mode=True)), 8, "not a known kind"),
        (timm.layers.ConvNormAct(8, 8, 1, stride=2), 8, "not a known kind"),
        (None, 8, r"without the stride of 0\.conv"),
        (None, 2, "a single pixel"),  # 1×1 would broadcast against anything
    ],
)
def test_an_unknown_shortcut_is_refused_and_nothing_changes(
    shortcut: nn.Module | None, size: int, message: str
) -> None:
    conv, x = nn.Conv2d(8, 8, 3, stride=2, padding=1), torch.randn(1, 8, size, size)
    if shortcut is None:
        block = InCode(lambda m, x: m.conv(x) + skip(x), conv=conv)
    else:
        block = InCode(lambda m, x: m.conv(x) + m.shortcut(x), conv=conv, shortcut=shortcut)
    model = nn.Sequential(block)
    with unchanged(model), pytest.raises(RecastError, match=message):
        plan(model, x, REMOVE)


@pytest.mark.parametrize(
    ("model", "where", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1)), None, "none of the selected .* has a stride"),
        (nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1, padding_mode="reflect")), None, "numeric zero padding"),
        (nn.Sequential(nn.Conv2d(3, 3, 3, 2), nn.Conv2d(3, 3, 3, 2)), "all", "0 is not in the last"),
        (nn.Sequential(nn.Conv2d(3, 3, 1, 2), nn.Conv2d(3, 3, 3, 2)), ["0", "1"], "0 is 1×1"),
    ],
)
def test_what_cannot_lose_its_stride(model: nn.Module, where: Any, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        plan(model, torch.zeros(1, 3, 12, 12), REMOVE, where=where)


def test_steps_taken_one_after_another_replay() -> None:
    """Half recast, saved and replayed: the layers that wait have their new geometry already."""
    parent = cifar("option_a").eval()
    x = torch.randn(1, 3, 16, 16)
    planned = plan(parent, x, REMOVE)
    names = [step.name for step in planned.steps]
    expected = recast_copy(parent, x, REMOVE)(x)

    def replayed(model: Any) -> nn.Module:
        return recast_(copy.deepcopy(parent), Plan.from_json(model.recast_plan.to_json()))

    for first, rest in ((names[:1], names[1:]), (names[-1:], names[:-1])):
        child = recast_(copy.deepcopy(parent), planned, steps=first)
        assert torch.equal(child(x), expected)
        for model in (child, replayed(child)):
            assert torch.equal(model(x), expected)
            recast_(model, planned, steps=rest)
            assert torch.equal(model(x), expected)
            assert torch.equal(replayed(model)(x), expected)
