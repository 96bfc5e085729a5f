"""Where pools and class tokens look: recorded, as tensors, and as layers of a page."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from recast.analysis.class_maps import class_maps
from recast.analysis.record import PoolMaps, record
from recast.analysis.tokens import record_tokens
from recast.errors import RecastError
from recast.explain.class_layers import pool_layer
from recast.explain.make import explain, make_scene
from recast.explain.pack import pack_maps
from recast.explain.pictures import Input
from recast.explain.predictions import Ranked, percent, ranked
from recast.explain.record_maps import record_maps
from recast.explain.scene import Maps, Scene
from recast.models.patchconvnet import PatchConvNet
from recast.surgery.apply import recast_
from recast.surgery.planning import plan
from recast.surgery.pooling.swap import attention_pool_

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "num_heads": 3, "num_classes": 5}
QUANTISED = 0.0041


def moved(model: nn.Module) -> nn.Module:
    """Every parameter off its start, so that maps differ from pixel to pixel, and from class to class."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def patchconvnet(**options: Any) -> Any:
    return moved(PatchConvNet(16, 1, 7, **options))


def resnet(**options: Any) -> nn.Module:
    return timm.create_model("resnet10t", num_classes=7, channels=(8, 8, 8, 8), stem_width=8, **options)


def scene_of(model: nn.Module, *images: Tensor, classes: list[str] | None = None) -> Scene:
    inputs = [Input(f"image {i}", pixels) for i, pixels in enumerate(images)]
    return make_scene("title", inputs, [(None, {"recast": model})], classes, ((0.0,) * 3, (1.0,) * 3), {"recast": "it"})


def by_hand(pool: Any, x: Tensor, heads: int) -> Tensor:
    """softmax(W_q LN(c) · W_k u / √(C/H)) over u = LN(c), LN(x): (B, H, T, m)."""
    patches = pool.norm1(x.flatten(2).mT)
    tokens = pool.norm1(pool.cls_token).expand(len(x), -1, -1)
    keys = torch.cat((tokens, patches), 1) if pool.cls_in_keys else patches
    q, k = pool.attn.q(tokens).unflatten(-1, (heads, -1)), pool.attn.k(keys).unflatten(-1, (heads, -1))
    return (torch.einsum("bthc,bmhc->bhtm", q, k) / q.shape[-1] ** 0.5).softmax(-1).detach()


@pytest.mark.parametrize(("per_class", "heads"), [(False, 1), (False, 2), (True, 1), (True, 2)])
def test_pools_are_recorded(per_class: bool, heads: int) -> None:
    model = patchconvnet(per_class=per_class, num_heads=heads).double()
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with record(model) as maps:
        model(x)
    weights = by_hand(model.pool, model.forward_features(x), heads)
    tokens = weights.shape[2] if model.pool.cls_in_keys else 0
    of = maps["pool"]
    assert isinstance(of, PoolMaps)
    assert not of.weights.requires_grad
    assert torch.allclose(of.weights.flatten(-2), weights[..., tokens:], rtol=0, atol=1e-12)
    assert of.weights.shape == (2, heads, 7 if per_class else 1, 4, 6)
    if per_class:
        assert of.tokens is None
        assert torch.allclose(of.weights.sum((-2, -1)), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-12)
    else:
        assert of.tokens is not None
        assert torch.allclose(of.tokens, weights[..., 0], rtol=0, atol=1e-12)
    assert torch.allclose(class_maps(model, x), of.weights.mean(1), rtol=0, atol=1e-15)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_likeliest_classes_of_every_picture() -> None:
    model = patchconvnet(per_class=True, num_heads=2).eval()
    with torch.no_grad():
        model.head.weight.mul_(3)
    images = [torch.rand(3, 64, 48), 4 * torch.rand(3, 64, 48) - 2]
    names = [f"animal {i}" for i in range(7)]
    scene = scene_of(model, *images, classes=names)
    ((layer,),) = [state.layers for state in scene.states]
    assert (layer.name, layer.kind, layer.kernel, layer.offsets, layer.padded) == (
        "pool",
        "classes",
        (1, 1),
        (),
        (4, 3),
    )
    assert [(axis.start, axis.step, axis.count) for axis in layer.keys] == [(0, 1, 4), (0, 1, 3)]
    assert "one token a class, 2 heads (their mean)" in layer.description
    told = []
    for image, picture in zip(images, scene.pictures, strict=True):
        with torch.no_grad():
            best = model(image[None]).softmax(1)[0].topk(3)
        maps = picture.maps[0]["pool"]
        assert maps.names == tuple(
            f"{names[i]} {percent(p)}" for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
        wanted = class_maps(model, image[None])[0, best.indices].numpy()
        assert maps.values.shape == (3, 1, 1, 4, 3)
        assert np.all(np.abs(maps.values[:, 0, 0] - wanted) <= QUANTISED * wanted.max((-2, -1), keepdims=True))
        assert (maps.rows, maps.columns, maps.signed) == ((0,), (0,), False)
        told.append(maps.names)
    assert told[0] != told[1]
    unnamed = scene_of(model, images[0]).pictures[0].maps[0]["pool"].names
    assert [name.replace("class", "animal", 1) for name in unnamed] == list(told[0])


def test_single_tokens_tell_what_they_keep() -> None:
    model, image = patchconvnet(num_heads=2), torch.rand(3, 64, 48)
    scene = scene_of(model, image)
    with record(model.eval()) as maps, torch.no_grad():
        model(image[None])
    of = maps["pool"]
    assert isinstance(of, PoolMaps)
    assert of.tokens is not None
    ((layer,),) = [state.layers for state in scene.states]
    assert layer.names == ("mean", "head 1", "head 2")
    kept = [float(of.tokens.mean()), *of.tokens.flatten().tolist()]
    shown = scene.pictures[0].maps[0]["pool"]
    assert shown.names == tuple(
        f"{n} ({percent(p)} on the token itself)" for n, p in zip(layer.names, kept, strict=True)
    )
    assert shown.values.sum((1, 2, 3, 4)) == pytest.approx([1 - p for p in kept], abs=0.02)
    assert "among its own keys" in layer.description
    alone, _ = pool_layer("pool", PoolMaps(of.weights[:, :1], None), None, ())
    assert (alone.names, alone.description) == (("what is pooled",), "attention pooling, one token")


@torch.no_grad()
def test_tokens_without_maps_lie_on_the_grid_of_the_image() -> None:
    """LeViT's later stages make no maps: 96 tokens of a 128×192 image are 8×12, and where nothing fits, no picture."""
    network = nn.Sequential(nn.Conv2d(3, 6, 8, stride=8), nn.Flatten(2))

    class Tokens(nn.Module):
        def __init__(self, keep: int) -> None:
            super().__init__()
            self.stem, self.keep, self.head = network, keep, nn.Linear(6, 4)

        def forward_features(self, x: Tensor) -> Tensor:
            return self.stem(x).transpose(1, 2)[:, :: self.keep]  # 16×24 patches, every keep-th

        def forward_head(self, x: Tensor) -> Tensor:
            return self.head(x.mean(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.forward_head(self.forward_features(x))

    images = torch.rand(2, 3, 128, 192)
    fits, odd = (attention_pool_(Tokens(keep), True, example=images).eval() for keep in (4, 5))
    assert class_maps(fits, images).shape == (2, 4, 8, 12)
    with pytest.raises(RecastError, match="grid is not known"):
        class_maps(odd, images)
    scene = scene_of(odd, images[0])
    assert not scene.states[0].layers
    assert "attention_pool" in " ".join(scene.notes)


def test_a_class_token_that_nobody_reads_explains_nothing() -> None:
    options = TINY | {"depth": 1}
    reads, averages = (VisionTransformer(**options, global_pool=pool).eval() for pool in ("token", "avg"))
    assert class_maps(reads, torch.rand(1, 3, 32, 32)).shape == (1, 1, 4, 4)
    with pytest.raises(RecastError, match="has no class maps"):
        class_maps(averages, torch.rand(1, 3, 32, 32))
    names = [layer.name for layer in scene_of(averages, torch.rand(3, 32, 32)).states[0].layers]
    assert names == ["blocks.0.attn"]


def test_what_is_not_finite_is_not_drawn() -> None:
    with pytest.raises(RecastError, match="pool has attention that is not finite"):
        pool_layer("pool", PoolMaps(torch.full((1, 1, 1, 2, 2), torch.nan), None), None, ())


def test_an_even_map_is_even_in_blocks_too() -> None:
    _, stored = pool_layer("pool", PoolMaps(torch.full((1, 1, 1, 129, 131), 1e-4), None), None, ())
    assert stored.pool == 2
    assert float(np.ptp(stored.values)) == 0


def test_a_nearly_even_map_keeps_its_steps() -> None:
    """Weights within a per cent of each other: a byte from zero would tell three of them apart."""
    weights = 1 / 64 * (1 + 0.01 * torch.rand(1, 1, 1, 8, 8))
    _, stored = pool_layer("pool", PoolMaps(weights, None), None, ())
    assert len(np.unique(stored.values)) > 40
    assert np.abs(stored.values[0, 0, 0] - weights[0, 0, 0].numpy()).max() < 0.0041 * np.ptp(weights.numpy())
    assert packed_back(stored) == pytest.approx(stored.values.flatten(), rel=1e-6)


def packed_back(maps: Maps) -> np.ndarray:
    """Decoded from the page's JSON, as its script does."""
    packed = pack_maps(maps)
    content = zlib.decompress(base64.b64decode(packed["data"]), -15)
    scale, low = np.frombuffer(content[:8], "<f4")
    assert packed["fromLeast"]
    return low + scale * (np.frombuffer(content[8:], np.uint8) / 255) ** 2


def test_outputs_that_rank_nothing_show_the_first_classes() -> None:
    maps = PoolMaps(torch.rand(1, 1, 5, 2, 3), torch.full((1, 1, 5), 0.25))
    layer, stored = pool_layer("pool", maps, 5, ())
    assert stored.names[0] == "class 0 (25 % on the token itself)"
    assert np.allclose(stored.values[2, 0, 0], maps.weights[0, 0, 2], atol=QUANTISED)
    assert len(stored.names) == len(layer.names) == 3
    assert [len(pool_layer("pool", PoolMaps(torch.rand(1, 1, 2, 2, 3), None), 2, ())[1].names)] == [2]
    best = [Ranked(4, "four", 0.995), Ranked(1, "1", 0.004)]
    assert pool_layer("pool", maps._replace(tokens=None), 5, best)[1].names == ("four 100 %", "class 1 0.4 %")
    assert ranked(torch.zeros(1, 3, 2), None, 3) == ()
    with pytest.raises(RecastError, match="2 names of classes for a network with 3 outputs"):
        ranked(torch.zeros(1, 3), ["a", "b"], 3)


@pytest.mark.parametrize("per_class", [False, True])
def test_swapped_pools(per_class: bool) -> None:
    model = attention_pool_(resnet(), per_class, example=torch.randn(1, 3, 64, 64))
    assert class_maps(model, torch.randn(1, 3, 64, 96)).std() < 1e-6  # starts as the average
    recast_(model, plan(model, torch.zeros(1, 3, 64, 96), where=["layer4.0.conv2"]))
    x = torch.rand(3, 64, 96)
    kinds = {layer.name: (layer.kind, layer.padded) for layer in scene_of(moved(model), x).states[0].layers}
    pool = next(name for name, (kind, _) in kinds.items() if kind == "classes")
    assert kinds == {"layer4.0.conv2": ("gpsa", (4, 5)), pool: ("classes", (2, 3))}
    maps = class_maps(model, x[None])
    assert maps.shape == (1, 7 if per_class else 1, 2, 3)
    assert maps.std() > 1e-3


def test_pools_of_tokens_lie_on_their_grid() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", depth=1, dynamic_img_size=True, **TINY | {"global_pool": "avg"})
    moved(attention_pool_(vit, example=torch.randn(1, 3, 32, 32))).eval()
    x = torch.randn(2, 3, 32, 48)
    with record(vit) as maps:
        vit(x)
    ((_, of),) = maps.items()
    assert of.weights.shape == (2, 1, 1, 4, 6)
    assert torch.allclose(class_maps(vit, x), of.weights[:, 0])


def test_class_tokens() -> None:
    x = torch.randn(2, 3, 32, 32)
    cait = moved(timm.create_model("cait_xxs24_224", depth=2, **TINY)).eval()
    deit = moved(timm.create_model("deit_tiny_distilled_patch16_224", depth=2, **TINY)).train()
    with record_tokens(cait) as maps:
        cait(x)
    last = maps["blocks_token_only.1.attn"].weights[:, :, 0, 1:].mean(1)
    assert torch.equal(class_maps(cait, x), last.unflatten(-1, (1, 4, 4)).detach())
    with record_tokens(deit.eval()) as maps:
        deit(x)
    deit.train()
    last = maps["blocks.1.attn"].weights[:, :, 0, 2:].mean(1)
    assert torch.equal(class_maps(deit, x), last.unflatten(-1, (1, 4, 4)).detach())
    assert deit.training


def test_networks_without_class_maps() -> None:
    for model in (
        resnet(),
        timm.create_model(
            "vit_tiny_patch16_224", depth=1, class_token=False, reg_tokens=1, **TINY | {"global_pool": "avg"}
        ),
    ):
        with pytest.raises(RecastError, match=r"has no class maps: .*attention_pool_"):
            class_maps(model, torch.randn(1, 3, 32, 32))


def test_pages_of_transformers(tmp_path: Path) -> None:
    """Layers in the order of the network; the patches' maps and the tokens'."""
    options = TINY | {"depth": 2}
    x, tokens = torch.rand(3, 32, 32), ("class token", "distillation token")
    deit = scene_of(moved(timm.create_model("deit_tiny_distilled_patch16_224", **options)), x)
    named = [name for i in range(2) for name in (f"blocks.{i}.attn", *(f"blocks.{i}.attn ({t})" for t in tokens))]
    assert deit.layer_order == tuple(named)
    first, of_class = deit.states[0].layers[:2]
    assert (first.kind, first.names, first.padded) == ("maps", ("head 1", "head 2", "head 3"), (4, 4))
    assert first.description == "3 heads over 4×4 patches and 2 tokens before them"
    assert (of_class.kind, of_class.names[0], len(of_class.names)) == ("classes", "mean", 4)

    model = moved(timm.create_model("cait_xxs24_224", **options)).eval()
    recorded = record_maps(model, x[None])
    assert [layer.name for layer in recorded.layers][-1] == "blocks_token_only.1.attn (class token)"
    assert [layer.kind for layer in recorded.layers] == ["maps", "maps", "classes", "classes"]
    with record_tokens(model) as maps:
        model(x[None])
    stored = recorded.maps["blocks.1.attn"]
    wanted = maps["blocks.1.attn"].weights[0].detach().reshape(3, 4, 4, 4, 4).numpy()
    assert stored.signed
    assert np.all(np.abs(stored.values - wanted) <= 2 * QUANTISED * np.abs(wanted).max((-2, -1), keepdims=True))
    of_class = recorded.maps["blocks_token_only.1.attn (class token)"].values[:, 0, 0]
    wanted = maps["blocks_token_only.1.attn"].weights[0, :, 0, 1:].detach().reshape(3, 4, 4).numpy()
    assert np.allclose(of_class[1:], wanted, atol=QUANTISED * wanted.max())
    assert np.allclose(of_class[0], wanted.mean(0), atol=QUANTISED * wanted.max())
    convit = timm.create_model("convit_tiny", local_up_to_layer=1, **options | {"num_heads": 4})
    assert [layer.kind for layer in scene_of(convit, x).states[0].layers] == ["maps", "maps", "classes"]
    assert explain(convit, x, tmp_path / "page.html").stat().st_size > 10_000


def test_what_has_no_maps_is_said(tmp_path: Path) -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, embed_dim=6, depths=(2, 1), num_heads=(1, 2),
                             window_size=4, num_classes=3)  # fmt: skip
    x = torch.rand(3, 32, 32)
    scene = scene_of(swin, x, x)
    assert scene.layer_order == ()
    assert len(scene.notes) == 2  # not once an image
    assert scene.notes[0].startswith("Without maps: layers.0.blocks.0.attn, layers.0.blocks.1.attn (attention within")
    with pytest.raises(RecastError, match="cannot take an image of 24×24 pixels"):
        explain(timm.create_model("deit_tiny_patch16_224", depth=1, **TINY), x[:, :24, :24], tmp_path / "page.html")
