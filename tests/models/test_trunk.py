"""What timm expects of the networks that are a trunk of blocks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from recast.errors import RecastError
from recast.papers.patchconvnet.network import PatchConvNet
from recast.papers.prs.network import CMHSAViT
from recast.papers.trunk import Trunk

Make = Callable[..., Trunk]
IMAGES = torch.randn(2, 3, 32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["cmhsa_vit", "patchconvnet"])
def make(request: Any) -> Make:
    def network(num_classes: int = 3, depth: int = 3, **options: Any) -> Trunk:
        torch.manual_seed(0)
        if request.param == "cmhsa_vit":
            return CMHSAViT(4, 16, depth, num_classes, **options).double().eval()
        return PatchConvNet(16, depth, num_classes, init_values=1.0, **options).double().eval()

    return network


def test_head_and_pooling(make: Make) -> None:
    model, x = make(), IMAGES
    features = model.forward_features(x)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, 16)
    assert model.num_features == model.head_hidden_size == 16
    head: Any = model.get_classifier()
    torch.testing.assert_close(model(x), pooled @ head.weight.T + head.bias)
    model.reset_classifier(5)
    assert model(x).shape == (2, 5)
    assert model.head.weight.dtype == torch.float64
    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(0, "")
    assert torch.equal(model(x), features)
    with pytest.raises(RecastError, match="a head of 4 classes needs pooling"):
        model.reset_classifier(4)
    with pytest.raises(RecastError, match="or '', got 'max'"):
        model.reset_classifier(4, "max")


@pytest.mark.parametrize("options", [{"drop_rate": 0.5}, {"depth": 5, "drop_path_rate": 0.3}])
def test_dropout_and_drop_path_are_off_at_evaluation(make: Make, options: dict[str, Any]) -> None:
    model, x = make(**options), IMAGES
    assert torch.equal(model(x), model(x))
    assert not torch.allclose(model.train()(x), model.eval()(x))


def test_maps_of_blocks(make: Make) -> None:
    model, x = make(depth=4), IMAGES
    maps = [getattr(model, model.stem_name)(x)]
    for block in model.blocks:
        maps.append(block(maps[-1]))
    last, taken = model.forward_intermediates(x, [1, -1])
    assert torch.equal(last, model.forward_features(x))
    assert all(torch.equal(a, b) for a, b in zip(taken, (maps[2], maps[4]), strict=True))
    assert torch.equal(model.forward_intermediates(x, [1])[0], last)  # all blocks are run
    (normed,) = model.forward_intermediates(x, 1, norm=True, intermediates_only=True)
    assert torch.equal(normed, last)
    assert len(model.forward_intermediates(x, intermediates_only=True)) == 4
    assert model.prune_intermediate_layers([1]) == [1]
    assert len(model.blocks) == 2
    with pytest.raises(RecastError, match="NCHW, got output_fmt='NLC'"):
        model.forward_intermediates(x, output_fmt="NLC")


def test_gradient_checkpointing_changes_nothing(make: Make) -> None:
    model, calls = make().train(), []
    next(model.blocks[0].children()).register_forward_hook(lambda *_: calls.append(1))
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(IMAGES).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(calls) == 3  # once more in the backward pass
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
