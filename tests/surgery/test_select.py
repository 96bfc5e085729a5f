"""Selection by last stage, names, globs; too many tokens; and the messages when nothing matches."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from layer_helpers import InCode
from torch import Tensor, nn

from recast import RecastError, plan

X = torch.zeros(1, 3, 8, 8)


def run_branches(m: Any, x: Tensor) -> Tensor:
    x = m.last(m.mix(m.down(m.stem(x))))
    return m.up(x).mean((2, 3)) + m.gate(x.mean((2, 3)).unsqueeze(1)).squeeze(1)


MODEL = InCode(
    run_branches,
    stem=nn.Conv2d(3, 4, 3, padding=1),
    down=nn.Conv2d(4, 4, 3, stride=2, padding=1),
    mix=nn.Conv2d(4, 4, 1),
    last=nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
    up=nn.ConvTranspose2d(4, 4, 2, stride=2),
    gate=nn.Conv1d(1, 1, 3, padding=1),
    unused=nn.Conv2d(4, 4, 3),
)
"""Two stages, a 1×1 convolution, a transposed one, a 1-D one, and one that the example does not reach."""


def names(where: Any, model: nn.Module = MODEL, **options: Any) -> list[str]:
    return [step.name for step in plan(model, X, where=where, **options).steps]


def reasons(where: Any, model: nn.Module = MODEL, **options: Any) -> dict[str, str]:
    return {layer.name: layer.reason for layer in plan(model, X, where=where, **options).left}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, ["last"]),
        ("last_of_blocks", ["last"]),
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
    assert names(where) == expected


def test_every_other_layer_is_left_with_its_reason() -> None:
    of_all, of_last, of_stem = (reasons(where) for where in ("all", None, ["stem"]))
    assert of_all.keys() == {"mix", "gate", "unused"}
    assert "1×1" in of_all["mix"]
    assert "no rule for Conv1d" in of_all["gate"]
    assert of_all["unused"] == of_last["unused"] == "not called by the example (at most its weight is read)"
    assert of_last["stem"] == "before the last stage (8×8; the last is 4×4)"
    assert of_last["down"] == "not the last of its block (where=last_stage takes it)"
    assert of_stem["down"] == "not selected by stem"


def test_a_downsampling_convolution_whose_kernels_do_not_overlap_is_taken_only_by_name() -> None:
    """ConvNeXt's 2×2, in a block of its own."""
    stem, down, block = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 2, stride=2), nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(stem, *(nn.Sequential(layer, nn.ReLU()) for layer in (down, block)))
    assert names(None, model) == ["2.0"]
    assert "do not overlap" in reasons(None, model)["1.0"]
    assert names(["1.0"], model) == ["1.0"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("steem", "no convolution matches 'steem'.*Did you mean stem"),
        ("last_of_block", "Did you mean last_of_blocks"),
        (["stem", "layer4.*"], "no convolution matches 'layer4"),
        ("m*", "matches no convolution that can become attention"),  # a glob does not take 1×1 convolutions
        ([], "^where is empty: expected last_stage"),
        (["unused"], "unused cannot be recast: not called by the example"),
        ("gate", "gate cannot be recast: no rule for Conv1d"),
        ("stage:7", "has stages stage:0 to stage:1"),
    ],
)
def test_a_selection_that_cannot_be_met_is_refused(where: Any, message: str) -> None:
    with pytest.raises(RecastError, match=message):
        names(where)


def test_a_layer_used_twice_belongs_to_its_largest_use() -> None:
    shared = InCode(
        lambda m, x: m.a(m.a(x)[..., :4, :4]).sum() + m.b(x[..., :5, :5]).sum(),
        a=nn.Conv2d(3, 3, 3),
        b=nn.Conv2d(3, 3, 3),
    )
    assert names(None, shared) == ["b"]
    assert [step.keys for step in plan(shared, X, where="all").steps] == [64, 25]
    assert names("all", shared, max_tokens=63) == ["b"]


def test_a_layer_with_too_many_tokens_is_left_or_refused() -> None:
    reason = reasons("all", max_tokens=50)["stem"]
    assert reason == "has too many tokens: 64 > max_tokens=50; lower the resolution or raise it"
    assert names(["s*", "l*"], max_tokens=50) == ["last"]
    with pytest.raises(RecastError, match="stem has too many tokens: 64"):  # asked for by name: not left in silence
        names(["stem", "last"], max_tokens=50)
    with pytest.raises(RecastError, match="last has too many tokens: 16"):
        names(None, max_tokens=15)
    for most in (64, None):
        assert names("all", max_tokens=most) == ["stem", "down", "last", "up"]


def test_a_convolution_on_regions_is_in_no_stage() -> None:
    """A detector's heads run on a thousand regions of an image; the last stage is the backbone's."""
    backbone, mask = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    detector = InCode(lambda m, x: m.mask(m.backbone(x)[..., :2, :2].repeat(24, 1, 1, 1)), backbone=backbone, mask=mask)
    assert names(None, detector) == ["backbone"]
    assert reasons(None, detector) == {"mask": "runs on a batch of regions or heads, in no stage"}
    _, step = plan(detector, X, where="all").steps
    assert step.calls == 1
    (region,) = plan(nn.Sequential(mask), torch.zeros(1, 4, 2, 2), where="all").steps
    assert step.after.macs == 24 * region.after.macs  # of all regions of the image


@pytest.mark.parametrize("in_backbone", [True, False])
def test_the_last_stage_of_a_detector_is_its_backbones(in_backbone: bool) -> None:
    """The maps of the pyramid, or of the heads, are as small, or smaller."""
    body = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1))
    rest = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1))
    pyramid = InCode(lambda m, x: m.fpn(m.body(x)), body=body, fpn=rest)
    stage, model = ["backbone.0", "backbone.1"], nn.Sequential(OrderedDict(backbone=body, rest=rest))
    if in_backbone:
        stage, model = ["backbone.body.0", "backbone.body.1"], nn.Sequential(OrderedDict(backbone=pyramid))
    assert names("last_stage", model) == stage
    others = {reason for name, reason in reasons("last_stage", model).items() if name not in stage}
    assert others == {"outside the backbone (name it to recast it)"}
    assert not {*stage} & {*names("stage:-1", model)}
