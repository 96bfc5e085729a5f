"""What a page stores of a network's layers, against their own maps."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
from on_pages import GATES, mix_of, on_pixels, recast_network
from torch import Tensor, nn

from recast import RecastConfig, RecastError, plan, recast_, record
from recast.analysis.record import Attention, class_maps
from recast.lab.explain import maps as module
from recast.lab.explain.inputs import likeliest
from recast.lab.explain.maps import pool_layer, recast_layer, record_maps
from recast.lab.explain.scene import Layer, Maps, Outputs, Prediction, share_text
from recast.layers.cmhsa import recast_layers
from recast.layers.config import PAPERS_LAYER
from recast.papers.patchconvnet.network import PatchConvNet
from recast.surgery.rules import convert

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 12, "num_heads": 3, "num_classes": 5, "depth": 2}


def assert_stored(values: np.ndarray, expected: np.ndarray, text: str = "", steps: int = 1) -> None:
    """Equal but for quantisation, half a step of which is 0.0041 of a map's largest value at most."""
    assert values.shape == expected.shape, text
    largest = np.abs(expected).max((-2, -1), keepdims=True)
    assert np.all(np.abs(values - expected) <= steps * 0.0041 * largest + 1e-7), text


def recast_conv(conv: nn.Module, x: Tensor, **config: Any) -> Any:
    steps = plan(
        nn.Sequential(conv), x, RecastConfig(**{"gate": "linear"} | PAPERS_LAYER | config), where=["0"], max_tokens=None
    )
    return recast_(nn.Sequential(conv), steps)[0]


def recorded(model: nn.Module, x: Tensor, classes: list[str] | None = None) -> tuple[list[Layer], dict[str, Maps]]:
    described = record_maps(model, x, classes)[1]
    return [layer for layer, _ in described], {layer.name: maps for layer, maps in described}


def stirred(model: nn.Module) -> Any:
    """Maps differ from pixel to pixel, and from class to class."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def weights_of(layer: Layer, maps: Maps, head: int, query: tuple[int, int]) -> np.ndarray:
    """The weights (Y, X) of a head for a stored query, computed from a scene as assets/maps.js does."""
    weights = np.array(maps.values[head, maps.rows.index(query[0]), maps.columns.index(query[1])])
    if layer.content is None or layer.gaussian is None or layer.center is None or layer.alpha is None:
        return weights
    place = [axis[index] for axis, index in zip(layer.queries, query, strict=True)]
    axes = []
    for axis, keys in enumerate(layer.keys):
        distances = np.arange(layer.padded[axis]) - place[axis] - layer.center[head, axis]
        shares = np.exp(-layer.alpha[head] * distances**2)
        axes.append((shares / shares.sum())[keys])
    weights = layer.content[head] * weights + layer.gaussian[head] * np.outer(*axes)
    row, column = (at + offset for at, offset in zip(place, layer.offsets[head], strict=True))
    if layer.shift is not None and row in layer.keys[0] and column in layer.keys[1]:
        weights[layer.keys[0].index(row), layer.keys[1].index(column)] += layer.shift[head]
    return weights


@pytest.mark.parametrize("config", GATES, ids=str)
@torch.no_grad()
def test_a_scene_holds_what_the_attention_of_a_layer_follows_from(config: dict[str, Any], open_gates: Any) -> None:
    """Without a browser; `test_browser` checks the page itself."""
    model, x = recast_network(open_gates, **config), torch.rand(1, 3, 12, 14)
    layers = {layer.name: (layer, maps) for layer, maps in record_maps(model, x)[1]}
    for name, module_ in model.named_children():
        if name in layers:
            layer, maps = layers[name]
            mix = mix_of(module_, x)
            for row, column in ((0, 0), (len(layer.queries[0]) - 1, len(layer.queries[1]) // 2)):
                for head, expected in enumerate(mix[:, row, column]):
                    error = np.abs(weights_of(layer, maps, head, (row, column)) - expected).max()
                    assert error < 0.005 * max(1.0, float(np.abs(expected).max()))
        x = module_(x)
    assert len(layers) == (4 if config["gate"] == "bias" else 5)


@torch.no_grad()
def test_a_closed_gate_beside_a_convolution_is_stated() -> None:
    x = torch.rand(1, 4, 6, 5)
    layer = convert(nn.Conv2d(4, 4, 3, padding=1), RecastConfig())
    assert "closed" in recast_layer("conv", layer, x)[0].description
    layer.gamma += 0.1
    assert "closed" not in recast_layer("conv", layer, x)[0].description


BIAS = {"gate": "bias", "bias_init": 3.0, "query_key": "random"}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("config", [{"content": "softmax"}, {"content": "linear"}, BIAS], ids=str)
def test_the_maps_of_a_layer_are_stored(seed: int, config: Any, random_case: Any, open_gates: Any) -> None:
    conv, x, text = random_case(seed, torch.float32)
    layer, x = recast_conv(conv, x[:1], **config), x[:1]
    maps = layer.attention(x) if config is BIAS else open_gates(layer, seed).attention(x).content
    assert_stored(recast_layer("conv", layer, x, layer(x).shape[2:])[1].values, on_pixels(layer, maps, x), text)


def test_large_layers_keep_some_queries_over_blocks_of_keys(open_gates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(1, 4, 10, 7)
    layer = open_gates(recast_conv(nn.Conv2d(4, 4, 3, padding=1), x))
    monkeypatch.setattr(module, "MAX_QUERIES", 20)
    monkeypatch.setattr(module, "MAX_KEYS", 20)
    maps = recast_layer("conv", layer, x, layer(x).shape[2:])[1]
    assert (maps.rows, maps.columns, maps.pool) == ((1, 3, 5, 7, 9), (1, 3, 5), 2)
    stored_queries = torch.from_numpy(on_pixels(layer, layer.attention(x).content, x))[:, maps.rows][:, :, maps.columns]
    blocks = nn.functional.avg_pool2d(stored_queries.flatten(0, 2)[:, None], 2, ceil_mode=True, divisor_override=1)
    assert_stored(maps.values.reshape(-1, 5, 4), blocks[:, 0].numpy())


def test_layers_come_in_the_order_of_their_calls_and_the_model_is_left_alone() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late, self.early = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(input=self.early(x)).mean((2, 3))

    model, x = Turned(), torch.rand(1, 3, 6, 6)
    recast_(model, plan(model, x, RecastConfig("linear", **PAPERS_LAYER), where="all"))
    model.train()
    output, described, notes = record_maps(model, x)
    assert [layer.name for layer, _ in described] == ["early", "late"]
    assert (output.shape, notes) == ((1, 4), [])
    assert not output.requires_grad
    assert all(m.training for m in model.modules())
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in recast_layers(model).values())


def test_the_likeliest_classes() -> None:
    model, x = stirred(PatchConvNet(16, 1, 7, per_class=True, num_heads=2)), torch.rand(1, 3, 64, 48)
    layers, stored = recorded(model, x, [f"animal {i}" for i in range(7)])
    layer = layers[-1]
    assert (layer.kind, layer.offsets, layer.padded) == ("classes", (), (4, 3))
    assert "one token per class, 2 heads (their mean)" in layer.description
    best = model(x).detach().softmax(1)[0].topk(3)
    names = [f"animal {i}, {share_text(p)}" for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    assert list(stored["pool"].names) == names
    assert_stored(stored["pool"].values[:, 0, 0], class_maps(model, x)[0, best.indices].numpy())
    unnamed = recorded(model, x)[1]["pool"].names
    assert [name.replace("class", "animal", 1) for name in unnamed] == names


@pytest.mark.parametrize(
    ("logits", "outputs", "probabilities", "values"),
    [
        ([-8.0], None, [0.000335], ["0.0\u00a0%"]),
        ([8.0], None, [0.999665], ["100\u00a0%"]),
        ([5.0, 5.0, 5.0], "sigmoid", [0.993307] * 3, ["99\u00a0%"] * 3),
        ([30.0, 40.0], "sigmoid", [1.0, 1.0], ["100\u00a0%"] * 2),
        ([0.0, -3.25], "logits", [0.0, -3.25], ["0", "−3.25"]),
        ([0.0, 0.0], None, [0.5, 0.5], ["50\u00a0%"] * 2),
    ],
)
def test_one_output_is_a_sigmoid_and_more_are_what_is_asked(
    logits: list[float], outputs: Outputs | None, probabilities: list[float], values: list[str]
) -> None:
    rows = likeliest(torch.tensor([logits]), None, 5, outputs)
    assert [row.probability for row in rows] == pytest.approx(probabilities, abs=1e-6)
    assert [row.value for row in rows] == values
    assert rows[0].number == logits.index(max(logits))  # also where both sigmoids are 1
    assert likeliest(torch.tensor([-8.0]), ["defect"], 5)[0].value == "0.0\u00a0%"  # its dimension squeezed


def test_outputs_that_rank_nothing_show_the_first_classes() -> None:
    maps, on_tokens = torch.rand(5, 2, 3), torch.full((5, 1), 0.25)
    attention = Attention(torch.cat((on_tokens, maps.flatten(1)), 1)[None, None], (2, 3), 5)
    layer, stored = pool_layer("pool", attention, 5, ())
    assert stored.names[0] == "class 0 (25\u00a0% on the token itself)"
    assert_stored(stored.values[:, 0, 0], maps[:3].numpy())
    assert len(stored.names) == len(layer.names) == 3
    best = [Prediction("four", 0.995, 4), Prediction("1", 0.004, 1)]
    without_tokens = Attention(maps.flatten(1)[None, None], (2, 3), 5)
    assert pool_layer("pool", without_tokens, 5, best)[1].names == ("four, 100\u00a0%", "class 1, 0.4\u00a0%")
    assert likeliest(torch.zeros(1, 3, 2), None, 3) == ()


def test_outputs_that_cannot_be_shown() -> None:
    for outputs, classes, read_as, message in (
        (3, ["a", "b"], None, "2 class names for a network with 3 outputs"),
        (1, None, "softmax", "softmax of one output"),
        (3, None, "tanh", "softmax, sigmoid, logits, got 'tanh'"),
    ):
        with pytest.raises(RecastError, match=message):
            likeliest(torch.zeros(1, outputs), classes, 3, read_as)
    broken = PatchConvNet(16, 1, 7)
    nn.init.constant_(broken.stem[0].weight, torch.nan)
    with pytest.raises(RecastError, match="pool has attention that is not finite"):
        record_maps(broken, torch.rand(1, 3, 64, 48))


def test_transformers() -> None:
    """Layers in the order of the network; the patches' maps and the tokens'."""
    x, tokens = torch.rand(1, 3, 32, 32), ("class token", "distillation token")
    deit, _ = recorded(stirred(timm.create_model("deit_tiny_distilled_patch16_224", **TINY)), x)
    named = [name for i in range(2) for name in (f"blocks.{i}.attn", *(f"blocks.{i}.attn ({t})" for t in tokens))]
    assert [layer.name for layer in deit] == named
    first, of_class = deit[:2]
    assert (first.kind, first.names, first.padded) == ("maps", ("head 1", "head 2", "head 3"), (4, 4))
    assert first.description == "3\u00a0heads over 4×4 patches and 2\u00a0tokens before them"
    assert (of_class.kind, of_class.names[0], len(of_class.names)) == ("classes", "mean", 4)

    cait = stirred(timm.create_model("cait_xxs24_224", **TINY))
    layers, stored = recorded(cait, x)
    assert [layer.kind for layer in layers] == ["maps", "maps", "classes", "classes"]
    with record(cait) as maps, torch.no_grad():
        cait(x)
    assert stored["blocks.1.attn"].signed
    assert_stored(stored["blocks.1.attn"].values, maps["blocks.1.attn"].mix[0].reshape(3, 4, 4, 4, 4).numpy(), steps=2)
    shown = stored["blocks_token_only.1.attn (class token)"].values[:, 0, 0]
    heads = maps["blocks_token_only.1.attn"].tokens[0, :, 0].numpy()
    assert_stored(shown, np.concatenate([heads.mean(0, keepdims=True), heads]))
    convit = timm.create_model("convit_tiny", local_up_to_layer=1, **TINY | {"num_heads": 4})
    assert [layer.kind for layer in recorded(convit, x)[0]] == ["maps", "maps", "classes"]
