"""Selection by last stage, names, globs; too many tokens; and the messages when nothing matches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recast import Plan, RecastError, plan


class Model(nn.Module):
    """Two stages, a 1×1 convolution, a transposed one, a 1-D one, and one that the example does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.mix = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 4, (1, 3), padding=(0, 1))
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.gate = nn.Conv1d(1, 1, 3, padding=1)
        self.unused = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.mix(self.down(self.stem(x))))
        return self.up(x).mean((2, 3)) + self.gate(x.mean((2, 3)).unsqueeze(1)).squeeze(1)


X = torch.zeros(1, 3, 8, 8)


def names_of(planned: Plan) -> list[str]:
    return [step.name for step in planned.steps]


def names(where: Any) -> list[str]:
    return names_of(plan(Model(), X, where=where))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, ["down", "last"]),
        ("last_stage", ["down", "last"]),
        ("all", ["stem", "down", "last", "up"]),
        (["stem"], ["stem"]),
        (("last", "stem"), ["stem", "last"]),
        (["last_stage", "mix"], ["down", "mix", "last"]),
        ("[sd]*", ["stem", "down"]),
        ("mix", ["mix"]),
        (["mix", "las*"], ["mix", "last"]),
        ("stage:0", ["stem", "up"]),
        ("stage:-1", ["down", "last"]),
    ],
)
def test_variants_of_where(where: Any, expected: list[str]) -> None:
    """In the order of the model; a 1×1 convolution by its full name."""
    assert names(where) == expected


def test_every_other_layer_is_left_with_its_reason() -> None:
    of_all, of_last, of_stem = (
        {item.name: item.reason for item in plan(Model(), X, where=where).left} for where in ("all", None, ["stem"])
    )
    assert of_all.keys() == {"mix", "gate", "unused"}
    assert "1×1" in of_all["mix"]
    assert "no rule for Conv1d" in of_all["gate"]
    assert of_all["unused"] == of_last["unused"] == "not called by the example (at most its weight is read)"
    assert of_last["stem"] == "before the last stage (8×8; the last is 4×4)"
    assert of_stem["down"] == "not selected by stem"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("steem", "no convolution matches 'steem'.*Did you mean stem"),
        (["stem", "layer4.*"], "no convolution matches 'layer4"),
        ("m*", "matches no convolution that can become attention"),  # a glob does not take 1×1 convolutions
        ([], "matches no convolution"),
        (["unused"], "unused cannot be recast: not called by the example"),
        ("gate", "gate cannot be recast: no rule for Conv1d"),
        ("stage:7", "has stages stage:0 to stage:1"),
    ],
)
def test_a_selection_that_cannot_be_met_is_refused(where: Any, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        names(where)


def test_a_layer_used_twice_belongs_to_its_largest_use() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.a(x)[..., :4, :4]).sum() + self.b(x[..., :5, :5]).sum()

    assert names_of(plan(Shared(), X)) == ["b"]
    both = plan(Shared(), X, where="all")
    assert [step.keys for step in both.steps] == [64, 25]
    assert names_of(plan(Shared(), X, where="all", max_tokens=63)) == ["b"]


def test_a_layer_with_too_many_tokens_is_left_or_refused() -> None:
    left = {item.name: item.reason for item in plan(Model(), X, where="all", max_tokens=50).left}
    assert left["stem"] == "has too many tokens: 100, max_tokens is 50; lower the resolution or raise it"
    assert names_of(plan(Model(), X, where=["s*", "l*"], max_tokens=50)) == ["last"]
    with pytest.raises(RecastError, match="stem has too many tokens: 100"):  # asked for by name: not left in silence
        plan(Model(), X, where=["stem", "last"], max_tokens=50)
    with pytest.raises(RecastError, match="last has too many tokens: 24"):
        plan(Model(), X, max_tokens=20)
    for most in (100, None):
        assert names_of(plan(Model(), X, where="all", max_tokens=most)) == ["stem", "down", "last", "up"]


def test_a_convolution_on_regions_is_in_no_stage() -> None:
    """A detector's heads run on a thousand regions of an image; the last stage is the backbone's."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Conv2d(3, 4, 3, stride=2, padding=1)
            self.mask = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.mask(self.backbone(x)[..., :2, :2].repeat(24, 1, 1, 1))

    p = plan(Detector(), X)
    assert names_of(p) == ["backbone"]
    assert p.left[0].reason == "runs on regions of the image, in no stage"
    _, mask = plan(Detector(), X, where="all").steps
    assert mask.calls == 1
    one = plan(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), torch.zeros(1, 4, 2, 2), where="all")
    assert mask.after.macs == 24 * one.steps[0].after.macs  # of all regions of the image
