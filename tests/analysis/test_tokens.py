"""Attention maps of networks that are not ours, against the same weights computed here from the modules' parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.models.mlp_mixer import Affine, MlpMixer, ResBlock
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from recast.analysis.grids import Grids
from recast.analysis.tokens import MLP, NO_GRID, NOT_WHOLE, TokenMaps, record_tokens, token_names
from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "num_heads": 3, "num_classes": 5}
CAIT: dict[str, Any] = TINY | {"num_heads": 2, "embed_dim": 8}


def tiny(name: str, **options: Any) -> nn.Module:
    """A transformer in fp64 whose attention is far from uniform."""
    model = timm.create_model(name, **options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def recorded(model: nn.Module, x: Tensor) -> tuple[Any, dict[str, Tensor]]:
    """Maps, and what every module was given."""
    given: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, inputs: given.__setitem__(name, inputs[0])

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in model.named_modules() if name]
    with torch.no_grad(), record_tokens(model) as maps:
        model(x)
    for handle in handles:
        handle.remove()
    return maps, given


def attention(q: Tensor, k: Tensor, heads: int) -> Tensor:
    """softmax(Q Kᵀ / √d), one head and one image at a time."""
    made = []
    for image in range(len(q)):
        width = q.shape[-1] // heads
        parts = [slice(h * width, (h + 1) * width) for h in range(heads)]
        made.append(torch.stack([(q[image][:, p] @ k[image][:, p].T / width**0.5).softmax(-1) for p in parts]))
    return torch.stack(made)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_deit(name: str) -> None:
    model = tiny(name, depth=2, **TINY)
    maps, given = recorded(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert list(maps) == ["blocks.0.attn", "blocks.1.attn"]
    before = 1 + ("distilled" in name)
    for block, of in maps.items():
        qkv = model.get_submodule(f"{block}.qkv")(given[block])
        wanted = attention(qkv[..., :12], qkv[..., 12:24], 3)
        assert torch.allclose(of.weights, wanted, rtol=0, atol=1e-12)
        assert torch.allclose(of.weights.sum(-1), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-12)
        assert (of.grid, of.num_prefix) == ((4, 4), before)
        assert torch.equal(of.prefix.flatten(-2), of.weights[..., :before, before:])
        assert torch.equal(of.patches[:, :, 6, 2, 1], of.weights[..., before + 6, before + 2 * 4 + 1])
    assert token_names(model, before) == ("class token", "distillation token")[:before]


def test_cait_gives_every_map_of_both_stages() -> None:
    model = tiny("cait_xxs24_224", **CAIT)
    maps, given = recorded(model, torch.randn(1, 3, 32, 32, dtype=torch.float64))
    assert len(maps) == 26
    talking, name = model.blocks[3].attn, "blocks.3.attn"
    q, k, _ = talking.qkv(given[name]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    scores = torch.einsum("bhnd,bhmd->bnmh", q, k) / 2
    wanted = talking.proj_w(talking.proj_l(scores).softmax(2)).permute(0, 3, 1, 2)
    assert torch.allclose(maps[name].weights, wanted, rtol=0, atol=1e-12)
    assert maps[name].num_prefix == 0
    assert maps[name].prefix.shape == (1, 2, 0, 4, 4)
    assert (maps[name].weights < 0).any()
    for name in ("blocks_token_only.0.attn", "blocks_token_only.1.attn"):
        module, tokens = model.get_submodule(name), given[name]
        wanted = attention(module.q(tokens[:, :1]), module.k(tokens), 2)
        assert torch.allclose(maps[name].weights, wanted, rtol=0, atol=1e-12)
        assert maps[name].weights.shape == (1, 2, 1, 17)
        assert maps[name].patches is None
        assert torch.equal(maps[name].prefix.flatten(), wanted[:, :, 0, 1:].flatten())


def test_convit_gives_the_gated_mix() -> None:
    model = tiny("convit_tiny", **TINY | {"embed_dim": 4, "num_heads": 4}, depth=3, local_up_to_layer=2)
    maps, given = recorded(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert [type(model.get_submodule(name)).__name__ for name in maps] == ["GPSA", "GPSA", "MHSA"]
    for name in ("blocks.0.attn", "blocks.1.attn"):
        assert torch.allclose(maps[name].weights, model.get_submodule(name).get_attention(given[name]), atol=1e-12)
        assert maps[name].num_prefix == 0
    width = model.embed_dim
    qkv = model.blocks[2].attn.qkv(given["blocks.2.attn"])
    wanted = attention(qkv[..., :width], qkv[..., width : 2 * width], 4)
    assert torch.allclose(maps["blocks.2.attn"].weights, wanted, rtol=0, atol=1e-12)
    assert maps["blocks.2.attn"].num_prefix == 1


def test_the_model_is_left_as_it_was() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=2, **TINY)
    model.blocks[1].attn.fused_attn = False
    model.blocks[0].attn.fused_attn = 1
    before = [dict(vars(module)) for module in model.modules()]
    x = torch.randn(1, 3, 32, 32)
    outside = model.eval()(x)
    with record_tokens(model):
        assert not model.blocks[0].attn.fused_attn
        assert torch.allclose(model(x), outside, atol=1e-5)
    with pytest.raises(ZeroDivisionError), record_tokens(model):
        raise ZeroDivisionError
    with pytest.raises(AssertionError), record_tokens(model):
        model(torch.randn(1, 3, 30, 30))
    assert model.blocks[0].attn.fused_attn == 1
    assert not model.blocks[1].attn.fused_attn
    for module, attributes in zip(model.train().modules(), before, strict=True):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert vars(module) == attributes


def test_weights_are_those_before_dropout() -> None:
    model = timm.create_model("deit_tiny_patch16_224", depth=1, attn_drop_rate=0.5, **TINY).train()
    with record_tokens(model) as maps:
        model(torch.randn(1, 3, 32, 32))
    assert not maps["blocks.0.attn"].weights.requires_grad
    assert torch.allclose(maps["blocks.0.attn"].weights.sum(-1), torch.ones(()), atol=1e-6)


def test_rectangles_and_registers() -> None:
    model = tiny("vit_tiny_patch16_224", depth=1, dynamic_img_size=True, reg_tokens=2, **TINY | {"patch_size": 16})
    maps, _ = recorded(model, torch.randn(2, 3, 96, 160, dtype=torch.float64))
    of = maps["blocks.0.attn"]
    assert (of.grid, of.num_prefix) == ((6, 10), 3)
    assert of.patches.shape == (2, 3, 60, 6, 10)
    assert token_names(model, 3) == ("class token", "register 1", "register 2")
    assert token_names(nn.Linear(2, 2), 2) == ("token 1", "token 2")


def test_attention_that_shows_nothing_is_an_error() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_drop = nn.Dropout()

        def forward(self, x: Tensor, **_options: Any) -> Tensor:
            return x

    model = timm.create_model("deit_tiny_patch16_224", depth=3, **TINY)
    model.blocks[1].attn = Silent()
    with pytest.raises(RecastError, match=r"^blocks\.1\.attn of VisionTransformer gives no weights"):
        with record_tokens(model) as maps:
            model(torch.randn(1, 3, 32, 32))
    assert list(maps) == ["blocks.0.attn", "blocks.2.attn"]
    with record_tokens(model) as maps:  # nothing was called
        pass
    assert maps == {}


def test_other_attention_is_named() -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, embed_dim=6, depths=(2, 1), num_heads=(1, 2),
                             window_size=4, num_classes=3)  # fmt: skip
    with record_tokens(swin) as maps:
        swin(torch.randn(1, 3, 32, 32))
    assert maps == {}
    assert maps.left_out == {
        "layers.0.blocks.0.attn": NOT_WHOLE,
        "layers.0.blocks.1.attn": NOT_WHOLE,
        "layers.1.blocks.0.attn": NO_GRID,
    }
    # as many channels a head as there are patches: still no map over them
    xcit = timm.create_model("xcit_nano_12_p16_224", img_size=64, embed_dim=32, num_heads=2, depth=1, num_classes=3)
    with record_tokens(xcit) as maps:
        xcit(torch.randn(1, 3, 64, 64))
    assert list(maps) == ["cls_attn_blocks.0.attn", "cls_attn_blocks.1.attn"]
    assert maps.left_out == {"blocks.0.attn": NOT_WHOLE}


def test_layers_that_mix_tokens_without_attention() -> None:
    options: dict[str, Any] = {"img_size": (16, 24), "patch_size": 8, "num_blocks": 2, "embed_dim": 8, "num_classes": 3}
    resmlp = MlpMixer(block_layer=ResBlock, mlp_ratio=4, norm_layer=Affine, **options)
    with record_tokens(resmlp) as maps:
        resmlp(torch.randn(2, 3, 16, 24))
    assert list(maps) == ["blocks.0.linear_tokens", "blocks.1.linear_tokens"]
    of, layer = maps["blocks.1.linear_tokens"], resmlp.blocks[1].linear_tokens
    assert (of.is_linear, of.grid, of.num_prefix) == (True, (2, 3), 0)
    x = torch.randn(1, 8, 6)
    applied = torch.einsum("qk,bck->bcq", of.patches[0, 0].flatten(1), x) + layer.bias
    assert torch.allclose(applied, layer(x), atol=1e-6)
    mixer = MlpMixer(**options)
    with record_tokens(mixer) as maps:
        mixer(torch.randn(1, 3, 16, 24))
    assert maps == {}
    assert maps.left_out == {"blocks.0.mlp_tokens": MLP, "blocks.1.mlp_tokens": MLP}


def test_torch_attention_gives_its_caller_what_it_asked_for() -> None:
    vit = VisionTransformer(32, 8, 2, 3, 12, 24, num_classes=5).eval()
    nn.init.normal_(vit.heads.head.weight)
    x = torch.randn(2, 3, 32, 32)
    outside = vit(x)
    with record_tokens(vit) as maps:
        assert torch.allclose(vit(x), outside, atol=1e-5)
    name = "encoder.layers.encoder_layer_1.self_attention"
    assert list(maps)[1] == name
    assert (maps[name].grid, maps[name].weights.shape) == ((4, 4), (2, 3, 17, 17))
    assert token_names(vit, 1) == ("class token",)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn = nn.Conv2d(3, 6, 4, 4), nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: Tensor, *options: Any) -> Any:
            tokens = self.embed(x).flatten(2).transpose(1, 2)
            return self.attn(tokens, tokens, tokens, *options)

    caller, x = Caller(), torch.randn(1, 3, 8, 12)
    for options in ((), (None, False), (None, True, None, False)):
        wanted = caller(x, *options)
        with record_tokens(caller) as maps:
            given = caller(x, *options)
        assert torch.allclose(given[0], wanted[0], atol=1e-6)
        assert (given[1] is None) == (wanted[1] is None)
        if wanted[1] is not None:
            assert torch.allclose(given[1], wanted[1], atol=1e-6)
        assert maps["attn"].weights.shape == (1, 2, 6, 6)
        assert maps["attn"].grid == (2, 3)


def test_the_grid_is_that_of_the_latest_map_of_whole_images() -> None:
    grids = Grids()
    grids.begin(torch.zeros(2, 3, 8, 8))
    for shape in ((2, 4, 3, 5), (2, 4, 5, 3), (18, 4, 4, 4), (2, 16)):
        grids.see(torch.zeros(shape))
    assert grids.of(2, 16) == (5, 3)
    assert grids.of(2, 15, max_prefix=0) == (5, 3)
    assert grids.of(2, 16, max_prefix=0) is None
    assert grids.of(18, 16) is None
    assert grids.of(2, 14) is None
    grids.begin(torch.zeros(2, 3, 8, 8))
    assert grids.of(2, 16) is None


def test_our_own_attention_is_left_to_record() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), AttentionPool(4))
    with record_tokens(model) as maps:
        model(torch.randn(1, 3, 4, 4))
    assert (dict(maps), maps.left_out) == ({}, {})
    with record_tokens(model[1]) as maps:
        model[1](torch.randn(1, 4, 3, 3))
    assert (dict(maps), maps.left_out) == ({}, {})
    assert TokenMaps(torch.zeros(1, 1, 5, 5), (2, 2)).num_prefix == 1
