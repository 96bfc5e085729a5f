from __future__ import annotations

import pytest

from recast.run.records import Wakefulness


def heads(shares: list[float], entropy: float) -> dict[str, dict[str, list[float]]]:
    return {"layer4": {"attention_share": shares, "entropy": [entropy] * len(shares)}}


@pytest.mark.parametrize(
    ("shares", "entropy", "slept", "says", "remedy"),
    [
        ([0.02, 0.0, 0.03], 0.7, False, "attention is awake in 2 of 3 heads", ""),
        ([0.0] * 20, 0.999, True, "maps are uniform (entropy 0.999 of its maximum)", "query_key=images"),
        ([0.001] * 20, 0.7, True, "0 of 20 heads do what a global mean would not, their gates", "gate_lr"),
    ],
)
def test_a_sentence_says_whether_attention_was_at_work(
    shares: list[float], entropy: float, slept: bool, says: str, remedy: str
) -> None:
    found = Wakefulness.of(heads(shares, entropy))
    assert found is not None
    assert found.slept == slept
    assert says in str(found)
    assert remedy in found.remedy


def test_where_nothing_was_measured_nothing_is_said() -> None:
    assert Wakefulness.of({}) is None
    assert Wakefulness.of({"layer4": {"gamma": [0.0]}}) is None
