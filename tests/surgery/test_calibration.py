"""Calibration: W_out and bias that bring a soft start back to the parent."""

import copy

import pytest
import torch
from torch import Tensor, nn

from recast import RecastConfig, calibrate_, plan, recast_
from recast.layers.functional import gather
from recast.layers.gpsa import gpsa_layers

SOFT = RecastConfig(gate="sigmoid")


def smooth_images(count: int, channels: int = 4, size: int = 12, seed: int = 0) -> Tensor:
    """Images with neighbours that look alike, as real ones have."""
    noise = torch.randn(count, channels, size + 4, size + 4, generator=torch.Generator().manual_seed(seed))
    return nn.functional.avg_pool2d(noise, 5, stride=1)


def pair(groups: int = 1, bias: bool = False) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    convs = [nn.Conv2d(4, 8, 3, padding=1, groups=groups, bias=bias), nn.Conv2d(8, 4, 3, padding=1, bias=bias)]
    parent = nn.Sequential(convs[0], nn.ReLU(), convs[1])
    child = copy.deepcopy(parent)
    recast_(child, plan(child, smooth_images(1), SOFT, where="all"))
    return parent, child


def distance(parent: nn.Module, child: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        expected = parent(images)
        return float((child(images) - expected).norm() / expected.norm())


@pytest.mark.parametrize(("groups", "bias"), [(1, False), (2, True)])
def test_new_images_come_closer(groups: int, bias: bool) -> None:
    parent, child = pair(groups, bias)
    new = smooth_images(50, seed=1)
    before = distance(parent, child, new)
    calibrate_(child, parent, smooth_images(200).split(50))
    assert distance(parent, child, new) < 0.65 * before


def test_it_is_the_least_squares_solution_of_a_layer() -> None:
    """One layer, a tiny ridge: as torch's own solver finds it, in fp64."""
    torch.manual_seed(0)
    parent = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1)).double()
    child = copy.deepcopy(parent)
    images = smooth_images(40, 3).double()
    recast_(child, plan(child, images, SOFT))
    layer = gpsa_layers(child)["0"]
    calibrate_(child, parent, images.split(10), ridge=1e-14)
    with torch.no_grad():
        gathered = gather(images, layer.weights()).flatten(3).flatten(1, 2)
        features = gathered.transpose(1, 2).flatten(0, 1)
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        targets = parent(images).flatten(2).transpose(1, 2).flatten(0, 1)
        expected = features @ torch.linalg.lstsq(features, targets, driver="gelsd").solution
        found = child(images).flatten(2).transpose(1, 2).flatten(0, 1)
    assert float((found - expected).abs().max()) < 1e-6 * float(expected.abs().max())


def test_nothing_but_weight_and_bias_moves_and_modes_are_given_back() -> None:
    parent, child = pair()
    parent.train()
    before = [copy.deepcopy(model.state_dict()) for model in (parent, child)]
    calibrate_(child, parent, [smooth_images(20)])
    moved = [
        {n for n, value in model.state_dict().items() if n not in old or not torch.equal(value, old[n])}
        for model, old in zip((parent, child), before, strict=True)
    ]
    assert moved == [set(), {"0.weight", "0.bias", "2.weight", "2.bias"}]
    assert parent.training


def test_a_layer_that_runs_twice_is_solved_once() -> None:
    kernels = []
    for times in (1, 2):
        torch.manual_seed(0)
        parent = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1)] * times)
        child = copy.deepcopy(parent)
        recast_(child, plan(child, smooth_images(1), SOFT, where="all"))
        calibrate_(child, parent, [smooth_images(20)])
        kernels.append(child[0].weight)
    assert torch.equal(*kernels)
