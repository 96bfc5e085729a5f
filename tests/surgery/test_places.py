"""Attention after a block: planned, exact, awake, folded, saved, and taken out again where a call is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import torch
from torch import Tensor, nn

import recast
from recast.layers.beside import AttentionBeside
from recast.surgery.places import NAME, PassThrough

BLOCK = recast.RecastConfig(beside="block")
CONSTRUCTOR = {"name": "resnet18", "kwargs": {"num_classes": 5}}
IMAGES = torch.randn(4, 3, 48, 64, generator=torch.Generator().manual_seed(0))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet18", num_classes=5).eval()


@pytest.fixture(scope="module")
def parent() -> nn.Module:
    return resnet()


def recast_open(parent: nn.Module) -> nn.Module:
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, IMAGES, BLOCK))
    with torch.no_grad():
        child.get_submodule("layer4.attention").gamma.fill_(0.5)  # type: ignore[operator, union-attr]
    return child


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def test_a_plan_names_new_layers_and_changes_nothing(parent: nn.Module) -> None:
    before = names(parent)
    plan = recast.plan(parent, IMAGES, BLOCK)
    assert names(parent) == before
    assert [(step.name, step.is_after_block, step.exact) for step in plan.steps] == [("layer4.attention", True, True)]
    assert "attention after blocks (layer4.attention), all convolutions stay" in str(plan)
    assert dict((left.name, left.reason) for left in plan.left)["layer4.1.conv2"] == (
        "attention follows its blocks (layer4.attention)"
    )
    assert recast.Plan.from_json(plan.to_json()) == plan
    wanted = {"all": ["layer1", "layer2", "layer3", "layer4"], "stage:2": ["layer2"], "last": ["layer4"]}
    for where, stages in wanted.items():
        steps = recast.plan(parent, IMAGES, BLOCK, where=where).steps
        assert [step.name for step in steps] == [f"{stage}.{NAME}" for stage in stages]


def test_a_block_with_too_many_tokens_stays_unless_it_is_named_in_full(parent: nn.Module) -> None:
    plan = recast.plan(parent, IMAGES, BLOCK, where="layer*", max_tokens=20)
    assert [step.name for step in plan.steps] == ["layer3.attention", "layer4.attention"]
    assert "48 > max_tokens=20" in dict((left.name, left.reason) for left in plan.left)["layer2.0.conv1"]
    with pytest.raises(recast.RecastError, match=r"^layer2\.attention has too many tokens"):
        recast.plan(parent, IMAGES, BLOCK, where=["layer2.0.conv1", "layer4.*"], max_tokens=20)


def test_it_starts_exact_and_computes_the_formula(parent: nn.Module) -> None:
    child = recast_open(parent)
    layer: Any = child.get_submodule("layer4.attention")
    z = parent.get_submodule("layer4")(torch.randn(2, 256, 9, 13))
    with torch.no_grad():
        tokens = z.flatten(2).transpose(1, 2)
        q, k = tokens @ layer.query.T, tokens @ layer.key.T
        content = (q @ k.mT / layer.head_dim**0.5).softmax(-1) @ tokens @ layer.content.T
        expected = z + 0.5 * content.transpose(1, 2).unflatten(2, (5, 7))
    torch.testing.assert_close(layer(z), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        layer.gamma.zero_()
    result = recast.verify(parent, child, IMAGES, control=True)
    assert result.bitwise
    assert result.ok()
    assert result.telling == "outputs"
    assert NAME not in parent.get_submodule("layer4")._modules


def test_state_of_the_parent_fits_and_files_load(parent: nn.Module, tmp_path: Path) -> None:
    child = recast_open(parent)
    missing = child.load_state_dict(parent.state_dict(), strict=False)
    assert missing.unexpected_keys == []
    assert {key.rpartition(".")[0] for key in missing.missing_keys} == {"layer4.attention"}
    for gamma in (0.5, 0.0):
        with torch.no_grad():
            child.get_submodule("layer4.attention").gamma.fill_(gamma)  # type: ignore[operator, union-attr]
        folded = recast.fold_(child)
        assert folded[0].convolution == (gamma == 0)
        path = tmp_path / "child.safetensors"
        recast.save(child, path, CONSTRUCTOR)
        loaded = recast.load(path)
        with torch.no_grad():
            assert torch.equal(loaded(IMAGES), child(IMAGES))
        recast.save(loaded, path, CONSTRUCTOR)
    assert isinstance(loaded.get_submodule("layer4.attention"), PassThrough)
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), parent(IMAGES))


def test_it_wakes_and_is_recorded(parent: nn.Module) -> None:
    child = recast_open(parent)
    with pytest.warns(UserWarning, match="replaces trained queries and keys"):  # its gates are open
        woken = recast.wake_(child, IMAGES)
    assert [layer.layer for layer in woken] == ["layer4.attention"]
    assert woken[0].entropy_after < 0.95
    with recast.record(child) as maps, torch.no_grad():
        child(IMAGES)
    assert maps["layer4.attention"].grid == (2, 2)
    assert maps.shares["layer4.attention"][0] > 0


def test_during_training_and_in_an_average(parent: nn.Module) -> None:
    model, average = copy.deepcopy(parent), copy.deepcopy(parent)
    optimizer = torch.optim.AdamW(recast.param_groups(model, lr=1e-3))
    plan = recast.plan(model, IMAGES, BLOCK)
    recast.recast_during_training_(model, optimizer, plan, averages=[average])
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters()}
    for network in (model, average):
        assert isinstance(network.get_submodule("layer4.attention"), AttentionBeside)
    assert torch.equal(*(n.get_parameter("layer4.attention.query") for n in (model, average)))


def test_it_has_the_dtype_of_its_blocks() -> None:
    model = resnet().to(torch.float64)
    child = recast.recast_(model, recast.plan(model, IMAGES.double(), BLOCK))
    assert child.get_parameter("layer4.attention.query").dtype == torch.float64


class Plain(nn.Module):
    """Convolutions without a sequence around them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).mean((2, 3))  # type: ignore[no-any-return]


def test_refusals_change_nothing(parent: nn.Module) -> None:
    with pytest.raises(recast.RecastError, match=r"b is in no nn.Sequential that .* use beside=convolution"):
        recast.plan(Plain(), IMAGES, BLOCK)
    plan = recast.plan(parent, IMAGES, BLOCK)
    with pytest.raises(recast.RecastError, match=r"Plain has no sequence 'layer4'"):
        recast.recast_(Plain(), plan)
    child = recast.recast_(copy.deepcopy(parent), plan)
    with pytest.raises(recast.RecastError, match="already recast"):
        recast.recast_(child, plan)
    bad = copy.deepcopy(parent)
    wide = timm.create_model("resnet50", num_classes=5).eval()
    before = names(wide)
    with pytest.raises(recast.RecastError, match="max_tokens"):
        recast.plan(wide, IMAGES, BLOCK, max_tokens=2)
    assert names(wide) == before
    assert names(bad) == names(parent)


class Wrapped(nn.Module):
    """A network inside a user's own module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def test_a_wrapped_parent_is_compared(parent: nn.Module) -> None:
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, IMAGES, BLOCK))
    assert recast.verify(Wrapped(parent), child, IMAGES).bitwise
    assert NAME not in parent.get_submodule("layer4")._modules


class Lists(nn.Sequential):
    """A sequence that takes and gives several maps, as those of HRNet."""

    def forward(self, maps: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
        return [self[0](x) for x in maps]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage = nn.Sequential(nn.Conv2d(3, 4, 3)), Lists(nn.Conv2d(4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = self.stage([self.stem(x)])
        return maps[0].mean((2, 3))


def test_a_sequence_of_several_maps_has_no_end_to_follow() -> None:
    with pytest.raises(recast.RecastError, match="gives a map of its size, which attention could follow"):
        recast.plan(Branches().eval(), IMAGES, BLOCK)
    for where in ("stem.0", ["stem.0", "stage.0"]):
        plan = recast.plan(Branches().eval(), IMAGES, BLOCK, where=where, max_tokens=None)
        assert [step.name for step in plan.steps] == ["stem.attention"]
    assert [left.reason.partition(" ")[0] for left in plan.left] == ["attention", "in"]


class Counted(nn.Module):
    """Runs its stage, and once more without the last part."""

    def __init__(self, stage: nn.Sequential) -> None:
        super().__init__()
        self.stem, self.stage = nn.Conv2d(3, 8, 3, 2, 1), stage

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([self.stage(x), self.stage[:-1](x)], 1).mean((2, 3))


class Halved(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y / 2


def convolution() -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1)


def test_verify_compares_with_the_parent_that_has_no_such_layer() -> None:
    parent = Counted(nn.Sequential(convolution(), nn.ReLU(), convolution())).eval()
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, IMAGES, BLOCK, where="stage.*"))
    assert not torch.equal(child(IMAGES), parent(IMAGES))  # it counts the parts
    assert not recast.verify(parent, child, IMAGES).ok()


def test_a_sequence_of_sequences_keeps_the_number_of_its_parts() -> None:
    parent = Counted(nn.Sequential(convolution(), nn.Sequential(convolution(), nn.ReLU()))).eval()
    plan = recast.plan(parent, IMAGES, BLOCK, where="stage.*")
    assert [step.name for step in plan.steps] == ["stage.1.attention"]
    child = recast.recast_(copy.deepcopy(parent), plan)
    assert recast.verify(parent, child, IMAGES, control=True).bitwise
    parent = Counted(nn.Sequential(convolution(), Halved(convolution(), nn.ReLU()))).eval()
    assert [s.name for s in recast.plan(parent, IMAGES, BLOCK, where="stage.*").steps] == ["stage.attention"]


def test_a_name_that_is_taken_is_no_place() -> None:
    parent = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(convolution()), nn.AdaptiveAvgPool2d(1)).eval()
    parent.get_submodule("1").add_module(NAME, convolution())
    with pytest.raises(recast.RecastError, match=r"in no nn\.Sequential"):
        recast.plan(parent, IMAGES, BLOCK, where="1.*")


def test_an_efficientnet_runs_with_checkpointing_and_gives_its_features() -> None:
    parent = timm.create_model("efficientnet_b0", num_classes=5).eval()
    child = recast.recast_(copy.deepcopy(parent), recast.plan(parent, IMAGES, BLOCK))
    with torch.no_grad():
        outputs = (net.forward_intermediates(IMAGES) for net in (parent, child))  # type: ignore[operator]
        for a, b in zip(*([final, *maps] for final, maps in outputs), strict=True):
            assert torch.equal(a, b)
    child.set_grad_checkpointing()  # type: ignore[operator]
    child.train()(IMAGES).sum().backward()
    assert child.get_parameter("blocks.6.attention.gamma").grad is not None


@pytest.mark.parametrize("own", [True, False])
def test_during_training_with_layer_decay_it_learns_at_the_rate_of_the_top(own: bool, parent: nn.Module) -> None:
    model, plan = copy.deepcopy(parent), recast.plan(parent, IMAGES, BLOCK)
    if own:
        optimizer = torch.optim.AdamW(recast.param_groups(model, lr=1e-3, layer_decay=0.5, plan=plan))
    else:
        optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, layer_decay=0.5)
    count = len(optimizer.param_groups)
    recast.recast_during_training_(model, optimizer, plan)
    added = {id(p) for p in model.get_submodule("layer4.attention").parameters()}
    groups = [group for group in optimizer.param_groups if any(id(p) in added for p in group["params"])]
    rates = [group["lr"] * group.get("lr_scale", 1) for group in groups]
    top = 1e-3 if own else 5e-4
    assert rates == pytest.approx([top, top * 64 / 512, 50 * top])  # weights, queries and keys, gates
    if own:
        assert len(optimizer.param_groups) == count


def test_a_stage_that_runs_its_children_is_a_place() -> None:
    parent = timm.create_model("regnety_002", num_classes=5).eval()
    plan = recast.plan(parent, IMAGES, BLOCK)
    assert [step.name for step in plan.steps] == ["s4.attention"]
    child = recast.recast_(copy.deepcopy(parent), plan)
    assert recast.verify(parent, child, IMAGES, control=True).bitwise  # and it changes when the gate opens
