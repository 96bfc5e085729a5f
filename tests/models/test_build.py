import json
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import recast
from recast.errors import RecastError
from recast.models.build import build, build_from, class_names, constructor, input_defaults
from recast.models.config import ModelConfig
from recast.models.trust import trusting

OWN_NETWORKS = """
from torch import nn

def tiny(num_classes=3):
    return nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

def fixed():
    return nn.Sequential(nn.Conv2d(3, 2, 3))

def of_ten():
    return nn.Sequential(nn.Linear(2, 10))

def poisoned():
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float("nan"))
    return model

def word():
    return "resnet18"

def leaves():
    raise SystemExit("bye")

open("imported", "a").close()
"""


@pytest.fixture
def own_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_networks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN_NETWORKS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def test_the_config_decides_on_classes_before_the_data_set() -> None:
    assert build(ModelConfig("digits_resnet", num_classes=5), num_classes=6).num_classes == 5
    assert build(ModelConfig("digits_resnet")).num_classes == 10


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("cifar_resnet21", {}, "Did you mean .*cifar_resnet20"),
        ("squeezenet1_1", {}, "Did you mean torchvision:squeezenet1_1"),
        ("cifar_resnet20.imagenet", {}, "has no tag 'imagenet', only cifar10, cifar100"),
        ("", {}, "a model is named|timm has no model"),
        ("hf-hub:timm/resnet18", {}, "a model is named timm:NAME"),
        ("timm.layers:create_con2d", {}, r"timm.layers has no function 'create_con2d'. Did you mean create_conv2d"),
        ("builtins:print", {}, "standard library"),
        ("os:getcwd", {}, "standard library"),
        ("antigravity:fly", {}, "standard library"),
        ("recast.__main__:main", {}, "standard library"),
        ("own:fixed", {"num_classes": 6}, "fixed cannot be called with .*num_classes"),
        (
            "own:tiny",
            {"pretrained": True},
            "tiny does not take pretrained=True: .*checkpoint=FILE, or pretr",
        ),
        ("own:word", {}, r"must return an nn\.Module, got str"),
        ("own:poisoned", {}, "NaN or infinity in weight"),
        ("own:leaves", {}, "leaves failed: SystemExit: bye"),
        ("own:nn", {}, "has no function 'nn'"),
        ("own:of_ten", {"checkpoint": "five.pth"}, r"five.pth has 5 classes, .* has 10"),
        ("digits_resnet", {"checkpoint": "five.pth", "pretrained": True}, "either checkpoint or pretrained"),
        (
            "torchvision:squeezenet1_1",
            {"pretrained": True, "num_classes": 6},
            r"have 1000 classes, got num_classes=6: set model\.new_head",
        ),
        ("test_vit", {"kwargs": ["depth"]}, "NAME=VALUE"),
        ("test_vit", {"kwargs": ["num_classes=3"]}, r"use model\.num_classes"),
        ("test_vit", {"kwargs": {"cache_dir": "x"}}, r"must not set cache_dir"),
        ("test_vit", {"kwargs": {"depth": object()}}, r"JSON"),
        ("test_vit", {"kwargs": {"nonsense": 3}}, r"test_vit cannot be built with .*nonsense"),
        ("torchvision:resnet18", {"kwargs": {"depth": 3}}, r"model\.kwargs requires a network of timm or a function"),
        ("upernet:resnet18", {"kwargs": {"depth": 3}}, r"model\.kwargs requires a network of timm or a function"),
    ],
)
def test_a_network_that_cannot_be_built_is_one_clear_line(
    name: str, fields: dict[str, Any], message: str, own_networks: str
) -> None:
    torch.save({"0.weight": torch.zeros(5, 2), "0.bias": torch.zeros(5)}, "five.pth")
    name = name.replace("own:", f"{own_networks}:")
    with trusting(name), pytest.raises(RecastError, match=message) as error:
        build(ModelConfig(name, **fields))
    assert "\n" not in str(error.value)


def test_code_that_a_file_names_is_not_looked_for_in_the_current_folder(
    own_networks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{own_networks}:tiny"
    monkeypatch.syspath_prepend("")  # as in an interactive Python
    with pytest.raises(RecastError, match="the file names code to run"):
        build(ModelConfig(name))
    with pytest.raises(RecastError, match="not looked for in the current folder: put its folder on PYTHONPATH"):
        build(ModelConfig(name), trust=True)
    assert not (tmp_path / "imported").exists()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(build(ModelConfig(name), trust=True), nn.Module)
    assert (tmp_path / "imported").exists()


def test_the_papers_networks_are_there_once_they_are_needed(tmp_path: Path) -> None:
    """In a process that imports `recast` alone: for a saved network, and for timm."""
    network = build(ModelConfig("patchconvnet_s20"))
    planned = recast.plan(network, torch.zeros(1, 3, 32, 32))
    recast.save(recast.recast_(network, planned), tmp_path / "w.safetensors", "patchconvnet_s20")
    code = (
        "import sys, recast; assert not {'torch', 'timm'} & set(sys.modules); import timm, recast.io\n"
        "assert not timm.is_model('patchconvnet_s60'); print(type(recast.load(sys.argv[1])).__name__)\n"
        "assert 'patchconvnet_s60' in timm.list_models('patchconvnet*')\n"
        "print(type(timm.create_model('digits_resnet')).__module__)\n"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, tmp_path / "w.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["PatchConvNet", "recast.models.cifar"], done.stderr


@pytest.mark.parametrize("name", ["resnet18", "torchvision:squeezenet1_1"])
def test_pretrained_without_network_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(RecastError, match=r"could not fetch the pretrained weights of .*; give a file") as error:
        build(ModelConfig(name, pretrained=True))
    assert sum(slept) < 20, "the hub's client would ask for 40 s"
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False
    assert "\n" not in str(error.value)


def test_classes_that_nobody_states_are_the_checkpoints(tmp_path: Path) -> None:
    plain, recast_file = tmp_path / "plain.pth", tmp_path / "recast.safetensors"
    model = timm.create_model("digits_resnet", num_classes=6).eval()
    torch.save(model.state_dict(), plain)
    recast.recast_(model, recast.plan(model, torch.randn(1, 3, 32, 32)))
    recast.save(model, recast_file, constructor=constructor(ModelConfig("digits_resnet", num_classes=6)))
    for path in (plain, recast_file):
        with pytest.warns(UserWarning, match=r"gets the 6 classes of .*, not 10"):
            built = build(ModelConfig("digits_resnet", checkpoint=str(path)))
        assert built.num_classes == 6
        assert len(built.state_dict()) == len(load_file(path) if path is recast_file else torch.load(path))
    with pytest.raises(RecastError, match="has 6 classes, the data has 4"):
        build(ModelConfig("digits_resnet", checkpoint=str(plain)), num_classes=4)


def test_a_saved_network_states_its_images_and_classes(tmp_path: Path) -> None:
    path, names = tmp_path / "digits.safetensors", [f"digit {i}" for i in range(10)]
    model = timm.create_model("digits_resnet").eval()
    recast.save(model, path, classes=names, img_size=48, mean=[0.1] * 3, std=[0.3] * 3)
    built = partial(build, ModelConfig("digits_resnet", checkpoint=str(path)))
    assert input_defaults(built()) == ((48, 48), input_defaults(model).crop_pct, (0.1,) * 3, (0.3,) * 3)
    assert class_names(built()) == tuple(names)
    grey = build(ModelConfig("digits_resnet", checkpoint=str(path), new_head=True, in_chans=1), num_classes=4)
    assert class_names(grey) is None
    assert input_defaults(grey).mean != (0.1,) * 3


def test_a_file_cannot_call_functions(own_networks: str) -> None:
    described = constructor(ModelConfig(f"{own_networks}:tiny"), num_classes=6)
    with pytest.raises(RecastError, match=r"the file names code to run.*own_networks"):
        build_from(described)
    with trusting(described["name"]):
        assert isinstance(build_from(described), nn.Sequential)
    for content in ({"name": 3}, ["digits_resnet"]):
        with pytest.raises(RecastError, match=r"constructor.* must be a"):
            build_from(content)
    for name in ("checkpoint_path", "pretrained_cfg"):
        with pytest.raises(RecastError, match=rf"kwargs must not set {name}"):
            build_from({"name": "digits_resnet", "kwargs": {name: "evil.pth"}})
    for kwargs in ({"num_classes": "six"}, {"img_size": 0}, {"img_size": True}):
        with pytest.raises(RecastError, match=rf"kwargs\.{next(iter(kwargs))} must be"):
            build_from({"name": "test_vit", "kwargs": kwargs})


def test_arguments_of_the_network() -> None:
    config = ModelConfig("test_vit", kwargs=["depth=2", "mlp_ratio=1.5", "global_pool=avg", "qkv_bias=false"])
    assert config.kwargs == {"depth": 2, "mlp_ratio": 1.5, "global_pool": "avg", "qkv_bias": False}
    model = build_from(json.loads(json.dumps(constructor(config, num_classes=5))))
    assert (len(model.blocks), model.head.out_features, model.blocks[0].attn.qkv.bias) == (2, 5, None)
    assert ModelConfig(kwargs={"sizes": (1, 2)}).kwargs == {"sizes": [1, 2]}


def test_a_detector_without_weights_fetches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> None:
        raise AssertionError("no network here")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", fetch)
    monkeypatch.setattr("torchvision._internally_replaced_utils.load_state_dict_from_url", fetch)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
    assert build(ModelConfig("torchvision:lraspp_mobilenet_v3_large")) is not None
