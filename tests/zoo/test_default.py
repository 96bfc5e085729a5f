"""The default in a network of the zoo: both places, and what the control catches."""

import pytest
from zoo import default
from zoo.default import DefaultRow, examine

import recast


def test_both_places_are_exact_and_open_gates_change_the_output() -> None:
    rows = examine("timm:resnet10t")
    assert [(row.place, row.status) for row in rows] == [("convolution", "exact"), ("block", "exact")]
    assert [row.kinds for row in rows] == ["Conv2d:1", "PassThrough:1"]
    for row in rows:
        assert row.control > 0.01
        assert 1 < row.macs < 1.1


def test_a_network_without_a_place_or_without_convolutions_says_so() -> None:
    name = "timm:vit_tiny_patch16_224"
    assert examine(name) == [DefaultRow(name, "", "no spatial convolution")]
    assert [row.status for row in examine("timm:dla46x_c")] == ["exact", "refused"]


def test_a_changed_output_and_a_layer_without_effect_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "PLACES", ("convolution",))
    with monkeypatch.context() as patch:
        patch.setattr(recast.AttentionBeside, "reset_parameters", lambda self, tap: self.gamma.data.fill_(0.1))
        assert examine("timm:resnet10t")[0].status == "changed"
    with monkeypatch.context() as patch:
        patch.setattr(recast.AttentionBeside, "forward", lambda self, x: self.conv(x))
        assert examine("timm:resnet10t")[0].status == "vacuous"
