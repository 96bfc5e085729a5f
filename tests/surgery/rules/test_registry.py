"""Finding a module's rule: its exact type, its bases where they compute the same, and rules of one's own."""

from typing import Any

import pytest
import torch
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn

from recast import GPSA, RecastConfig
from recast.surgery import rules
from recast.surgery.rules import find_rule, recasts, refusal

KINDS = (Conv2dSame, nn.Conv2d, nn.ConvTranspose2d, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame)


class Scaled(nn.Conv2d):
    """Computes something of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_that_compute_the_same_are_taken(kind: type[nn.Module], layer_of: Any) -> None:
    class Named(kind):
        """Another constructor, the same computation."""

        def __init__(self, channels: int) -> None:
            super().__init__(channels, channels, 3, padding=1)

    conv, x = Named(4).eval(), torch.randn(1, 4, 5, 5)
    assert refusal(conv) is None
    assert find_rule(conv)[0] is kind
    assert torch.equal(layer_of(conv)(x), conv(x))


def test_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch, layer_of: Any) -> None:
    """The exact type wins over its bases: a convolution with a forward of its own can be given a rule."""
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    @recasts(Scaled)
    def _(conv: Scaled, config: RecastConfig) -> GPSA:
        plain = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size, bias=conv.bias is not None)
        return layer_of(plain, config)

    found = find_rule(Scaled(3, 4, 3))
    assert found[0] is Scaled
    assert find_rule(nn.Conv2d(3, 4, 3))[0] is nn.Conv2d
    assert find_rule(StdConv2d(3, 4, 3))[0] is StdConv2d
