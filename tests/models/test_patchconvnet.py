from functools import cache
from typing import Any

import pytest
import timm
import torch
from layer_helpers import without_values
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recast.errors import RecastError
from recast.papers.patchconvnet.network import PatchConvNet
from recast.papers.patchconvnet.weights import NAMES, checkpoint_filter_fn, from_official, renamed

# name: parameters (with 1000 classes), GMAC at 224×224. None of them from our code: counted on the published one.
SIZES = {
    "s20": (10_235_896, 1.637),
    "s36": (16_233_976, 2.574),
    "s60": (25_231_096, 3.980),
    "s120": (47_723_896, 7.493),
    "b36": (63_699_976, 10.214),
    "b60": (99_388_936, 15.803),
    "b120": (188_611_336, 29.775),
    "l60": (176_009_576, 28.043),
    "l120": (334_294_376, 52.846),
}
IMAGES = (0.01 * torch.arange(2 * 3 * 64 * 64, dtype=torch.float64)).sin().view(2, 3, 64, 64)


@cache
def on_meta(name: str, **options: Any) -> PatchConvNet:
    with without_values():
        return timm.create_model(f"patchconvnet_{name}", **options).eval().requires_grad_(False)


def gmac(model: nn.Module, side: int = 224) -> float:
    with FlopCounterMode(display=False) as flops:
        model(torch.empty(1, 3, side, side, device="meta"))
    return flops.get_total_flops() / 2e9


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tiny(num_classes: int = 3, depth: int = 2, **options: Any) -> PatchConvNet:
    return PatchConvNet(16, depth, num_classes, **options).double().eval()


def to_official(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the published names."""
    pairs = [(ours, theirs) for theirs, ours in NAMES]
    published = {renamed(name, pairs): value for name, value in weights.items()}
    if weights["pool.cls_token"].shape[1] > 1:
        for kind in ("weight", "bias"):
            published |= {f"head.{j}.{kind}": row for j, row in enumerate(published.pop(f"head.{kind}").split(1))}
    return published


def golden(**options: Any) -> PatchConvNet:
    """The network whose outputs the published code gave: values by the order of the published names."""
    model = tiny(**options)
    filled = {}
    for t, (name, like) in enumerate(sorted(to_official(model.state_dict()).items())):
        value = 0.3 * torch.sin(0.7 * torch.arange(like.numel(), dtype=torch.float64) + 1.3 * t)
        is_scale = name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) or "gamma" in name
        filled[name] = (1 + value if is_scale else value).view(like.shape)
    model.load_state_dict(from_official(filled))
    return model


def close(measured: Tensor, expected: list[Any] | float, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(measured, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_and_macs(name: str) -> None:
    parameters, cost = SIZES[name]
    model = on_meta(name)
    assert count(model) == parameters
    assert gmac(model) == pytest.approx(cost, rel=1e-3)


def test_other_heads_sizes_and_norms() -> None:
    assert count(on_meta("s60", num_classes=21_841)) == 33_254_881
    assert count(on_meta("s60_multi")) == 25_614_712
    assert gmac(on_meta("s60_multi")) == pytest.approx(5.31, abs=5e-3)
    assert gmac(on_meta("s60"), 384) == pytest.approx(11.683, rel=1e-3)
    assert count(on_meta("s20_bn")) == count(on_meta("s20"))
    assert [name for name, m in on_meta("s20_bn").named_modules() if isinstance(m, nn.BatchNorm2d)] == [
        f"blocks.{i}.norm" for i in range(20)
    ]


def published_names(depth: int, classes: int, per_class: bool) -> set[str]:
    """Of a published checkpoint, written down from its description."""
    pool = [
        f"blocks_token_only.0.{name}"
        for name in ("norm1", "norm2", "attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2")
    ]
    layers = ["norm", *pool, *([f"head.{j}" for j in range(classes)] if per_class else ["head"])]
    names = {"cls_token", "blocks_token_only.0.gamma_1", "blocks_token_only.0.gamma_2"}
    names |= {f"patch_embed.proj.{i}.0.weight" for i in (0, 2, 4, 6)} | {f"blocks.{i}.gamma_1" for i in range(depth)}
    for i in range(depth):
        attention = [f"attn.qkv_pos.{name}" for name in ("0", "2", "4.conv_reduce", "4.conv_expand", "5")]
        layers += [f"blocks.{i}.{name}" for name in ("norm1", *attention)]
    return names | {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}


@pytest.mark.parametrize(("name", "tensors", "depth"), [("s60", 807, 60), ("s120", 1587, 120), ("s60_multi", 2805, 60)])
def test_published_layout_and_back(name: str, tensors: int, depth: int) -> None:
    weights = on_meta(name).state_dict()
    published = to_official(weights)
    assert len(published) == tensors
    assert published.keys() == published_names(depth, 1000, name.endswith("_multi"))
    back = from_official(published)
    assert {key: value.shape for key, value in back.items()} == {key: value.shape for key, value in weights.items()}


def test_golden_values_with_one_token() -> None:
    model = golden()
    assert count(model) == 6_249
    with torch.no_grad():
        stem, trunk, logits = model.stem(IMAGES), model.forward_features(IMAGES), model(IMAGES)
        attention = model.pool(trunk, return_attention=True)[1]
    close(
        logits, [[-0.026637853446, -0.401749907529, 0.022250049034], [-0.113302599016, -0.537171309113, 0.053932388231]]
    )
    close(torch.stack([stem.mean(), stem.std()]), [-0.014764404350, 2.415805595437])
    close(torch.stack([trunk.mean(), trunk.std()]), [-0.137484056940, 2.433527659903])
    assert attention.shape == (2, 1, 1, 17)
    close(attention[:, 0, 0, 0], [0.330771132116, 0.301525250813])
    first = [9.57987048e-07, 2.37905977e-04, 3.57893744e-04, 6.47560900e-04, 1.51398771e-06]
    close(attention[0, 0, 0, 1:6], first, tolerance=1e-12)


def test_golden_values_with_a_token_a_class() -> None:
    model = golden(per_class=True)
    assert count(model) == 6_281
    with torch.no_grad():
        logits = model(IMAGES)
        attention = model.pool(model.forward_features(IMAGES), return_attention=True)[1]
    close(
        logits, [[0.291203287122, -0.024317572668, -1.265743950234], [0.395787707975, -0.065394378774, -1.185108251306]]
    )
    assert attention.shape == (2, 1, 3, 16)
    close(attention[0, 0, 0, :3], [4.86771828e-05, 1.26415544e-05, 9.61733162e-06], tolerance=1e-13)
    close(attention[0, 0, 1, :3], [3.24319659e-08, 6.72025242e-08, 8.44159198e-08], tolerance=1e-15)
    close(attention[0, 0, 2, :3], [0.029681528461, 0.082137594107, 0.101372236437])


@torch.no_grad()
def test_the_start_of_a_per_class_network() -> None:
    """The same logits where the single token does not look at itself; others where it does."""
    single = golden()
    multi = tiny(per_class=True)
    multi.load_state_dict(checkpoint_filter_fn(single.state_dict(), multi))
    assert float((single(IMAGES) - multi(IMAGES)).abs().max()) > 0.01
    same = tiny(per_class=True, cls_in_keys=True)
    same.load_state_dict(checkpoint_filter_fn(single.state_dict(), same))
    torch.testing.assert_close(same(IMAGES), single(IMAGES), rtol=0, atol=1e-14)
    single.pool.cls_in_keys = False
    torch.testing.assert_close(single(IMAGES), multi(IMAGES), rtol=0, atol=1e-14)


@pytest.mark.parametrize("per_class", [False, True])
def test_published_weights_in_their_wrappers(per_class: bool) -> None:
    model = golden(per_class=per_class)
    published = to_official(model.state_dict())
    parallel = {f"module.{name}": value for name, value in published.items()}
    for checkpoint in (published, {"model": published, "epoch": 3}, parallel, {"model": parallel}):
        loaded = tiny(per_class=per_class)
        loaded.load_state_dict(checkpoint_filter_fn(checkpoint, loaded))
        assert torch.equal(loaded(IMAGES), model(IMAGES))
    # ours come back as they are, unknown names stay for the strict load to report
    assert from_official(model.state_dict()).keys() == model.state_dict().keys()
    assert "blocks.0.attn.other" in from_official(published | {"blocks.0.attn.other": torch.ones(1)})


def test_heads_of_classes_keep_their_order() -> None:
    model = tiny(num_classes=12, per_class=True)
    published = to_official(model.state_dict())
    shuffled = dict(sorted(published.items(), key=lambda item: item[0][::-1]))  # head.10 before head.2
    assert torch.equal(from_official(shuffled)["head.weight"], model.head.weight)
    assert torch.equal(published["head.10.weight"][0], model.head.weight[10])
    del published["head.4.bias"]
    with pytest.raises(RecastError, match=r"heads of 12 classes but 1 .* \(first: head.4.bias\)"):
        from_official(published)


def create(name: str, published: dict[str, Tensor], **options: Any) -> PatchConvNet:
    """As `pretrained=True` would, with the weights at hand instead of at their address."""
    overlay = {"state_dict": {"model": published}, "num_classes": 3}
    options = {"embed_dim": 16, "depth": 2, "num_classes": 3} | options
    return timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options).double().eval()


def test_timm_loads_published_weights() -> None:
    for name, per_class in (("patchconvnet_s60", False), ("patchconvnet_s60_multi", True)):
        model = golden(per_class=per_class)
        published = to_official(model.state_dict())
        loaded = create(name, published)
        torch.testing.assert_close(loaded(IMAGES), model(IMAGES), rtol=0, atol=1e-5)  # loaded in single precision
        of_seven = create(name, published, num_classes=7)
        assert of_seven(IMAGES).shape == (2, 7)
        assert torch.equal(of_seven.pool.attn.q.weight, loaded.pool.attn.q.weight)
        assert of_seven.head.weight.detach().abs().max() < 0.1  # new, as the tokens are
        assert (of_seven.pool.cls_token.shape == (1, 7, 16)) == per_class
        maps = create(name, published, features_only=True, out_indices=(-1,))(IMAGES)
        torch.testing.assert_close(maps[-1], model.forward_features(IMAGES), rtol=0, atol=1e-5)
    single = to_official(golden().state_dict())
    multi = create("patchconvnet_s60_multi", single)  # one token into a token a class
    assert torch.equal(multi.pool.cls_token[0, 0], multi.pool.cls_token[0, 2])


def test_new_classes_get_new_tokens() -> None:
    model = tiny(per_class=True)
    tokens = model.pool.cls_token
    model.reset_classifier(3)
    assert model.pool.cls_token is tokens
    model.reset_classifier(5)
    assert model.pool.cls_token.shape == (1, 5, 16)
    assert model.pool.cls_token.dtype == model.head.weight.dtype == torch.float64
    assert model(IMAGES).shape == (2, 5)
    model.reset_classifier(0)
    assert model(IMAGES).shape == (2, 5, 16)
