import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from layer_helpers import InCode, unchanged
from timm.models.mambaout import MambaOut
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from torchvision import models as torchvision_models

from recast import Plan, PoolConfig, RecastError, attention_pool_, plan, recast_
from recast.layers.attention_pool import AttentionPool, attention_pools
from recast.surgery.pooling.adapters import PooledLayer
from recast.surgery.pooling.find import find_place
from recast.surgery.scales import randomize_scales_
from recast.tracing.hooks import captured_inputs


def pooling_in_code(pool: Callable[[Tensor], Tensor] = lambda x: x.mean((2, 3))) -> InCode:
    """As networks for CIFAR do: after an nn.Sequential, with a ReLU before it."""
    return InCode(
        lambda m, x: m.fc(pool(F.relu(m.layer2(m.layer1(x))))),
        layer1=nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU()),
        layer2=nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.BatchNorm2d(12)),
        fc=nn.Linear(12, 5),
    )


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    return timm.create_model(name, img_size=64, depth=1, embed_dim=24, num_heads=2, num_classes=5, **options)


SMALL: dict[str, Callable[[], nn.Module]] = {
    "module, flat": lambda: timm.create_model("resnet10t", num_classes=5),
    "module, map": lambda: timm.create_model("convnext_atto", num_classes=5, depths=(1,) * 4, dims=(8, 8, 8, 16)),
    "module, then a convolution": lambda: timm.create_model("mobilenetv3_small_050", num_classes=5),
    "module, the classifier a convolution": lambda: timm.create_model("dpn48b", num_classes=5),
    "module, NHWC": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, embed_dim=8, depths=(1, 1), num_heads=(2, 2), num_classes=5
    ),
    "head, tokens": lambda: MlpMixer(num_classes=5, img_size=64, patch_size=16, num_blocks=1, embed_dim=16),
    "head, tokens after a class token": lambda: vit(global_pool="avg"),
    "append": lambda: torchvision_models.mnasnet0_5(num_classes=5),
    "append after a ReLU": pooling_in_code,
}
"""A network for every way to pool, as small as its constructor allows."""
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def small(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return SMALL[kind]()


@pytest.mark.parametrize("kind", SMALL)
@torch.no_grad()
def test_the_network_computes_what_it_did(kind: str, error_of: Any) -> None:
    parent, x = randomize_scales_(small(kind).eval(), IMAGES).double(), IMAGES.double()
    expected = parent(x)
    features = parent.forward_features(x) if hasattr(parent, "forward_features") else None
    for per_class in (False, True):
        child = copy.deepcopy(parent)
        assert attention_pool_(child, per_class, example=x) is child
        (pool,) = attention_pools(child).values()
        assert pool.num_classes == (5 if per_class else None)
        assert error_of(child(x), expected) < 1e-12
        assert set(parent.state_dict()) <= set(child.state_dict())  # nothing of the parent's has another name
        if features is not None:
            assert torch.equal(child.forward_features(x), features)
        # and it is the pool that answers: other weights of its token move the logits
        pool.attn.q.weight.normal_()
        assert error_of(child(x), expected) > 1e-6
    assert not attention_pools(parent)


@pytest.mark.parametrize("kind", SMALL)
def test_each_class_has_its_own_map_and_vector(kind: str) -> None:
    """Class 2's token moves class 2's logit alone."""
    x = IMAGES
    model = attention_pool_(randomize_scales_(small(kind).eval(), x), True, example=x).eval()
    (pool,) = attention_pools(model).values()
    nn.init.normal_(pool.attn.q.weight)
    inputs: list[Tensor] = []
    pool.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    before = model(x)
    maps = pool.attention_maps(pool.as_map(inputs[0]))
    torch.testing.assert_close(maps.sum((-2, -1)), torch.ones(2, 1, 5))
    before.sum().backward()
    assert all(p.grad is not None for p in pool.parameters())
    with torch.no_grad():
        pool.cls_token[:, 2].normal_()
        moved = (model(x) - before).abs().amax(0) > 1e-6
    assert moved.tolist() == [False, False, True, False, False]


@torch.no_grad()
def test_class_tokens_give_way(error_of: Any) -> None:
    """A network that reads its class token is pooled over its patches: other logits, and the place says so."""
    model, x = vit("deit_tiny_patch16_224").eval(), IMAGES
    place = find_place(model, x)
    assert (place.how, place.takes, place.prefix_tokens, place.averages) == ("head", "NLC", 1, False)
    tokens = model.forward_features(x)
    expected = model.head(model.fc_norm(tokens[:, 1:].mean(1)))
    kind = type(model)
    with pytest.raises(RecastError, match="allow_change=True"):
        attention_pool_(model, example=x)
    attention_pool_(model, example=x, allow_change=True)
    torch.testing.assert_close(model(x), expected)
    assert type(model) is kind
    expected = model(x)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(clone(x), expected)
        clone.attention_pool.attn.q.weight.normal_()  # its own, not the model's
        assert error_of(clone(x), expected) > 1e-6
        assert torch.equal(model(x), expected)


@torch.no_grad()
def test_settings_reach_the_layer() -> None:
    config = PoolConfig("single", start="paper", cls_in_keys=False, num_heads=4, mlp_ratio=2.0, init_values=0.5)
    model = attention_pool_(small("module, flat"), config=config, example=IMAGES)
    (pool,) = attention_pools(model).values()
    assert isinstance(pool, PooledLayer)
    assert (pool.start, pool.cls_in_keys, pool.attn.num_heads, pool.mlp.fc1.out_features) == ("paper", False, 4, 1024)
    assert set(pool.ls1.gamma.tolist()) == {0.5}
    half = attention_pool_(small("module, flat").to(torch.bfloat16).eval(), True, example=IMAGES.bfloat16())
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert not any(module.training for module in half.modules())


@pytest.mark.parametrize(
    "kind", ["module, flat", "module, map", "head, tokens", "module, the classifier a convolution"]
)
@torch.no_grad()
def test_a_new_classifier_keeps_the_pool(kind: str) -> None:
    for per_class in (False, True):
        model = attention_pool_(small(kind), per_class, example=IMAGES).eval()
        before = dict(attention_pools(model))
        model.reset_classifier(3)
        (pool,) = attention_pools(model).values()
        assert list(before.values()) == [pool]
        assert pool.num_classes == (3 if per_class else None)
        assert model(IMAGES).shape == (2, 3)
        assert model(IMAGES[:1]).shape == (1, 3)
        with pytest.raises(RecastError, match="pools by attention"):
            model.reset_classifier(3, "max")
        assert not [name for name in model.state_dict() if "replaced" in name]


def branches(run: Callable[[Any, Tensor, Tensor], Tensor], width: int) -> InCode:
    return InCode(
        lambda m, x: m.fc(run(m, m.a(x), m.b(x))),
        a=nn.Conv2d(3, 8, 3),
        b=nn.Conv2d(3, 8, 3),
        first=nn.AdaptiveAvgPool2d(1),
        pool=nn.AdaptiveAvgPool2d(1),
        fc=nn.Linear(width, 5),
    )


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "of a channel attention": lambda: branches(lambda m, f, g: (f * m.pool(f).sigmoid()).mean((2, 3)), 8),
    "beside another pooling": lambda: branches(lambda m, f, g: torch.cat((m.pool(f), m.first(g)), 1).flatten(1), 16),
    "before a mean in code": lambda: branches(lambda m, f, g: torch.cat((m.pool(f).flatten(1), g.mean((2, 3))), 1), 16),
}


@torch.no_grad()
@torch.no_grad()
def test_a_plan_holds_the_place_and_a_replay_runs_nothing() -> None:
    """A network of one's own that takes one shape of images and says nowhere which."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        convolution = nn.Conv2d(1, 4, 3, padding=1)
        flat = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        return nn.Sequential(nn.LayerNorm((1, 28, 20)), convolution, nn.ReLU(), *flat).eval()

    x = torch.randn(2, 1, 28, 20)
    model = attention_pool_(make(), True, example=x)
    planned = plan(make(), x, where="1", pool=PoolConfig("single"))
    for held in (model.recast_plan, planned):
        replayed = make()
        with captured_inputs([("", replayed)]) as inputs:
            recast_(replayed, Plan.from_json(held.to_json()))
        assert not inputs
        torch.testing.assert_close(replayed(x), make()(x))
    with pytest.raises(RecastError, match="for another model: InCode has no layer '3'"):
        recast_(pooling_in_code(), model.recast_plan)


def test_on_the_meta_device() -> None:
    for kind, per_class in (("module, flat", False), ("head, tokens after a class token", True)):
        with torch.device("meta"):
            model = SMALL[kind]()
        assert attention_pools(attention_pool_(model, per_class, example=IMAGES.to("meta")))


def resnet(**options: Any) -> nn.Module:
    return timm.create_model("resnet10t", **options)


def with_pool(pool: nn.Module, classifier: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Flatten(), classifier or nn.Linear(8, 5)).eval()


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 10 * super().forward(input)


class Doubled(nn.AdaptiveAvgPool2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("make", "per_class", "message"),
    [
        (
            lambda: pooling_in_code(lambda x: F.avg_pool2d(x, 16).flatten(1)),
            False,
            "cannot tell where InCode pools: expected a pooling module",
        ),
        (lambda: torchvision_models.alexnet(num_classes=5), False, "cannot tell where AlexNet pools"),
        *[(make, False, "cannot tell where InCode pools") for make in BRANCHES.values()],
        (lambda: with_pool(Doubled(1)), False, "cannot tell where|allow_change"),
        (lambda: with_pool(nn.AdaptiveAvgPool2d(1), Scaled(8, 5)), True, "Scaled"),
        (lambda: InCode(lambda _, x: {"out": x}), False, r"\(batch, classes\), got dict"),
        (lambda: resnet(num_classes=0), True, "are not those of one linear layer"),
        (lambda: resnet(num_classes=0, global_pool=""), False, r"got \(2, 512, 2, 2\)"),
        (lambda: resnet(global_pool="catavgmax"), False, "1024 numbers for 512 channels"),
        (lambda: attention_pool_(resnet()), True, "global_pool is attention pooling already"),
        (lambda: timm.create_model("test_vit", img_size=64, global_pool="map"), False, "pools by attention already"),
        (nn.ReLU, False, "has no parameters"),
    ],
)
def test_what_cannot_be_pooled(make: Any, per_class: bool, message: str) -> None:
    model = make().eval()
    with unchanged(model), pytest.raises(RecastError, match=message):
        attention_pool_(model, per_class, example=None if isinstance(model, nn.ReLU) else IMAGES)


@torch.no_grad()
def test_a_classifier_of_zeros_hides_nothing() -> None:
    """Some networks start with a classifier of zeros, and so they are when they are loaded: found all the same."""
    model = MambaOut(depths=(1, 1, 1, 1), dims=(8, 8, 8, 16), num_classes=5, head_fn="default").eval()
    nn.init.zeros_(model.get_classifier().weight)
    nn.init.zeros_(model.get_classifier().bias)
    place = find_place(model, IMAGES)
    assert (place.takes, place.dim, place.averages) == ("NHWC", 16, True)


def test_a_network_says_what_it_takes() -> None:
    attention_pool_(small("append after a ReLU"))  # tells no size
    grey = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    attention_pool_(grey, True)
    assert isinstance(grey[1], AttentionPool)
    odd = nn.Sequential(nn.LayerNorm((3, 28, 28)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5))
    with pytest.raises(RecastError, match="cannot run on the example"):
        attention_pool_(odd)
    attention_pool_(odd, example=torch.randn(1, 3, 28, 28))


def test_a_network_of_other_channels_than_timm_states_is_pooled_without_an_example() -> None:
    model = timm.create_model("resnet10t", num_classes=5, in_chans=1)
    assert model.pretrained_cfg["input_size"][0] == 3
    assert attention_pools(attention_pool_(model))


def test_a_classifier_of_ones_own_keeps_its_forward() -> None:
    model, x = with_pool(nn.AdaptiveAvgPool2d(1), Scaled(8, 5)), IMAGES
    torch.testing.assert_close(attention_pool_(copy.deepcopy(model), example=x)(x), model(x))


@pytest.mark.parametrize("error", [KeyError("x"), IndexError("x"), ZeroDivisionError("x"), RuntimeError("x")])
@pytest.mark.parametrize("example", [None, torch.zeros(2, 3, 8, 8)])
def test_a_networks_own_error_is_named(error: Exception, example: Tensor | None) -> None:
    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(RecastError, match="InCode") as raised:
        attention_pool_(InCode(fail, conv=nn.Conv2d(3, 4, 3)), example=example)
    causes = [raised.value.__cause__, getattr(raised.value.__cause__, "__cause__", None)]
    assert error in causes


@pytest.mark.parametrize(
    "pool",
    [
        nn.AdaptiveMaxPool2d(1),
        nn.AdaptiveAvgPool2d(2),
        nn.MaxPool2d(8),
        nn.Identity(),
        nn.Conv2d(8, 8, 8),
        timm.layers.SelectAdaptivePool2d(pool_type="catavgmax"),
        timm.layers.SelectAdaptivePool2d(pool_type="avgmax"),
        timm.layers.SelectAdaptivePool2d(pool_type="avg", input_fmt="NHWC"),
    ],
    ids=str,
)
def test_pooling_that_changed_since_the_plan_is_refused(pool: nn.Module) -> None:
    average = nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), average, nn.Flatten(), nn.Linear(8, 5))
    planned = plan(model, IMAGES, where="none", pool=PoolConfig("single"))
    model[1] = pool
    with pytest.raises(RecastError, match=r"the plan is for another model: 1 is .*, planned as an average: plan again"):
        recast_(model, planned)
    assert model[1] is pool
    for same in (average, nn.AvgPool2d(64), timm.layers.SelectAdaptivePool2d(flatten=True)):
        model[1] = same
        same.register_forward_hook(lambda *_: None)
        recast_(copy.deepcopy(model), planned)
    model[1] = nn.AdaptiveMaxPool2d(1)
    of_maximum = plan(model, IMAGES, where="none", pool=PoolConfig("single", allow_change=True))
    model[1] = average
    with pytest.raises(RecastError, match="planned as no average"):
        recast_(model, of_maximum)
