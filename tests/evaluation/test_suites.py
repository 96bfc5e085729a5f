from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import recast
from recast.errors import RecastError
from recast.lab.config.evaluation import parse_size
from recast.lab.data import Data
from recast.lab.data.images import resize_to, to_bytes
from recast.lab.evaluation import PixelModel, evaluate
from recast.lab.evaluation.accuracy import default_sizes
from recast.lab.evaluation.attacks import pgd
from recast.lab.evaluation.cost import count_macs, peak_memory
from recast.tracing.timing import time_models


class Constant(nn.Module):
    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def test_top1_top5_and_loss_by_hand(digits: Data) -> None:
    def labelled(*labels: int) -> Data:
        return replace(digits, val=replace(digits.val.subset(torch.arange(3)), labels=torch.tensor(labels)))

    data = labelled(9, 5, 2)
    rows = evaluate({"m": Constant(*range(10))}, ["clean"], data, run="r", batch_size=2, progress=False)
    loss = F.cross_entropy(torch.arange(10.0).expand(3, -1), data.val.labels)
    assert [row.value for row in rows][:3] == pytest.approx([100 / 3, 200 / 3, loss.item()])
    assert {(row.run, row.model, row.suite, row.dataset, row.n) for row in rows} == {("r", "m", "clean", "digits", 3)}
    for logits in ([0.0] * 7, [torch.nan] * 10, [torch.inf, *[0.0] * 9]):
        with pytest.raises(RecastError):
            evaluate(Constant(*logits), ["clean"], data, progress=False)
    five = replace(labelled(0, 1, 4), classes=list("abcde"))
    assert "top5" not in {row.metric for row in evaluate(Constant(*range(5)), "clean", five, progress=False)}


def test_non_square_sizes_keep_the_proportions() -> None:
    image = Image.new("RGB", (100, 100))
    image.paste((255, 255, 255), (40, 40, 60, 60))  # a centred square
    for size, share, side in (((50, 100), 1.0, 20), ((100, 50), 0.5, 40)):  # 0.5: half of the height is shown
        resized = resize_to(image, size, share)
        assert resized.size == size[::-1]
        white = to_bytes(resized)[0] > 127
        assert white.any(0).sum() == white.any(1).sum() == side


def pooled() -> nn.Module:
    """Takes images of any size."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10)).eval()


def test_resolution(digits: Data, score: Any) -> None:
    model, sizes = pooled(), set[tuple[int, ...]]()
    model.register_forward_pre_hook(lambda _, inputs: sizes.add(tuple(inputs[0].shape[2:])))
    scores = score("resolution", model, digits, sizes=("8", "16", "12x20", "16x16"))
    assert list(scores) == ["top1@8x8", "top1@16x16", "top1@12x20"]
    assert sizes == {(8, 8), (16, 16), (12, 20)}
    assert (scores["top1@16x16"] == score("clean", model, digits)["top1"]).all()
    assert scores["top1@8x8"].shape == (50, 1)
    assert list(score("resolution", model, digits)) == [f"top1@{side}x{side}" for side in (8, 12, 16, 20, 24)]


def test_a_size_that_a_recast_layer_refuses_is_named_and_left_out(digits: Data, score: Any) -> None:
    """C-MHSA has a bias for every offset of the maps that it was made for, and none for larger ones."""
    network = pooled()
    plan = recast.plan(network, torch.zeros(1, 3, 16, 16), recast.RecastConfig(gate="bias"), where=["0"])
    with pytest.warns(UserWarning, match=r"images of 20x20.* 20×20"):
        scores = score("resolution", recast.recast_(network, plan), digits, sizes=("12", "20", "16"))
    assert list(scores) == ["top1@12x12", "top1@16x16"]


def test_sizes() -> None:
    assert parse_size("160") == (160, 160)
    assert parse_size(" 128X192 ") == (128, 192)
    for wrong in ("", "0", "12x0", "-3", "12x", "big", "1.5"):
        with pytest.raises(RecastError, match="sizes"):
            parse_size(wrong)
    assert default_sizes(224) == ((128, 128), (160, 160), (224, 224), (288, 288), (320, 320))
    assert default_sizes(3) == ((3, 3), (4, 4))


@pytest.fixture
def victim(trained: nn.Module, digits: Data) -> PixelModel:
    return PixelModel(trained, digits.mean, digits.std)


@pytest.mark.parametrize(("steps", "size"), [(1, 2.0), (3, 0.9)])
def test_steps_are_the_formula_of_fgsm_and_pgd(steps: int, size: float, victim: PixelModel, digits: Data) -> None:
    images, labels = digits.val.batch(range(50))
    unchanged = images.clone()
    before = {key: value.clone() for key, value in victim.state_dict().items()}
    expected = images
    for _ in range(steps):
        pixels = expected.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(victim(pixels), labels), pixels)
        expected = images + (expected + size / 255 * gradient.sign() - images).clamp(-2 / 255, 2 / 255)
        expected = expected.clamp(0, 1)
    attacked = pgd(victim, images, labels, 2.0, steps=steps, step_size=size)
    torch.testing.assert_close(attacked, expected)
    assert images.equal(unchanged)
    assert not attacked.requires_grad
    assert all(parameter.grad is None for parameter in victim.parameters())
    assert all(value.equal(before[key]) for key, value in victim.state_dict().items())
    with pytest.raises(RecastError, match="at least 1 step"):
        pgd(victim, images, labels, 1.0, steps=0)


def test_the_suites_take_these_attacks(victim: PixelModel, trained: nn.Module, digits: Data, values: Any) -> None:
    top1 = values(trained, ["clean", "fgsm", "pgd"], digits, eps=(0, 1.0, 16))
    assert top1["fgsm top1@0"] == top1["pgd top1@0"] == top1["clean top1"] > 80
    assert top1["pgd top1@16"] <= top1["fgsm top1@16"] < top1["clean top1"]
    images, labels = digits.val.batch(range(50))
    with torch.no_grad():
        right = victim(pgd(victim, images, labels, 10.0, steps=2)).argmax(1) == labels
    two_steps = values(trained, "pgd", digits, 7, eps=(10.0,), steps=2)["top1@10"]  # shares the gradient of the first
    assert two_steps == pytest.approx(100 * right.float().mean().item())


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT  # (B, N, C)
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


def test_macs_by_hand() -> None:
    image = torch.rand(1, 6, 8, 8)
    assert count_macs(nn.Conv2d(6, 4, 3, padding=1), image) == 64 * 9 * 6 * 4
    assert count_macs(nn.Conv2d(6, 6, 3, padding=1, groups=6), image) == 64 * 9 * 6
    assert count_macs(nn.Sequential(nn.Flatten(), nn.Linear(384, 10)), image) == 3840
    assert count_macs(Attention(), image) == 2 * 64 * 64 * 6


def test_models_take_turns() -> None:
    log: list[str] = []
    models = {name: nn.Identity() for name in ("a", "b")}
    for name, model in models.items():
        model.register_forward_hook(lambda *_, name=name: log.append(name))
    times = time_models(models, torch.rand(1))
    first, *rounds = [log[at : at + 2] for at in range(0, len(log), 2)]
    assert first == ["a", "b"]
    assert rounds == [["a", "b"], ["b", "a"]] * (len(rounds) // 2) + [["a", "b"]] * (len(rounds) % 2)
    assert 3 <= len(times["a"]) == len(times["b"]) == len(log) // 2 - 1


def test_rows_of_cost(trained: nn.Module, digits: Data, values: Any) -> None:
    costs = values(trained, "cost", digits, 32)
    assert list(costs) == ["parameters", "macs", "images_per_second", "peak_memory"]
    assert costs["parameters"] == sum(p.numel() for p in trained.parameters())
    assert costs["macs"] == 256 * 27 * 8 + 64 * 72 * 16 + 640
    assert costs["images_per_second"] > 0
    assert costs["peak_memory"] >= 32 * (8 * 256 + 8 * 256) * 4  # a pointwise layer: what comes in and what goes out


def test_peak_memory_by_hand() -> None:
    images = torch.rand(2, 3, 8, 8)
    size = images.numel() * 4
    assert peak_memory(nn.ReLU(), images) == size
    assert peak_memory(nn.ReLU(inplace=True), images.clone()) == 0
    assert peak_memory(nn.Sequential(nn.ReLU(), nn.GELU(), nn.ReLU()), images) == 2 * size  # the first is freed
    assert peak_memory(nn.Sequential(nn.Flatten(), nn.Linear(192, 1000)), images) == 2 * 1000 * 4  # views are free
