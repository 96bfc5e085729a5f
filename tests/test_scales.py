import copy

import pytest
import timm
import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from recast import RecastError, plan, recast_
from recast.surgery.scales import layer_scales, randomize_scales_, recalibrate_batch_norm_


def test_every_layer_scale_of_a_network_is_woken_and_gates_are_none() -> None:
    """EdgeNeXt's cross-covariance branch has a LayerScale of its own, `gamma_xca`: at 1e-6 the branch is silent."""
    model = randomize_scales_(timm.create_model("edgenext_xx_small", num_classes=3))
    scales = {name: scale.detach() for name, scale in layer_scales(model).items()}
    assert any(name.endswith("gamma_xca") for name in scales)
    assert all(0.5 <= float(scale.min()) < float(scale.max()) <= 1 for scale in scales.values())
    model = timm.create_model("test_convnext", num_classes=3)
    recast_(model, plan(model, torch.zeros(1, 3, 64, 64), where=["stages.3.blocks.0.conv_dw"]))
    assert len(layer_scales(model)) == 9
    assert not any("conv_dw" in name for name in layer_scales(model))


class Noisy(nn.Module):
    """BatchNorm among what else has state or draws random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3, momentum=0.3)
        self.conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
        self.act = BatchNormAct2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.act(self.conv(self.norm(x))))


def test_recalibration_measures_the_images_and_nothing_else_moves() -> None:
    model = Noisy().train()
    model.act.eval()  # flags may differ from module to module
    values = {k: v.clone() for k, v in model.state_dict().items() if "running" not in k}
    flags = [module.training for module in model.modules()]
    batches = [2 + 3 * torch.randn(size, 3, 8, 8) for size in (6, 6, 2)]
    random = torch.get_rng_state()
    recalibrate_batch_norm_(model, iter(batches))
    assert torch.equal(torch.get_rng_state(), random)
    shares = torch.tensor([6, 6, 2]) / 14
    mean = sum(share * batch.mean((0, 2, 3)) for share, batch in zip(shares, batches, strict=True))
    var = sum(share * batch.var((0, 2, 3)) for share, batch in zip(shares, batches, strict=True))
    assert torch.allclose(model.norm.running_mean, mean, atol=1e-5)
    assert torch.allclose(model.norm.running_var, var, atol=1e-4)
    assert not torch.equal(model.act.running_mean, torch.zeros(4))  # frozen before, and measured all the same
    assert all(torch.equal(value, values[k]) for k, value in model.state_dict().items() if k in values)
    assert [module.training for module in model.modules()] == flags
    assert (model.norm.momentum, model.act.momentum) == (0.3, 0.1)


def test_recalibration_sees_the_layers_below_as_in_training() -> None:
    """The second norm is given what the first makes of the batch's own statistics, not of its old ones."""
    model = nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2, affine=False))
    recalibrate_batch_norm_(model, [5 + torch.randn(8, 2, 4, 4)])
    assert torch.allclose(model[1].running_mean, torch.zeros(2), atol=1e-5)


@pytest.mark.parametrize(
    ("batches", "message"),
    [([], "require at least one batch"), ([torch.randn(4, 3, 1, 1), torch.randn(1, 3, 1, 1)], "more than 1 value per")],
)
def test_a_recalibration_that_fails_changes_nothing(batches: list[Tensor], message: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout()).train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RecastError, match=message):
        recalibrate_batch_norm_(model, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert (model[0].momentum, model[0].training, model[1].training) == (0.1, True, True)
