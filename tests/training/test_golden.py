"""Losses of short runs, held in git: to the last bit where they were written, to 1e-4 on other machines."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from golden_losses import FILE, RUNS, losses, platform


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_those_in_git(name: str) -> None:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    found, expected = losses(name), content["losses"][name]
    if content["platform"] == platform():
        assert found == expected
    else:
        assert found == pytest.approx(expected, rel=1e-4)
