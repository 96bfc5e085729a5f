"""Convolutions of classes without a rule become the papers' layers if they compute a convolution of a padded input."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer_helpers import PAPERS
from torch import Tensor, nn

import recast
from recast import Geometry, RecastConfig, RecastError
from recast.surgery.probing import probed_geometry


class Padded(nn.Conv2d):
    """Pads by a function of its own, then convolves."""

    def __init__(self, *args: Any, pad: Callable[[Tensor], Tensor], after: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pad, self.after = pad, after or (lambda y: y)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(self.pad(x), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        return self.after(y)


def same(kernel: int, stride: int) -> Callable[[Tensor], Tensor]:
    """TensorFlow's SAME."""

    def pad(x: Tensor) -> Tensor:
        totals = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x.shape[-2:]]
        rows, columns = totals
        return F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))

    return pad


def fixed(*sides: int, mode: str = "constant") -> Callable[[Tensor], Tensor]:
    return lambda x: F.pad(x, sides, mode=mode)


KINDS: dict[str, tuple[Callable[[], nn.Module], Geometry]] = {
    "SAME": (lambda: Padded(4, 8, 3, 2, pad=same(3, 2)), Geometry((3, 3), (2, 2), same=True)),
    "SAME that is fixed": (lambda: Padded(4, 8, 4, 2, pad=same(4, 2)), Geometry((4, 4), (2, 2), padding=(1, 2, 1, 2))),
    "fixed, uneven": (
        lambda: Padded(4, 8, 3, 2, pad=fixed(0, 1, 0, 1)),
        Geometry((3, 3), (2, 2), padding=(0, 1, 0, 1)),
    ),
    "causal": (lambda: Padded(4, 8, 3, pad=fixed(1, 1, 2, 0)), Geometry((3, 3), padding=(2, 0, 1, 1))),
    "reflected": (
        lambda: Padded(4, 8, 3, pad=fixed(1, 1, 1, 1, mode="reflect")),
        Geometry((3, 3), padding=(1, 1, 1, 1), padding_mode="reflect"),
    ),
    "circular, grouped": (
        lambda: Padded(4, 8, 5, groups=2, pad=fixed(2, 2, 2, 2, mode="circular")),
        Geometry((5, 5), padding=(2, 2, 2, 2), padding_mode="circular"),
    ),
    "replicated, dilated, no bias": (
        lambda: Padded(4, 4, (3, 1), dilation=2, bias=False, pad=fixed(0, 0, 2, 2, mode="replicate")),
        Geometry((3, 1), padding=(2, 2, 0, 0), padding_mode="replicate", dilation=(2, 2)),
    ),
    "depthwise": (lambda: Padded(6, 6, 3, groups=6, pad=fixed(1, 1, 1, 1)), Geometry((3, 3), padding=(1, 1, 1, 1))),
    "none": (lambda: Padded(4, 8, 3, pad=fixed(0, 0, 0, 0)), Geometry((3, 3))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [PAPERS, RecastConfig("sigmoid")])
def test_a_convolution_of_its_own_class_is_recast_with_the_padding_that_it_has(kind: str, config: RecastConfig) -> None:
    torch.manual_seed(0)
    build, expected = KINDS[kind]
    conv = build().eval()
    model, x = nn.Sequential(conv), torch.randn(2, conv.in_channels, 13, 10)
    before = copy.deepcopy(conv.state_dict())
    planned = recast.plan(model, x, config, where="all")
    (step,) = planned.steps
    assert step.rule == "Padded (by probing)"
    assert step.geometry == expected
    assert all(torch.equal(value, before[name]) for name, value in conv.state_dict().items())
    child = recast.recast_(copy.deepcopy(model), planned).eval()
    for size in ((13, 10), (9, 16), (12, 12)):
        x = torch.randn(2, conv.in_channels, *size)
        if config.gate == "linear":
            assert torch.equal(child(x), model(x))
        else:
            assert child(x).shape == model(x).shape
    assert torch.equal(recast.fold_(child) and child(x), model(x)) or config.gate == "sigmoid"


class Pixels(Padded):
    """Pads by a share of the image: no rule of padding holds for all sizes."""

    def __init__(self) -> None:
        super().__init__(4, 8, 3, pad=lambda x: F.pad(x, (x.shape[3] // 4,) * 2 + (x.shape[2] // 4,) * 2))


class Normed(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(4, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Noisy(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * torch.rand(()))


def padded(pad: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    return Padded(4, 8, 3, pad=pad, after=after)


OTHER = "its output is not a convolution"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an activation inside": (lambda: padded(fixed(1, 1, 1, 1), torch.relu), OTHER),
    "a norm inside": (Normed, "it holds norm.bias too"),
    "a padding by the image's size": (Pixels, OTHER),
    "noise": (lambda: Noisy(4, 8, 3), OTHER),
    "a scaled weight": (lambda: padded(fixed(0, 0, 0, 0), lambda y: 2 * y), OTHER),
    "a padding of a value": (lambda: padded(lambda x: F.pad(x, (1,) * 4, value=0.5)), OTHER),
    "images of one size": (
        lambda: padded(lambda x: x.reshape(len(x), 4, 12, 12)),
        r"it does not run on \(1, 4, 7, 8\)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_computes_anything_else_is_refused_with_the_page_of_rules(kind: str) -> None:
    build, said = REFUSED[kind]
    with pytest.raises(RecastError, match=rf"no rule for .* and probing failed: {said}.*docs/networks\.md"):
        recast.plan(nn.Sequential(build()), torch.randn(2, 4, 12, 12), PAPERS, where="all")


def test_a_probe_is_made_once_and_asks_for_values() -> None:
    conv = KINDS["causal"][0]()
    assert probed_geometry(conv) is probed_geometry(conv)
    conv.pad = fixed(1, 1, 1, 1)
    assert probed_geometry(conv).padding == (1, 1, 1, 1)
    with torch.device("meta"):
        empty = nn.Sequential(Padded(4, 8, 3, pad=fixed(1, 1, 1, 1)))
    with pytest.raises(RecastError, match="its weight is no kernel with values"):
        recast.plan(empty, torch.randn(2, 4, 12, 12, device="meta"), PAPERS, where="all")
    nn.init.normal_(empty.to_empty(device="cpu")[0].weight)
    nn.init.zeros_(empty[0].bias)
    assert recast.plan(empty, torch.randn(2, 4, 12, 12), PAPERS, where="all").steps[0].geometry.padding == (1, 1, 1, 1)
