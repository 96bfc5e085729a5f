"""Weights for other classes and other image sizes: `ModelConfig.new_head` and `ModelConfig.input_size`."""

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

import recast
from recast.errors import RecastError
from recast.models.adapt import classifiers, resampled
from recast.models.build import build, constructor, input_defaults
from recast.models.config import ModelConfig
from recast.papers.patchconvnet.network import PatchConvNet


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    def save(weights: dict[str, Tensor]) -> str:
        save_file(weights, tmp_path / "weights.safetensors")
        return str(tmp_path / "weights.safetensors")

    return save


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: timm.create_model("resnet18"), ("fc",)),
        (lambda: timm.create_model("test_convnext"), ("head.fc",)),
        (lambda: timm.create_model("cifar_resnet20_a"), ("linear",)),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224"), ("head", "head_dist")),
        (lambda: timm.create_model("patchconvnet_s20"), ("head",)),
        (torchvision.models.resnet18, ("fc",)),
        (torchvision.models.vgg11, ("classifier.6",)),
        (torchvision.models.squeezenet1_1, ("classifier.1",)),
        (torchvision.models.swin_t, ("head",)),
        (lambda: torchvision.models.inception_v3(init_weights=False), ("fc", "AuxLogits.fc")),
        (lambda: torchvision.models.googlenet(init_weights=False), ("fc", "aux1.fc2", "aux2.fc2")),
    ],
)
def test_classifiers_are_found(make: Callable[[], nn.Module], names: tuple[str, ...]) -> None:
    assert classifiers(on_meta(make), 1000 if "torchvision" in make.__module__ else None) == names


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten()),
        nn.Linear(4, 10),  # the network itself
        nn.Sequential(nn.Linear(4, 7)),  # of 10 classes
        timm.create_model("digits_resnet", num_classes=0),
    ],
)
def test_a_network_that_does_not_say_what_its_classifier_is(model: nn.Module) -> None:
    with pytest.raises(RecastError, match="no known classifier"):
        classifiers(model, 10)


@pytest.mark.parametrize("name", ["digits_resnet", "torchvision:squeezenet1_1", "test_convnext"])
def test_a_new_head_leaves_the_rest_as_in_the_file(saved: Callable[..., str], name: str) -> None:
    parent = build(ModelConfig(name, num_classes=6))
    torch.manual_seed(1)
    child = build(ModelConfig(name, checkpoint=saved(parent.state_dict()), new_head=True), num_classes=4)
    heads = tuple(f"{head}." for head in classifiers(child))
    for key, value in child.state_dict().items():
        if key.startswith(heads):
            assert len(value) == 4
        else:
            assert torch.equal(value, parent.state_dict()[key]), key
    assert child.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 4)


def test_what_is_no_head_must_still_fit(saved: Callable[..., str]) -> None:
    weights = build(ModelConfig("digits_resnet")).state_dict()
    path = saved({key: value for key, value in weights.items() if not key.startswith("fc.")})
    assert build(ModelConfig("digits_resnet", checkpoint=path, new_head=True), num_classes=3).fc.out_features == 3
    path = saved(weights)
    for new_head in (True, False):
        with pytest.raises(RecastError, match=r"does not fit CifarResNet: \d+ missing"):
            build(ModelConfig("cifar_resnet20", checkpoint=path, new_head=new_head), num_classes=10)


def small_patchconvnet(num_classes: int, per_class: bool) -> PatchConvNet:
    return PatchConvNet(16, 2, num_classes, per_class=per_class)


def test_patchconvnets_weights_load_for_every_class(saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recast.models.build.create",
        lambda source, name, kwargs, **_: small_patchconvnet(kwargs["num_classes"], per_class=name == "multi"),
    )
    parent = small_patchconvnet(4, per_class=False)
    path = saved(parent.state_dict())
    single = build(ModelConfig("single", checkpoint=path), num_classes=4)
    assert all(torch.equal(a, b) for a, b in zip(single.parameters(), parent.parameters(), strict=True))
    multi = build(ModelConfig("multi", checkpoint=path), num_classes=4)
    assert torch.equal(multi.pool.cls_token, parent.pool.cls_token.expand(1, 4, 16))
    assert torch.equal(multi.head.weight, parent.head.weight)
    with pytest.raises(RecastError, match=r"has 4 classes, the data has 3: set model\.new_head"):
        build(ModelConfig("multi", checkpoint=path), num_classes=3)
    path = saved(small_patchconvnet(4, per_class=True).state_dict())
    fewer = build(ModelConfig("multi", checkpoint=path, new_head=True), num_classes=3)
    assert fewer.pool.cls_token.shape == (1, 3, 16)


@pytest.mark.parametrize(
    ("name", "maker"),
    [("test_resnet", "timm.create_model"), ("torchvision:squeezenet1_1", "torchvision.models.get_model")],
)
def test_published_weights_get_a_new_head_too(monkeypatch: pytest.MonkeyPatch, name: str, maker: str) -> None:
    published, make = build(ModelConfig(name)), pkgutil.resolve_name(maker)

    def fetch(*args: Any, **kwargs: Any) -> nn.Module:
        if kwargs.get("pretrained") or kwargs.get("weights"):
            assert not {"num_classes", "img_size"} & set(kwargs)  # timm would resample, with antialiasing
            return published
        return make(*args, **kwargs)

    monkeypatch.setattr(maker, fetch)
    child = build(ModelConfig(name, pretrained=True, new_head=True), num_classes=3)
    (head,) = classifiers(child)
    assert child.get_submodule(head).weight.shape[0] == 3
    weights = dict(published.named_parameters())
    same = [torch.equal(p, weights[key]) for key, p in child.named_parameters() if not key.startswith(head)]
    assert len(same) > 10
    assert all(same)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("test_vit", 1), ("deit_tiny_distilled_patch16_224", 2), ("deit3_small_patch16_224", 0), ("cait_xxs24_224", 0)],
)
def test_positions_are_resampled_as_in_the_published_code(name: str, prefix: int) -> None:
    def make(size: int) -> nn.Module:
        return on_meta(lambda: timm.create_model(name, img_size=size, depth=1))

    old, new = make(96), make(160)
    table = torch.randn(old.pos_embed.shape)
    larger = resampled(new, {"pos_embed": table, "norm.weight": torch.ones(3)})["pos_embed"]
    assert larger.shape == new.pos_embed.shape == (1, prefix + 100, old.pos_embed.shape[2])
    assert torch.equal(larger[:, :prefix], table[:, :prefix])
    grid = table[:, prefix:].reshape(1, 6, 6, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(10, 10), mode="bicubic", align_corners=False)  # facebookresearch/deit, main.py
    assert torch.equal(larger[:, prefix:], grid.permute(0, 2, 3, 1).flatten(1, 2))
    assert resampled(old, {"pos_embed": larger})["pos_embed"].shape == table.shape
    assert torch.equal(resampled(old, {"pos_embed": table})["pos_embed"], table)


def test_a_checkpoint_is_built_for_another_size(saved: Callable[..., str], tmp_path: Path) -> None:
    parent = timm.create_model("test_vit", num_classes=6)
    config = ModelConfig("test_vit", checkpoint=saved(parent.state_dict()), input_size=64, new_head=True)
    child = build(config, num_classes=4).eval()
    assert child(torch.randn(1, 3, 64, 64)).shape == (1, 4)
    assert input_defaults(child).size == (64, 64)
    assert timm.create_model("test_vit").pretrained_cfg["input_size"] == (3, 160, 160)  # others are as they were
    described = json.loads(json.dumps(constructor(config, num_classes=4)))
    assert described == {"name": "timm:test_vit", "kwargs": {"num_classes": 4, "img_size": 64}}
    loaded = recast.load(recast.save(child, tmp_path / "child.safetensors", described))
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded(x), child(x))
    # what was saved is of this size already: nothing is resampled again
    config = ModelConfig("test_vit", checkpoint=str(tmp_path / "child.safetensors"), num_classes=4)
    assert torch.equal(build(config.replace(input_size=64)).pos_embed, child.pos_embed)
    with pytest.raises(RecastError, match=r"pos_embed is \(1, 17, 64\).*set model.input_size to resample"):
        build(config)


def test_token_mixing_matrices_have_one_size(saved: Callable[..., str]) -> None:
    path = saved(timm.create_model("resmlp_12_224", num_classes=3, img_size=64).state_dict())
    assert build(ModelConfig("resmlp_12_224", checkpoint=path, input_size=64), num_classes=3) is not None
    with pytest.raises(RecastError, match=r"mixes 16 tokens, model.input_size makes 36: .* cannot be resampled"):
        build(ModelConfig("resmlp_12_224", checkpoint=path, input_size=96), num_classes=3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *[
            (name, f"{name} takes images of any size")
            for name in ("resnet18", "test_convnext", "regnetx_002", "digits_resnet", "patchconvnet_s20")
        ],
        ("torchvision:vit_b_16", "input_size requires a network of timm, got torchvision:vit_b_16"),
        ("torch.nn:ReLU", r"ReLU cannot be called with .*img_size"),
    ],
)
def test_networks_without_an_input_size(name: str, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        build(ModelConfig(name, input_size=96), trust=True)
