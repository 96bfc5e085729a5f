"""BatchNorm multiplied into recast layers: the same outputs, both paths scaled, and nothing done where others read."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from layer_helpers import InCode, recast_copy
from torch import Tensor, nn

import recast
from recast import RecastConfig, RecastError
from recast.layers.cmhsa import gated_layers
from recast.surgery.scales import randomize_scales_

X = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def opened(parent: nn.Module, x: Tensor, gate: str) -> Any:
    """A recast network whose gates are open and whose BatchNorms do something."""
    child = recast_copy(randomize_scales_(parent.eval(), x), x, RecastConfig(gate)).eval()
    for layer in gated_layers(child).values():
        nn.init.uniform_(layer.gamma if gate != "sigmoid" else layer.lam, 0.2, 0.5)
    return child


@torch.no_grad()
@pytest.mark.parametrize("gate", ["beside", "linear", "sigmoid"])
@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv2_035"])
def test_the_outputs_stay(name: str, gate: str, error_of: Any, tmp_path: Path) -> None:
    """timm's BatchNormAct2d keeps its activation (MobileNet)."""
    child = opened(timm.create_model(name, num_classes=5), X, gate)
    expected, norms = child(X), sum(isinstance(m, nn.BatchNorm2d) for m in child.modules())
    report = recast.fold_(child, data=X, batch_norm=True)
    assert error_of(child(X), expected) < 1e-5
    assert all(row.batch_norm for row in report)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in child.modules()) == norms - len(report)
    for _ in range(2):  # folding again does not forget it
        with pytest.raises(RecastError, match="export"):
            recast.save(child, tmp_path / "child.safetensors")
        recast.fold_(child)


@torch.no_grad()
def test_what_is_read_elsewhere_or_does_more_stays() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.read(x)
        z = m.doubled(m.norm(y) + y)
        return m.last(m.after(z))

    parts = {"read": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "doubled": Doubled(4, 4, 3)}
    parent = InCode(run, **parts, after=nn.BatchNorm2d(4), last=nn.Conv2d(4, 4, 1))
    child = recast_copy(
        randomize_scales_(parent.eval(), X), X, RecastConfig(), where=["read", "doubled"], max_tokens=None
    )
    for layer in gated_layers(child.eval()).values():
        nn.init.constant_(layer.gamma, 0.5)
    before, expected = copy.deepcopy(child.state_dict()), child(X)
    assert [row.batch_norm for row in recast.fold_(child, data=X, batch_norm=True)] == ["", ""]
    assert torch.equal(child(X), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in child.state_dict().items())
    with pytest.raises(RecastError, match="data"):
        recast.fold_(child, batch_norm=True)
