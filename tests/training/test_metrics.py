from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small import small_child, small_data, small_fit, small_parent, small_recipe

from recast.lab.training.loop import fit


def test_tensorboard_gets_the_numbers_of_every_epoch(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = small_fit(tmp_path, small_child(), trackers=["tensorboard"])
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [round(event.value, 4) for event in found.Scalars("val_loss")] == [round(row["val_loss"], 4) for row in rows]
    assert [event.step for event in found.Scalars("train_loss")] == [1, 2, 3]
    assert "gates/4/gamma" in found.Tags()["scalars"]


def test_the_row_says_how_long_was_waited_for_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_data()
    batch = type(data.train).batch

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.2)  # longer than a step, on a busy machine too
        return batch(self, *args)

    monkeypatch.setattr(type(data.train), "batch", slow)
    monkeypatch.setattr("recast.lab.training.metrics.WORTH_SECONDS", 0.0)
    rows = fit(small_parent(), data, small_recipe(epochs=1), tmp_path)
    assert rows[0]["data_wait"] is None
    assert rows[1]["data_wait"] > 0.5
    assert 0 < rows[1]["images_per_second"] < 40 / 0.25
    assert "waiting for data: set data.workers (now 0;" in capsys.readouterr().err


def test_a_long_training_says_what_it_will_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, told in ((0.0, 1), (300.0, 0)):
        monkeypatch.setattr("recast.lab.training.metrics.LONG", limit)
        fit(small_parent(), small_data(), small_recipe(epochs=2), tmp_path / str(told))
        assert capsys.readouterr().err.count("to go (") == told
