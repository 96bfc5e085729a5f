import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

import recast
from recast import RecastConfig, RecastError, param_groups, plan, recast_
from recast.layers.config import PAPERS_LAYER
from recast.surgery.parameters import layer_numbers

PAPERS = RecastConfig(**PAPERS_LAYER)


def meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


def rates(groups: list[dict], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Name of a parameter → its share of the learning rate and its weight decay."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (pytest.approx(group.get("lr_scale", group.get("lr"))), group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "cait_xxs24_224", "regnetx_002"])
def test_layer_decay_is_timms(name: str) -> None:
    model = meta(name) if name != "regnetx_002" else timm.create_model(name)
    none = getattr(model, "no_weight_decay", set)()
    theirs = param_groups_layer_decay(model, weight_decay=0.1, no_weight_decay_list=none, layer_decay=0.7)
    ours = param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.7)
    assert rates(ours, model) == rates(theirs, model)
    assert len({group["name"] for group in ours}) == len(ours)


def test_positions_tokens_and_resmlps_norms_never_decay() -> None:
    model, mlp = timm.create_model("test_vit"), meta("resmlp_12_224")
    assert not {"pos_embed", "cls_token"} & decaying(model)
    assert {name.rpartition(".")[2] for name in decaying(mlp)} == {"weight"}
    assert model.pos_embed.dim() == mlp.norm.alpha.dim() == 3  # only their names say so
    inside = nn.Sequential(nn.Conv2d(3, 3, 1), model)
    assert decaying(inside) == {"0.weight", *(f"1.{name}" for name in decaying(model))}


def decaying(model: nn.Module) -> set[str]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for group in param_groups(model) if group["name"] == "decay" for p in group["params"]}


def test_what_a_convolution_became_learns_at_the_rate_of_its_layer() -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    before = layer_numbers(model)
    recast_(model, plan(model, torch.zeros(1, 3, 64, 64), PAPERS, where=["layer2.0.conv2", "layer4.0.conv2"]))
    groups = param_groups(model, lr=1.0, layer_decay=0.5)
    own = {id(p): group for group in groups for p in group["params"]}
    last = max(before.values())
    for name in ("layer2.0.conv2", "layer4.0.conv2"):
        distance = last - before[f"{name}.weight"]
        layer = model.get_submodule(name)
        for key, parameter in layer.named_parameters():
            expected = (50.0 if key in ("gamma", "spread") else 1.0) * 0.5**distance
            assert own[id(parameter)]["lr"] == pytest.approx(expected), (name, key)
        assert own[id(layer.gamma)]["name"] == f"gates/{last - distance}"
    assert own[id(model.fc.weight)]["lr"] == 1.0
    assert own[id(model.layer2[0].conv2.gamma)]["lr"] < own[id(model.layer4[0].conv2.gamma)]["lr"]


def test_queries_and_keys_have_a_rate_of_their_own_and_decay() -> None:
    model = timm.create_model("test_resnet", num_classes=3)
    recast_(model, plan(model, torch.zeros(1, 3, 64, 64), PAPERS, where=["layer4.0.conv2"]))
    layer = model.get_submodule("layer4.0.conv2")
    (own,) = (group for group in param_groups(model, qk_lr=0.5, weight_decay=0.1) if group["name"] == "queries_keys")
    assert {id(p) for p in own["params"]} == {id(layer.query), id(layer.key)}
    assert (own["lr"], own["weight_decay"]) == (0.5, 0.1)
    assert all(group["name"] != "queries_keys" for group in param_groups(model))


def test_without_layers_there_is_no_layer_decay() -> None:
    with pytest.raises(RecastError, match="Sequential does not have: drop layer_decay"):
        param_groups(nn.Sequential(nn.Linear(2, 2)), layer_decay=0.5)
    assert recast.param_groups is param_groups
