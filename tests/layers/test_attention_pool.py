import math
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from recast.errors import RecastError
from recast.layers.attention_pool import AttentionPool, ClassHead


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(num_classes: int | None = None, **options: Any) -> AttentionPool:
    """A pool whose every parameter is random: at its start γ = 1e-4 and biases 0 would hide mistakes."""
    pool = AttentionPool(12, num_classes, **options)
    with torch.no_grad():
        for parameter in pool.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5 + (1 if parameter.dim() == 1 else 0))
    return pool.eval()


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return layer.weight @ x + layer.bias


def layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias


@torch.no_grad()
def by_hand(pool: AttentionPool, image: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """One image C×h×w and one token, a patch at a time, as in the paper's figure 3; no other token among the keys."""
    patches = list(image.flatten(1).T)
    inputs = [layer_norm(pool.norm1, u) for u in ([token, *patches] if pool.cls_in_keys else patches)]
    query, heads = linear(pool.attn.q, layer_norm(pool.norm1, token)), pool.attn.num_heads
    keys, values = ([linear(layer, u).chunk(heads) for u in inputs] for layer in (pool.attn.k, pool.attn.v))
    width, outputs, maps = len(token) // heads, [], []
    for h, q in enumerate(query.chunk(heads)):
        scores = torch.stack([q @ key[h] / math.sqrt(width) for key in keys])
        maps.append(scores.exp() / scores.exp().sum())
        outputs.append(sum((w * value[h] for w, value in zip(maps[h], values, strict=True)), torch.zeros(width)))
    residual = token if pool.start == "paper" else torch.stack(patches, 1) @ maps[0]
    c = residual + pool.ls1.gamma * linear(pool.attn.proj, torch.cat(outputs))
    hidden = linear(pool.mlp.fc1, layer_norm(pool.norm2, c))
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    c = c + pool.ls2.gamma * linear(pool.mlp.fc2, hidden)
    return c if isinstance(pool.norm, nn.Identity) else layer_norm(pool.norm, c), torch.stack(maps)


@pytest.mark.parametrize(
    ("start", "classes", "cls_in_keys", "heads"),
    [
        ("paper", None, True, 1),
        ("paper", None, True, 3),
        ("paper", None, False, 1),
        ("paper", 4, False, 1),
        ("paper", 4, True, 2),
        ("average", 4, False, 1),
    ],
)
def test_every_token_is_the_formula(start: Any, classes: int | None, cls_in_keys: bool, heads: int) -> None:
    pool = make(classes, start=start, cls_in_keys=cls_in_keys, num_heads=heads)
    x = torch.randn(2, 12, 3, 5)
    pooled, attention = pool(x, return_attention=True)
    assert pooled.shape == ((2, 12) if classes is None else (2, 4, 12))
    assert attention.shape == (2, heads, classes or 1, 16 if cls_in_keys else 15)
    for image, rows, maps in zip(x, pooled.view(2, -1, 12), attention.transpose(1, 2), strict=True):
        for token, row, weights in zip(pool.cls_token[0], rows, maps, strict=True):
            for measured, expected in zip((row, weights), by_hand(pool, image, token), strict=True):
                torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(pool(x), pooled)
    assert (make().cls_in_keys, make(3).cls_in_keys) == (True, False)  # unless asked otherwise


def test_maps_are_the_patches_in_their_places() -> None:
    pool, x = make(), torch.randn(2, 12, 3, 5)
    maps, attention = pool.attention_maps(x), pool(x, return_attention=True)[1]
    assert maps.shape == (2, 1, 1, 3, 5)
    assert torch.equal(maps[0, 0, 0, 1, 2], attention[0, 0, 0, 1 + 1 * 5 + 2])
    torch.testing.assert_close(maps.sum((-2, -1)), 1 - attention[..., 0])
    # where a patch goes, its weight goes
    torch.testing.assert_close(pool.attention_maps(x.flip(-1)), maps.flip(-1))
    classes = make(4)
    torch.testing.assert_close(classes.attention_maps(x).sum((-2, -1)), torch.ones(2, 1, 4))


def test_resnet50_with_attention_pooling() -> None:
    """80.1 % against 79.8 % with 4.6 against 4.1 GFLOPs (the paper, section 4.3)."""
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        trunk = timm.create_model("resnet50", num_classes=0, global_pool="").eval().requires_grad_(False)
        model = nn.Sequential(trunk, AttentionPool(2048), nn.Linear(2048, 1000)).requires_grad_(False)
        costs = []
        for network in (trunk, model):
            with FlopCounterMode(display=False) as flops:
                network(torch.empty(1, 3, 224, 224))
            costs.append(flops.get_total_flops() / 2e9)
    assert sum(p.numel() for p in model[1].parameters()) == 41_977_856
    assert sum(p.numel() for p in model.parameters()) == 67_534_888
    assert costs[1] - costs[0] - 2048 * 1000 / 1e9 == pytest.approx(0.453, abs=5e-4)
    assert costs[1] == pytest.approx(4.54, abs=5e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "dim=12 .* num_heads=5"),
        ({"num_classes": 0}, "num_classes .* got 0"),
        ({"start": "avrage"}, "start must be one of average, paper, got 'avrage'"),
        ({"start": "average", "cls_in_keys": True}, "does not allow cls_in_keys"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecastError, match=message):
        AttentionPool(12, **options)


@pytest.mark.parametrize(
    "options", [{}, {"num_classes": 4}, {"num_heads": 3}, {"num_classes": 4, "num_heads": 2, "mlp_ratio": 0.5}]
)
def test_the_average_start_is_the_average(options: dict[str, Any]) -> None:
    pool, x = AttentionPool(12, start="average", **options), torch.randn(2, 12, 3, 5)
    pooled, attention = pool(x, return_attention=True)
    expected = x.mean((2, 3)) if pool.num_classes is None else x.mean((2, 3))[:, None].expand(-1, 4, -1)
    torch.testing.assert_close(pooled, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(attention, torch.full_like(attention, 1 / 15))
    assert not pool.cls_in_keys
    assert not [name for name in pool.state_dict() if name.startswith("norm.")]


def test_a_row_of_the_classifier_reads_the_vector_of_its_class() -> None:
    head, z = ClassHead(12, 3), torch.randn(2, 3, 12)
    expected = torch.stack([z[:, j] @ head.weight[j] + head.bias[j] for j in range(3)], 1)
    for form in (z, z.flatten(0, 1), z.flatten(0, 1)[:, :, None, None]):
        torch.testing.assert_close(head(form), expected)
    torch.testing.assert_close(ClassHead(12, 3, bias=False)(z).shape, torch.Size((2, 3)))
    assert ClassHead(12, 3, as_map=True)(z).shape == (2, 3, 1, 1)


@torch.no_grad()
def test_half_precision_never_makes_nan() -> None:
    pool = AttentionPool(8, start="average")
    for layer in (pool.attn.q, pool.attn.k):
        nn.init.constant_(layer.weight, 300.0)
    x = torch.randn(2, 8, 5, 5) * 1000
    with torch.autocast("cpu", dtype=torch.float16):
        assert pool(x).isfinite().all()
