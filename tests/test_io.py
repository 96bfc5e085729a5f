import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from recast import RecastConfig, RecastError, load, plan, recast_, save
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER
from recast.models.build import build, class_names, constructor, input_defaults
from recast.models.config import ModelConfig
from recast.models.weights import read_header, read_weights

CONFIG = ModelConfig("digits_resnet", num_classes=10)
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def recast_model(**config: Any) -> nn.Module:
    model = build(CONFIG)
    return recast_(model, plan(model, X, RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config)))


def output(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(X)


@pytest.mark.parametrize("stride", ["keep", "remove"])
@pytest.mark.parametrize("gate", ["linear", "sigmoid"])
def test_a_recast_model_comes_back(tmp_path: Path, gate: Any, stride: Any, open_gates: Any) -> None:
    model = recast_model(gate=gate, stride=stride)
    for layer in gated_layers(model).values():
        open_gates(layer)
    path = save(model, tmp_path / "deep" / "child.safetensors", constructor(CONFIG))
    assert torch.equal(output(load(path)), output(model))
    assert torch.equal(output(load(path, parent=build(CONFIG))), output(model))
    assert torch.equal(output(load(path, parent=torch.optim.swa_utils.AveragedModel(build(CONFIG)))), output(model))


def test_shared_memory_and_channels_last_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)).to(memory_format=torch.channels_last)
    model[1].weight = model[0].weight
    path = save(model, tmp_path / "shared.safetensors")
    tensors = load_file(path)
    assert torch.equal(tensors["0.weight"], tensors["1.weight"])
    assert read_header(path) == {"constructor": None, "plan": None, "images": None, "forms": {}}
    save(torch.compile(nn.DataParallel(model), backend="eager"), path)  # under the network's own names
    assert load_file(path).keys() == tensors.keys()
    with pytest.raises(RecastError, match=r"0\.weight is on the meta device"):
        save(model.to("meta"), path)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    saved = save(recast_model(), tmp_path / "child.safetensors", constructor(CONFIG))
    with pytest.raises(RecastError, match="another model"):
        load(saved, parent=nn.Sequential(nn.Conv2d(3, 4, 3)))
    path = save(nn.Conv2d(3, 4, 3), tmp_path / "nameless.safetensors")
    with pytest.raises(RecastError, match="lazy layers"):
        load(path, parent=nn.LazyConv2d(4, 3))
    with pytest.raises(RecastError, match="pass its parent"):
        load(path)
    content = bytearray(saved.read_bytes())
    content[content.index(load_file(saved)["layer1.0.conv1.weight"].numpy().tobytes())] ^= 1
    saved.write_bytes(content)
    for read in (load, read_weights):
        with pytest.raises(RecastError, match=r"child\.safetensors is damaged: its checksum"):
            read(saved)
    saved.write_bytes(content[:-100])
    with pytest.raises(RecastError, match=r"no readable \.safetensors"):
        load(saved)


def test_a_constructor_is_checked_when_it_is_written(tmp_path: Path) -> None:
    model = timm.create_model("digits_resnet")
    path = save(model, tmp_path / "a.safetensors", "digits_resnet")
    assert read_header(path)["constructor"] == {"name": "digits_resnet"}
    assert type(load(path)) is type(model)
    unknown = ({"function": "mynet:build"}, {"name": "digits_resnet", "kwargs": {"depth": 3}}, "a b:c", "nowhere_net")
    for wrong in unknown:
        with pytest.raises(RecastError):
            save(model, tmp_path / "b.safetensors", wrong)
    assert not (tmp_path / "b.safetensors").exists()
    model = timm.create_model("digits_resnet", num_classes=4)
    with pytest.raises(RecastError, match=r"fc.weight is \(4, .* its kwargs"):
        save(model, tmp_path / "b.safetensors", "digits_resnet")
    state = torch.random.get_rng_state()
    save(model, tmp_path / "b.safetensors", {"name": "digits_resnet", "kwargs": {"num_classes": 4}})
    assert torch.equal(state, torch.random.get_rng_state())
    with pytest.raises(RecastError, match="another network"):  # a function of a module that is imported
        save(model, tmp_path / "b.safetensors", f"{__name__}:another")
    save(model, tmp_path / "b.safetensors", "this:build")  # of a module that is there and not imported


def another() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


def test_images_and_classes_come_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images: Any = {"img_size": 32, "mean": (0.1, 0.2, 0.3), "std": [0.5, 0.6, 0.7]}
    path = save(model, tmp_path / "a.safetensors", classes=["cat", "dog"], **images)
    for _ in range(2):  # a loaded model is saved with the same
        loaded = load(path, parent=model)
        defaults = input_defaults(loaded)
        assert (defaults.size, defaults.mean, defaults.std) == ((32, 32), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
        assert class_names(loaded) == ("cat", "dog")
        assert not hasattr(model, "pretrained_cfg")
        path = save(loaded, tmp_path / "b.safetensors")
    with pytest.raises(RecastError, match="belong together"):
        save(model, path, img_size=32)
    unwritten = tmp_path / "c.safetensors"
    for names, message in ((["cat", "dog"], "2 names, but the classifier has 5"), (["cat"] * 5, "'cat' twice")):
        with pytest.raises(RecastError, match=f"classes has {message}"):
            save(timm.create_model("digits_resnet", num_classes=5), unwritten, classes=names)
    model.pretrained_cfg = {"label_names": ["cat", "cat"]}  # type: ignore[assignment]
    with pytest.raises(RecastError, match="'cat' twice"):
        save(model, unwritten)
    assert not unwritten.exists()
    timms = load(save(timm.create_model("digits_resnet"), path, "digits_resnet", img_size=(48, 64)))
    assert input_defaults(timms).size == (48, 64)
    assert timms.pretrained_cfg["input_size"] == (3, 48, 64)


@pytest.mark.parametrize("classes", [["cat", "cat"], ["a", "b", "b"], ["", ""]])
def test_a_file_with_repeated_classes_is_refused(classes: list[str], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, len(classes), 3))
    path = tmp_path / "a.safetensors"
    header = json.dumps({"constructor": None, "plan": None, "images": {"classes": classes}})
    save_file(model.state_dict(), path, metadata={"recast": header})
    with pytest.raises(RecastError, match=rf"a.safetensors's images: classes has .{classes[-1]}. twice"):
        load(path, parent=model)


def test_places_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    for name, message in (
        ("folder.safetensors", "path"),
        ("file/a.safetensors", "path"),
        ("notes.txt", r"save writes \.safetensors, got notes\.txt"),
    ):
        with pytest.raises(RecastError, match=message):
            save(nn.Conv2d(3, 4, 3), tmp_path / name)
    with pytest.raises(RecastError, match="no such file"):
        load("a" * 5000 + ".safetensors")
