"""Networks inside torch.compile, DataParallel and averages of the weights: changed, saved and loaded as they are."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import PAPERS, recast_copy
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import recast
from recast import RecastError
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "DataParallel": nn.DataParallel,
    "compiled DataParallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "ModelEmaV3": ModelEmaV3,
    "AveragedModel": AveragedModel,
}


def net() -> nn.Sequential:
    conv, mean = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(OrderedDict(conv=conv, mean=mean, flat=nn.Flatten(), head=nn.Linear(4, 3)))


def opened(model: nn.Module) -> nn.Module:
    for layer in gated_layers(model).values():
        nn.init.constant_(layer.gamma, 0.5)
        with torch.no_grad():
            layer.gamma[:4] = 0.0
    return model


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=list(WRAPPERS))
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_a_wrapped_network_is_recast_folded_and_saved(wrap: Any, wrapped_first: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    parent, x = net().eval(), torch.randn(2, 3, 8, 8)
    if wrapped_first:
        model = wrap(copy.deepcopy(parent))
        assert recast.recast_(model, recast.plan(model, x, PAPERS)) is model
    else:
        model = wrap(recast_copy(parent, x))
    recast.wake_(model, x)
    opened(model).eval()
    report = recast.fold_(model, tol=0.1)
    assert [layer.content for layer in report] == [5]
    with torch.no_grad():
        loaded = recast.load(recast.save(model, tmp_path / "net.safetensors"), parent=parent)
        assert torch.equal(loaded(x), model(x))
        assert not torch.allclose(loaded(x), parent(x))


def test_the_pooling_of_a_wrapped_network_is_saved(tmp_path: Path) -> None:
    parent, x = net().eval(), torch.randn(2, 3, 32, 32)
    model = recast.attention_pool_(nn.DataParallel(copy.deepcopy(parent)), example=x)
    loaded = recast.load(recast.save(model, tmp_path / "pooled.safetensors"), parent=parent)
    with torch.no_grad():
        assert torch.equal(loaded(x), model.module(x))


@pytest.mark.parametrize("verb", ["recast_", "recast_during_training_", "fold_", "attention_pool_"])
def test_what_is_bound_to_its_parameters_is_refused(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, x = net(), torch.randn(2, 3, 8, 8)
    planned = recast.plan(parent, x, PAPERS)
    arguments = {"recast_": [planned], "recast_during_training_": [torch.optim.SGD(parent.parameters()), planned]}
    bound = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(bound)
    bound.module = parent
    with pytest.raises(RecastError, match=r"pass model\.module"):
        getattr(recast, verb)(bound, *arguments.get(verb, []))
    monkeypatch.setattr("recast.surgery.wrappers.DTensor", nn.Parameter)
    with pytest.raises(RecastError, match="sharded"):
        getattr(recast, verb)(parent, *arguments.get(verb, []))
    assert isinstance(parent.conv, nn.Conv2d)


def test_a_file_that_nothing_could_load_is_not_written(tmp_path: Path) -> None:
    parent, x = net().eval(), torch.randn(2, 3, 8, 8)
    child = recast_copy(parent, x)
    with pytest.raises(RecastError, match="builds another network than this Sequential"):
        recast.save(nn.Sequential(child), tmp_path / "around.safetensors", "resnet18")
    kept = copy.deepcopy(child)
    child.conv = nn.Identity()
    with pytest.raises(RecastError, match="conv was recast and is not a recast layer or a convolution any more"):
        recast.save(child, tmp_path / "gone.safetensors")
    assert recast.fold_(child) == []  # what is left of a network is folded all the same
    assert not list(tmp_path.iterdir())
    path = recast.save(nn.Sequential(kept), tmp_path / "around.safetensors")
    assert len(recast.load(path, parent=nn.Sequential(copy.deepcopy(kept)))) == 1


def test_checkpointed_layers_have_the_names_of_their_weights(tmp_path: Path) -> None:
    parent, x = net().eval(), torch.randn(2, 3, 8, 8)
    child = opened(recast_copy(parent, x)).eval()
    apply_activation_checkpointing(child, check_fn=lambda layer: isinstance(layer, recast.GPSA))
    for path in (tmp_path / "open.safetensors", tmp_path / "folded.safetensors"):
        with torch.no_grad():
            assert torch.equal(recast.load(recast.save(child, path), parent=parent)(x), child(x))
        recast.fold_(child, tol=0.1)


def test_layers_that_were_changed_by_hand_are_saved_as_they_are(tmp_path: Path) -> None:
    parent, x = net().eval(), torch.randn(2, 3, 8, 8)
    for gate, change in (
        ("linear", lambda layer: layer.prune_([0, 1], [3])),
        ("linear", lambda layer: layer.fold()),
        ("bias", lambda layer: layer.set_size_(12, 10)),
    ):
        child = opened(recast_copy(parent, x, recast.RecastConfig(gate=gate, **PAPERS_LAYER))).eval()
        change(child.conv)
        loaded = recast.load(recast.save(child, tmp_path / "net.safetensors"), parent=parent)
        with torch.no_grad():
            assert torch.equal(loaded(x), child(x))
