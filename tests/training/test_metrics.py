from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from small import small_data, small_parent, small_recipe

from recast.lab.training.loop import fit


def test_the_row_says_how_long_was_waited_for_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_data()
    batch = type(data.train).batch

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.2)  # longer than a step, on a busy machine too
        return batch(self, *args)

    monkeypatch.setattr(type(data.train), "batch", slow)
    rows = fit(small_parent(), data, small_recipe(epochs=1), tmp_path)
    assert rows[0]["data_wait"] is None
    assert rows[1]["data_wait"] > 0.5
    assert 0 < rows[1]["images_per_second"] < 40 / 0.25
    assert f"images/s  data {rows[1]['data_wait']:.0%}" in capsys.readouterr().err
