from typing import Any

import pytest
import timm
import torch
from layer_helpers import PAPERS, groups_by_name
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.nn.utils import parametrize

from recast import RecastConfig, RecastError, param_groups, plan, recast_
from recast.surgery.parameters import layer_numbers, parameter_kinds


def meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name)


def recast_resnet(*where: str) -> Any:
    model = timm.create_model("test_resnet", num_classes=3)
    return recast_(model, plan(model, torch.zeros(1, 3, 64, 64), PAPERS, where=list(where)))


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext", "cait_xxs24_224", "regnetx_002"])
def test_layer_decay_is_timms(name: str) -> None:
    model = meta(name) if name != "regnetx_002" else timm.create_model(name)
    none = getattr(model, "no_weight_decay", set)()
    timms = param_groups_layer_decay(model, weight_decay=0.1, no_weight_decay_list=none, layer_decay=0.7)
    groups = param_groups(model, lr=1.0, weight_decay=0.1, layer_decay=0.7)
    ours, theirs = groups_by_name(model, groups), groups_by_name(model, timms)
    assert ours.keys() == theirs.keys()
    for name, group in ours.items():
        assert group["lr"] == pytest.approx(theirs[name]["lr_scale"]), name
        assert group["weight_decay"] == theirs[name]["weight_decay"], name
    assert len({group["name"] for group in groups}) == len(groups)


def test_positions_tokens_and_resmlps_norms_never_decay() -> None:
    model, mlp = timm.create_model("test_vit"), meta("resmlp_12_224")
    assert not {"pos_embed", "cls_token"} & decaying(model)
    assert {name.rpartition(".")[2] for name in decaying(mlp)} == {"weight"}
    assert model.pos_embed.dim() == mlp.norm.alpha.dim() == 3  # only their names say so
    inside = nn.Sequential(nn.Conv2d(3, 3, 1), model)
    assert decaying(inside) == {"0.weight", *(f"1.{name}" for name in decaying(model))}


def decaying(model: nn.Module) -> set[str]:
    return {name for name, group in groups_by_name(model, param_groups(model)).items() if group["name"] == "decay"}


def test_a_convolution_that_never_decays_does_not_beside_attention() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1)))
    model.no_weight_decay = lambda: {"1.0.weight"}
    recast_(model, plan(model, torch.zeros(1, 3, 8, 8), where=["0", "1.0"]))
    names = {f"{layer}.{key}" for layer in ("0", "1.0") for key in ("query", "key", "content", "conv.weight")}
    assert decaying(model) == names - {"1.0.conv.weight"}


def test_gates_under_a_parametrisation_keep_their_rate() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
    recast_(model, plan(model, torch.zeros(1, 3, 8, 8)))
    parametrize.register_parametrization(model[0], "gamma", nn.Tanh())
    groups = groups_by_name(model, param_groups(model))
    assert [name for name, group in groups.items() if group["name"] == "gates"] == ["0.parametrizations.gamma.original"]


@pytest.mark.parametrize(
    ("gate", "name"),
    [("beside", "gamma"), ("beside", "query"), ("linear", "gamma"), ("linear", "key"), ("sigmoid", "lam")],
)
def test_what_a_parametrisation_computes_from_has_the_kind_of_the_parameter(gate: Any, name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU())
    recast_(model, plan(model, torch.zeros(1, 3, 8, 8), RecastConfig(gate)))
    kind = parameter_kinds(model, queries_apart=True)[id(model[0].get_parameter(name))]
    parametrize.register_parametrization(model[0], name, nn.Tanh())
    inner = model[0].get_parameter(f"parametrizations.{name}.original")
    assert kind not in ("decay", "no_decay")
    assert parameter_kinds(model, queries_apart=True)[id(inner)] == kind


def test_what_a_convolution_became_learns_at_the_rate_of_its_layer() -> None:
    names = ("layer2.0.conv2", "layer4.0.conv2")
    before, model = layer_numbers(timm.create_model("test_resnet", num_classes=3)), recast_resnet(*names)
    groups = groups_by_name(model, param_groups(model, lr=1.0, layer_decay=0.5))
    last = max(before.values())
    for name in names:
        distance = last - before[f"{name}.weight"]
        for key, _ in model.get_submodule(name).named_parameters():
            expected = (50.0 if key in ("gamma", "spread") else 1.0) * 0.5**distance
            assert groups[f"{name}.{key}"]["lr"] == pytest.approx(expected), (name, key)
        assert groups[f"{name}.gamma"]["name"] == f"gates/{last - distance}"
    assert groups["fc.weight"]["lr"] == 1.0
    assert groups["layer2.0.conv2.gamma"]["lr"] < groups["layer4.0.conv2.gamma"]["lr"]


def test_queries_and_keys_have_a_rate_of_their_own_and_decay() -> None:
    model = recast_resnet("layer4.0.conv2")
    layer = model.layer4[0].conv2
    (group,) = (group for group in param_groups(model, qk_lr=0.5, weight_decay=0.1) if group["name"] == "queries_keys")
    assert {id(p) for p in group["params"]} == {id(layer.query), id(layer.key)}
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.1)
    assert all(group["name"] != "queries_keys" for group in param_groups(model))


@pytest.mark.parametrize(("channels", "ratio"), [(64, 1.0), (256, 0.25)])
def test_queries_and_keys_of_wide_layers_learn_more_slowly(channels: int, ratio: float) -> None:
    model = nn.Sequential(nn.Conv2d(3, channels, 1), nn.ReLU(), nn.Conv2d(channels, 8, 3, padding=1))
    planned = plan(model, torch.zeros(1, 3, 8, 8), where="2")
    later = [group["name"] for group in param_groups(model, plan=planned)]
    recast_(model, planned)
    groups = groups_by_name(model, param_groups(model, lr=1.0))
    assert groups["2.query"]["lr"] == groups["2.key"]["lr"] == ratio
    assert groups["2.content"]["lr"] == 1.0
    assert ("queries_keys" in later) == (ratio < 1)
    assert groups_by_name(model, param_groups(model, lr=1.0, qk_lr=0.5))["2.query"]["lr"] == 0.5


def test_without_layers_there_is_no_layer_decay() -> None:
    with pytest.raises(RecastError, match="Sequential does not have: drop layer_decay"):
        param_groups(nn.Sequential(nn.Linear(2, 2)), layer_decay=0.5)
