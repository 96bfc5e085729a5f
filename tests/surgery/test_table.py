from __future__ import annotations

import pytest
import timm
import torch

from recast.run.config import RecastConfig
from recast.surgery.plan import Plan, plan_table
from recast.surgery.planning import plan
from recast.surgery.table import quantity


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(timm.create_model("resnet18"), torch.zeros(1, 3, 64, 64), RecastConfig(gate="sigmoid"))


@pytest.mark.parametrize("width", [1000, 160, 120, 100, 80])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(planned: Plan, width: int) -> None:
    text = plan_table(planned, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.startswith("ResNet: 4 of 20 convolutions recast\n")
    words = text.replace("\n", " ")
    for step in planned.steps:
        assert step.name in words
        for cost in (step.before, step.after):
            assert quantity(cost.parameters) in words
            assert quantity(cost.macs) in words
            assert quantity(cost.activation_bytes, "B", 1024) in words
    assert words.count("gate") == len(planned.steps)


def test_a_wide_table_has_one_line_for_a_layer_and_a_narrow_one_two(planned: Plan) -> None:
    first, second = (step.name for step in planned.steps[:2])

    def lines(width: int) -> int:
        found = plan_table(planned, width).splitlines()
        where = [next(i for i, line in enumerate(found) if name in line) for name in (first, second)]
        return where[1] - where[0]

    assert lines(1000) == 1
    assert lines(100) == 4  # with the line that says why it is not exact, and a rule


def test_a_terminal_decides_and_a_pipe_takes_all(planned: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(planned) == plan_table(planned, 1000)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert str(planned) == plan_table(planned, 100) != plan_table(planned, 1000)
