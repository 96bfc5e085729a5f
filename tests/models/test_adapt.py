"""Weights for other classes and other image sizes: `ModelConfig.new_head` and `ModelConfig.input_size`."""

import json
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
    def save(model: nn.Module, **changed: Tensor) -> str:
        path = tmp_path / "parent.safetensors"
        save_file({**model.state_dict(), **changed}, path)
        return str(path)

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
    child = build(ModelConfig(name, checkpoint=saved(parent), new_head=True), num_classes=4)
    heads = tuple(f"{head}." for head in classifiers(child))
    for key, value in child.state_dict().items():
        if key.startswith(heads):
            assert len(value) == 4
        else:
            assert torch.equal(value, parent.state_dict()[key]), key
    assert child.eval()(torch.randn(1, 3, 64, 64)).shape == (1, 4)


def test_what_is_no_head_must_still_fit(saved: Callable[..., str], tmp_path: Path) -> None:
    parent = build(ModelConfig("digits_resnet"))
    features = {key: value for key, value in parent.state_dict().items() if not key.startswith("fc.")}
    headless = save_file(features, tmp_path / "features.safetensors") or str(tmp_path / "features.safetensors")
    assert build(ModelConfig("digits_resnet", checkpoint=headless, new_head=True), num_classes=3).fc.out_features == 3
    path = saved(parent)
    with pytest.raises(RecastError, match=r"does not fit CifarResNet: \d+ missing"):
        build(ModelConfig("cifar_resnet20", checkpoint=path, new_head=True))


def small_patchconvnet(num_classes: int, per_class: bool) -> PatchConvNet:
    return PatchConvNet(16, 2, num_classes, per_class=per_class)


def test_patchconvnets_weights_load_for_every_class(saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recast.models.build.create", lambda source, name, kwargs, **_: small_patchconvnet(
        kwargs["num_classes"], per_class=name == "multi"))  # fmt: skip
    parent = small_patchconvnet(4, per_class=False)
    path = saved(parent)
    one = build(ModelConfig("single", checkpoint=path), num_classes=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), parent.parameters(), strict=True))
    many = build(ModelConfig("multi", checkpoint=path), num_classes=4)
    assert torch.equal(many.pool.cls_token, parent.pool.cls_token.expand(1, 4, 16))
    assert torch.equal(many.head.weight, parent.head.weight)
    with pytest.raises(RecastError, match=r"has 4 classes, the data has 3: set model\.new_head"):
        build(ModelConfig("multi", checkpoint=path), num_classes=3)
    path = saved(small_patchconvnet(4, per_class=True))
    fewer = build(ModelConfig("multi", checkpoint=path, new_head=True), num_classes=3)
    assert fewer.pool.cls_token.shape == (1, 3, 16)


def publish(monkeypatch: pytest.MonkeyPatch, name: str, published: nn.Module) -> None:
    """`published` is what would be fetched, without a network to fetch it from."""
    where = "torchvision.models.get_model" if name.startswith("torchvision:") else "timm.create_model"
    make = torchvision.models.get_model if name.startswith("torchvision:") else timm.create_model

    def fetch(*args: Any, **kwargs: Any) -> nn.Module:
        if kwargs.get("pretrained") or kwargs.get("weights"):
            assert not {"num_classes", "img_size"} & set(kwargs)  # timm would resample, with antialiasing
            return published
        return make(*args, **kwargs)

    monkeypatch.setattr(where, fetch)


@pytest.mark.parametrize("name", ["test_resnet", "torchvision:squeezenet1_1"])
def test_published_weights_get_a_new_head_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    published = build(ModelConfig(name))
    publish(monkeypatch, name, published)
    child = build(ModelConfig(name, pretrained=True, new_head=True), num_classes=3)
    (head,) = classifiers(child)
    assert child.get_submodule(head).weight.shape[0] == 3
    own = dict(published.named_parameters())
    same = [torch.equal(p, own[key]) for key, p in child.named_parameters() if not key.startswith(head)]
    assert len(same) > 10
    assert all(same)


def table(model: nn.Module) -> Tensor:
    """A position table in which every entry is different."""
    return torch.randn(model.pos_embed.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("test_vit", 1), ("deit_tiny_distilled_patch16_224", 2), ("deit3_small_patch16_224", 0), ("cait_xxs24_224", 0)],
)
def test_positions_are_resampled_as_in_the_published_code(name: str, prefix: int) -> None:
    def make(size: int) -> nn.Module:
        return on_meta(lambda: timm.create_model(name, img_size=size, depth=1))

    old, new = make(96), make(160)
    given = table(old)
    found = resampled(new, {"pos_embed": given, "norm.weight": torch.ones(3)})["pos_embed"]
    assert found.shape == new.pos_embed.shape == (1, prefix + 100, old.pos_embed.shape[2])
    assert torch.equal(found[:, :prefix], given[:, :prefix])
    grid = given[:, prefix:].reshape(1, 6, 6, -1).permute(0, 3, 1, 2)
    larger = F.interpolate(grid, size=(10, 10), mode="bicubic", align_corners=False)  # facebookresearch/deit, main.py
    assert torch.equal(found[:, prefix:], larger.permute(0, 2, 3, 1).flatten(1, 2))
    smaller = resampled(old, {"pos_embed": found})["pos_embed"]
    assert smaller.shape == given.shape
    assert torch.equal(resampled(old, {"pos_embed": given})["pos_embed"], given)


def test_a_checkpoint_is_built_for_another_size(saved: Callable[..., str], tmp_path: Path) -> None:
    parent = timm.create_model("test_vit", num_classes=6)
    config = ModelConfig("test_vit", checkpoint=saved(parent), input_size=64, new_head=True)
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
    parent = timm.create_model("resmlp_12_224", num_classes=3, img_size=64)
    assert build(ModelConfig("resmlp_12_224", checkpoint=saved(parent), input_size=64), num_classes=3) is not None
    with pytest.raises(RecastError, match=r"mixes 16 tokens, model.input_size makes 36: .* cannot be resampled"):
        build(ModelConfig("resmlp_12_224", checkpoint=saved(parent), input_size=96), num_classes=3)


@pytest.mark.parametrize("name", ["resnet18", "test_convnext", "regnetx_002", "digits_resnet", "patchconvnet_s20"])
def test_a_network_for_any_size_refuses_one(name: str) -> None:
    with pytest.raises(RecastError, match=f"{name} takes images of any size"):
        build(ModelConfig(name, input_size=96))


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(RecastError, match="input_size requires a network of timm, got torchvision:vit_b_16"):
        build(ModelConfig("torchvision:vit_b_16", input_size=96))
    with pytest.raises(RecastError, match=r"ReLU cannot be called with .*img_size"):
        build(ModelConfig("torch.nn:ReLU", input_size=8), trust=True)
