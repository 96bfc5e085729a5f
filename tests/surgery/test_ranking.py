"""`rank`: which layers' gates promise a lower loss, and plans that take those."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast import RecastConfig, RecastError, plan, recast_, wake_
from recast.lab.experimental import ranking
from recast.lab.experimental.ranking import plan_best, rank
from recast.layers.gpsa import GPSA, gpsa_layers
from recast.surgery.limits import Budget, Limit

pytestmark = pytest.mark.usefixtures("papers_layer")

TWO = ["early", "late"]


class Corner(nn.Module):
    """Reads the corner of two maps, of half of the channels each: what is elsewhere only attention brings there."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = (nn.Conv2d(4, 4, 3, padding=1) for _ in TWO)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.head(torch.cat([self.early(x[:, :4]), self.late(x[:, 4:])], 1)[..., 0, 0])
        return seen


def corner(telling: str, count: int = 128) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and images whose class is in the far corner of what the layer `telling` sees, and nowhere else."""
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(count, 8, 8, 8, generator=generator)
    labels = torch.randint(2, (count,), generator=generator)
    first = 4 * TWO.index(telling)
    images[:, first : first + 4, 4:, 4:] += 2 * labels[:, None, None, None] - 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Corner(), images, labels


@pytest.mark.parametrize("telling", TWO)
def test_the_layer_that_can_bring_the_answer_ranks_first(telling: str) -> None:
    model, images, labels = corner(telling)
    found = rank(model, plan(model, images, where="all"), images, labels)
    promised = {layer.name: layer.promised for layer in found.layers}
    (other,) = set(TWO) - {telling}
    assert found.order()[0] == found.layers[0].name == telling
    assert promised[telling] > 10 * promised[other], promised
    assert found.images == 64
    chosen, _ = plan_best(model, images, labels, RecastConfig(), Budget(params=Limit(1e9)))
    assert chosen.steps[0].name == telling


def test_a_ranking_is_repeatable_and_leaves_everything_as_it_was() -> None:
    model, images, labels = corner("early")
    model.get_submodule("early").eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    todo, state = plan(model, images, where="all"), torch.get_rng_state()
    first = rank(model, todo, images, labels)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert rank(model, todo, images, labels) == first
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(isinstance(module, GPSA) for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert [len(layer["slopes"]) for layer in json.loads(first.to_json())["layers"]] == [9, 9]
    assert "per GMAC" in str(first)


@pytest.mark.parametrize("options", [{}, {"content": "linear"}, {"attend_padding": True}])
def test_what_a_gate_promises_is_what_a_small_opening_gives(options: dict[str, Any]) -> None:
    model, images, labels = corner("late")
    model, images = model.double(), images.double()
    todo = plan(model, images, RecastConfig(**options), where="late")
    found = rank(model, todo, images, labels).layers[0]
    child = recast_(copy.deepcopy(model), todo)
    wake_(child, images[::2])
    losses = []
    for step in (0.0, 1e-6):
        with torch.no_grad():
            gpsa_layers(child)["late"].gamma[4] = step
            losses.append(float(nn.functional.cross_entropy(child.eval()(images[1::2]), labels[1::2])))
    assert (losses[1] - losses[0]) / 1e-6 == pytest.approx(found.slopes[4], rel=1e-3)
    beyond = [max(0.0, abs(slope) - 2 * error) for slope, error in zip(found.slopes, found.errors, strict=True)]
    assert found.promised == pytest.approx(sum(beyond))


def test_auto_takes_what_promises_most_for_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, labels = corner("early")
    measured = rank(model, plan(model, images, where="all"), images, labels)
    early, late = (next(layer for layer in measured.layers if layer.name == name) for name in TWO)
    both = plan(model, images, where="all")
    added = [step.after.macs - step.before.macs for step in both.steps]
    assert added[0] == added[1] > 0

    def chosen(promised: tuple[float, float], budget: str) -> list[str]:
        layers = [replace(layer, promised=value) for layer, value in zip((early, late), promised, strict=True)]
        ordered = replace(measured, layers=tuple(sorted(layers, key=lambda layer: -layer.per("macs"))))
        monkeypatch.setattr(ranking, "rank", lambda *_: ordered)
        steps = plan_best(model, images, labels, RecastConfig(), Budget.parse(budget))[0].steps
        return sorted(step.name for step in steps)

    one = f"macs={both.before.macs + added[0]}"
    assert chosen((0.2, 0.1), one) == ["early"]
    assert chosen((0.1, 0.2), one) == ["late"]
    assert chosen((0.1, 0.2), "macs=99x") == TWO
    assert chosen((0.2, 0.0), "macs=99x") == ["early"], "nothing is promised by the other"
    with pytest.raises(RecastError, match="does not fit the budget"):
        chosen((0.2, 0.1), "macs=1.0x")
    with pytest.raises(RecastError, match="no layer's gates promise anything"):
        chosen((0.0, 0.0), "macs=99x")


def test_what_cannot_be_ranked_is_refused() -> None:
    model, images, labels = corner("early")
    todo = plan(model, images, where="all")
    strided = replace(todo, config=RecastConfig(stride="remove"))
    for given, message in (
        ((todo, images[:16], labels), r"32 images or more and their labels, got 16, 128$"),
        ((todo.without_steps(), images, labels), "the plan recasts no layer"),
        ((strided, images, labels), "stride='keep' is needed"),
        ((todo, images * float("inf"), labels), "NaN or infinite values"),
    ):
        with pytest.raises(RecastError, match=message):
            rank(model, *given)
    for wrong in (torch.full_like(labels, 99), labels.float(), labels - 200):
        with pytest.raises(RecastError, match="labels must be whole numbers from 0 to"):
            rank(model, todo, images, wrong)

    def broken(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyError("target")

    with pytest.raises(RecastError, match=r"loss broken.*KeyError") as raised:
        rank(model, todo, images, labels, loss=broken)
    assert isinstance(raised.value.__cause__, KeyError)
    nn.init.constant_(model.get_submodule("head").weight, float("inf"))
    with pytest.raises(RecastError, match="the loss of the network is not finite on these images"):
        rank(model, todo, images, labels)
