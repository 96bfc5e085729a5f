"""Recorded attention, against the same weights computed here from the modules' parameters."""

from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer as TimmTransformer
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from recast import RecastConfig, RecastError, attention_pool_, plan, recast_, record
from recast.analysis.record import Record, class_maps, token_names
from recast.analysis.transformers import NO_GRID, NOT_WHOLE
from recast.layers.cmhsa import gated_layers
from recast.layers.config import PAPERS_LAYER
from recast.papers.patchconvnet.network import PatchConvNet
from recast.tracing.hooks import captured_inputs

PAPERS = RecastConfig("linear", **PAPERS_LAYER)
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "num_heads": 3, "num_classes": 5}
DEIT, DISTILLED = "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
VIT = "vit_tiny_patch16_224"


def stirred(model: nn.Module) -> Any:
    """In fp64, maps differ from pixel to pixel, and from class to class."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model.eval()


def transformer(name: str, **options: Any) -> Any:
    return stirred(timm.create_model(name, **TINY | options))


def recorded(model: nn.Module, *shape: int) -> tuple[Record, dict[str, Tensor]]:
    """Maps, and the input of every attention."""
    attentions = [(name, module) for name, module in model.named_modules() if name.endswith("attn")]
    with captured_inputs(attentions) as inputs, torch.no_grad(), record(model) as maps:
        model(torch.randn(shape, dtype=next(model.parameters()).dtype))
    return maps, {name: values[-1] for name, values in inputs.items()}


def attention(q: Tensor, k: Tensor, heads: int) -> Tensor:
    """softmax(Q Kᵀ / √d) of q, k (B, N, heads·d): (B, heads, N_q, N_k)."""
    q, k = (of.unflatten(-1, (heads, -1)).transpose(1, 2) for of in (q, k))
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def assert_no_hooks(model: nn.Module) -> None:
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def network(open_gates: Any) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, (3, 5), padding=(1, 2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    recast_(model, plan(model, torch.randn(1, 3, 8, 10), PAPERS, where="all"))
    for layer in gated_layers(model).values():
        open_gates(layer)
    return model


def test_the_maps_of_a_pass_make_its_output(network: Any) -> None:
    x = torch.randn(2, 3, 8, 10)
    with record(network) as maps, captured_inputs([("in", network[2]), ("out", network[3])]) as inputs:
        network(x)
    assert list(maps) == ["0", "2"]
    assert "2: Attention(2 × 15 heads" in str(maps)
    layer, (inner,), (output,) = network[2], inputs["in"], inputs["out"]
    padded = layer.geometry.pad(torch.nn.functional.conv2d(inner, layer.value[:, :, None, None])).flatten(2)
    gathered = torch.einsum("bhnm,bcm->bhnc", maps["2"].mix, padded)
    expected = torch.einsum("bhnc,och->bon", gathered, layer.weight.flatten(2)) + layer.bias[:, None]
    assert torch.allclose(expected, output.flatten(2), atol=1e-5)
    assert not maps["2"].mix.requires_grad
    assert maps["2"].patches.shape == (2, 15, 20, *maps["2"].grid)
    biased = recast_(nn.Conv2d(3, 4, 3), plan(nn.Conv2d(3, 4, 3), x, RecastConfig(gate="bias"), where="all"))
    with record(biased) as of_bias:
        biased(x)
    assert of_bias[""].position.shape == (1, 9, 48, 80)
    assert of_bias[""].content.shape == of_bias[""].mix.shape == (2, 9, 48, 80)
    for part in (maps["2"].shift, maps["2"].gaussian, maps["2"].content):
        assert torch.allclose(part.sum(-1), torch.ones(()), atol=1e-5)
    assert_no_hooks(network)


def test_long_maps_warn() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 1, 2)), torch.randn(1, 1, 33, 33)
    recast_(model, plan(model, x, PAPERS, max_tokens=2000))
    with pytest.warns(UserWarning, match="1089 tokens"), record(model):
        model(x)


@pytest.mark.parametrize("name", [DEIT, DISTILLED])
def test_deit(name: str) -> None:
    model = transformer(name, depth=2)
    maps, inputs = recorded(model, 2, 3, 32, 32)
    assert list(maps) == ["blocks.0.attn", "blocks.1.attn"]
    before = 1 + ("distilled" in name)
    for block, recording in maps.items():
        qkv = model.get_submodule(f"{block}.qkv")(inputs[block])
        assert close(recording.mix, attention(qkv[..., :12], qkv[..., 12:24], 3))
        assert (recording.grid, recording.num_prefix, recording.num_tokens) == ((4, 4), before, before)
        assert torch.equal(recording.tokens.flatten(-2), recording.mix[..., :before, before:])
        assert torch.equal(recording.patches[:, :, 6, 2, 1], recording.mix[..., before + 6, before + 2 * 4 + 1])
    assert token_names(model, before) == ("class token", "distillation token")[:before]


def test_cait_gives_every_map_of_both_stages() -> None:
    model = transformer("cait_xxs24_224", num_heads=2, embed_dim=8)
    maps, inputs = recorded(model, 1, 3, 32, 32)
    assert len(maps) == 26
    talking, name = model.blocks[3].attn, "blocks.3.attn"
    q, k, _ = talking.qkv(inputs[name]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    scores = torch.einsum("bhnd,bhmd->bnmh", q, k) / 2
    assert close(maps[name].mix, talking.proj_w(talking.proj_l(scores).softmax(2)).permute(0, 3, 1, 2))
    assert (maps[name].num_prefix, maps[name].tokens.shape) == (0, (1, 2, 0, 4, 4))
    assert (maps[name].mix < 0).any()
    for name in ("blocks_token_only.0.attn", "blocks_token_only.1.attn"):
        module, tokens = model.get_submodule(name), inputs[name]
        expected = attention(module.q(tokens[:, :1]), module.k(tokens), 2)
        assert close(maps[name].mix, expected)
        assert maps[name].patches is None
        assert torch.equal(maps[name].tokens.flatten(), expected[:, :, 0, 1:].flatten())


def test_convit_gives_the_gated_mix() -> None:
    model = transformer("convit_tiny", embed_dim=4, num_heads=4, depth=3, local_up_to_layer=2)
    maps, inputs = recorded(model, 2, 3, 32, 32)
    for name in ("blocks.0.attn", "blocks.1.attn"):
        assert close(maps[name].mix, model.get_submodule(name).get_attention(inputs[name]))
    q, k, _ = model.blocks[2].attn.qkv(inputs["blocks.2.attn"]).chunk(3, -1)
    assert close(maps["blocks.2.attn"].mix, attention(q, k, 4))
    assert [recording.num_prefix for recording in maps.values()] == [0, 0, 1]


def test_the_model_is_left_as_it_was() -> None:
    model = timm.create_model(DEIT, depth=2, attn_drop_rate=0.5, **TINY).train()
    model.blocks[1].attn.fused_attn = False
    model.blocks[0].attn.fused_attn = 1
    before = [dict(vars(module)) for module in model.modules()]
    x = torch.randn(1, 3, 32, 32)
    with record(model) as maps:
        assert not model.blocks[0].attn.fused_attn
        model(x)
    assert torch.allclose(maps["blocks.0.attn"].mix.sum(-1), torch.ones(()), atol=1e-6)  # before the dropout
    assert not maps["blocks.0.attn"].mix.requires_grad
    with pytest.raises(AssertionError), record(model):
        model(torch.randn(1, 3, 30, 30))
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module) == attributes
    outside = model.eval()(x)
    with record(model):
        assert torch.allclose(model(x), outside, atol=1e-5)


def test_a_compiled_network_that_ran_before_is_recorded() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    x = torch.randn(1, 3, 8, 8)
    recast_(model, plan(model, x, PAPERS))
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with record(compiled) as maps:
        compiled(x)
    assert len(maps) == 1


def test_rectangles_and_registers() -> None:
    model = transformer(VIT, depth=1, dynamic_img_size=True, reg_tokens=2, patch_size=16)
    recording = recorded(model, 2, 3, 96, 160)[0]["blocks.0.attn"]
    assert (recording.grid, recording.num_prefix, recording.patches.shape) == ((6, 10), 3, (2, 3, 60, 6, 10))
    assert token_names(model, 3) == ("class token", "register 1", "register 2")
    assert token_names(nn.Linear(2, 2), 2) == ("token 1", "token 2")


def test_attention_that_shows_nothing_is_never_a_silent_gap() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_drop = nn.Dropout()

        def forward(self, x: Tensor, **_options: Any) -> Tensor:
            return x

    model = timm.create_model(DEIT, depth=3, **TINY)
    model.blocks[1].attn = Silent()
    with record(model) as maps:
        model(torch.randn(1, 3, 32, 32))
    assert list(maps) == ["blocks.0.attn", "blocks.2.attn"]
    with pytest.raises(RecastError, match=r"blocks\.1\.attn .* gives no weights"):
        maps["blocks.1.attn"]
    with pytest.raises(KeyError):
        maps["blocks.3.attn"]
    with pytest.raises(RecastError, match="cannot be followed"):
        class_maps(model, torch.randn(1, 3, 32, 32))


def test_other_attention_is_named() -> None:
    options = {"img_size": 32, "embed_dim": 6, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4}
    swin = timm.create_model("swin_tiny_patch4_window7_224", **options)
    maps, _ = recorded(swin, 1, 3, 32, 32)
    windows = {"layers.0.blocks.0.attn": NOT_WHOLE, "layers.0.blocks.1.attn": NOT_WHOLE}
    assert (maps, maps.left_out) == ({}, {**windows, "layers.1.blocks.0.attn": NO_GRID})
    # as many channels a head as there are patches: still no map over them
    xcit = timm.create_model("xcit_nano_12_p16_224", img_size=64, embed_dim=32, num_heads=2, depth=1, num_classes=3)
    maps, _ = recorded(xcit, 1, 3, 64, 64)
    assert list(maps) == [f"cls_attn_blocks.{i}.attn" for i in (0, 1)]
    assert maps.left_out == {"blocks.0.attn": NOT_WHOLE}


def test_torch_attention_gives_its_caller_what_it_asked_for() -> None:
    vit = VisionTransformer(32, 8, 2, 3, 12, 24, num_classes=5).eval()
    nn.init.normal_(vit.heads.head.weight)
    x = torch.randn(2, 3, 32, 32)
    outside = vit(x)
    with record(vit) as maps:
        assert torch.allclose(vit(x), outside, atol=1e-5)
    name = "encoder.layers.encoder_layer_1.self_attention"
    assert list(maps)[1] == name
    assert (maps[name].grid, maps[name].mix.shape) == ((4, 4), (2, 3, 17, 17))
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
        output, weights = caller(x, *options)
        with record(caller) as maps:
            recorded_output, recorded_weights = caller(x, *options)
        assert torch.allclose(recorded_output, output, atol=1e-6)
        assert (recorded_weights is None) == (weights is None)
        assert weights is None or torch.allclose(recorded_weights, weights, atol=1e-6)
        assert (maps["attn"].mix.shape, maps["attn"].grid) == ((1, 2, 6, 6), (2, 3))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("per_class", [False, True])
def test_pools(per_class: bool, heads: int) -> None:
    model = stirred(PatchConvNet(16, 1, 7, per_class=per_class, num_heads=heads))
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with record(model) as maps, captured_inputs([("pool", model.pool)]) as inputs:
        model(x)
    pool, recording = model.pool, maps["pool"]
    tokens = pool.norm1(pool.cls_token).expand(2, -1, -1)
    patches = pool.norm1(inputs["pool"][0].flatten(2).mT)
    keys = patches if per_class else torch.cat((tokens, patches), 1)
    assert close(recording.mix, attention(pool.attn.q(tokens), pool.attn.k(keys), heads))
    assert not recording.mix.requires_grad
    assert recording.tokens.shape == (2, heads, 7 if per_class else 1, 4, 6)
    assert (recording.patches, recording.num_prefix) == (None, 0 if per_class else 1)
    assert close(recording.kept + recording.tokens.sum((-2, -1)), torch.ones((), dtype=torch.float64))
    assert close(class_maps(model, x), recording.tokens.mean(1))
    assert_no_hooks(model)


def test_pools_of_tokens_lie_on_their_grid() -> None:
    vit = timm.create_model(VIT, depth=1, dynamic_img_size=True, **TINY | {"global_pool": "avg"})
    stirred(attention_pool_(vit, example=torch.randn(1, 3, 32, 32)))
    x = torch.randn(2, 3, 32, 48).double()
    with record(vit) as maps:
        vit(x)
    *_, pooling = maps.values()
    assert pooling.tokens.shape == (2, 1, 1, 4, 6)
    assert close(class_maps(vit, x), pooling.tokens[:, 0])


@torch.no_grad()
def test_tokens_without_maps_have_no_grid() -> None:
    class Tokens(nn.Sequential):
        def forward_features(self, x: Tensor) -> Tensor:
            return self[0](x).flatten(2).transpose(1, 2)[:, ::4]  # 16×24 patches, every fourth

        def forward_head(self, x: Tensor) -> Tensor:
            return self[1](x.mean(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.forward_head(self.forward_features(x))

    images = torch.rand(2, 3, 128, 192)
    model = attention_pool_(Tokens(nn.Conv2d(3, 6, 8, stride=8), nn.Linear(6, 4)), True, example=images).eval()
    with pytest.raises(RecastError, match="grid is not known"):
        class_maps(model, images)


def test_class_tokens() -> None:
    x = torch.randn(2, 3, 32, 32).double()
    for network, name in (("cait_xxs24_224", "blocks_token_only.1.attn"), (DISTILLED, "blocks.1.attn")):
        model = transformer(network, depth=2)
        with record(model) as maps:
            model(x)
        last = maps[name].mix[:, :, 0, -16:].mean(1)
        model.train()
        assert torch.equal(class_maps(model, x), last.unflatten(-1, (1, 4, 4)))
        assert model.training


def test_networks_without_class_maps() -> None:
    unread = TimmTransformer(**TINY, depth=1, global_pool="avg")  # it has an unused class token
    registers = timm.create_model(VIT, **TINY, class_token=False, reg_tokens=1, depth=1, global_pool="avg")
    for model in (timm.create_model("resnet10t"), unread, registers):
        with pytest.raises(RecastError, match=r"has no class maps, .*attention_pool_"):
            class_maps(model, torch.randn(1, 3, 32, 32))
