"""Losses of short runs, held in git: to the last bit where they were written, to 1e-4 on other machines.

A change that should not alter results must reproduce them. They are written anew by
`PYTHONPATH=tests/frozen python tests/training/test_golden.py`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import platform
from small import small_child, small_fit

from recast.lab.config import AugmentConfig, ClassifyConfig, RegularizationConfig
from recast.layers.config import PAPERS_LAYER

FILE = Path(__file__).with_name("golden_losses.json")

RUNS: dict[str, dict[str, Any]] = {
    "beside": {"regularization": RegularizationConfig(ema_decay=0.9), "optim": {"gate_l1": 0.1}},
    "linear": {},
    "mixed": {
        "augment": AugmentConfig(repeats=2),
        "task": ClassifyConfig(mixup=0.8, cutmix=1.0, erasing=0.25, loss="bce"),
        "regularization": RegularizationConfig(ema_decay=0.9),
        "optim": {"opt": "lamb", "clip_grad": 1.0, "gate_l1": 0.1},
        "accumulate": 2,
    },
    "sigmoid": {"task": ClassifyConfig(label_smoothing=0.1)},
}


def losses(name: str) -> list[float]:
    """The loss of every update of a run, then every epoch's validation loss."""
    updates: list[float] = []
    config = {} if name == "beside" else {"gate": "sigmoid" if name == "sigmoid" else "linear", **PAPERS_LAYER}
    child = small_child(**config)
    with tempfile.TemporaryDirectory() as folder:
        rows = small_fit(Path(folder), child, losses=updates, **RUNS[name])
    return updates + [row["val_loss"] for row in rows]


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_those_in_git(name: str) -> None:
    content = json.loads(FILE.read_text(encoding="utf-8"))
    expected = content["losses"][name]
    if content["platform"] != platform():
        expected = pytest.approx(expected, rel=5e-3)  # 19 updates of another processor's rounding
    assert losses(name) == expected


if __name__ == "__main__":
    torch.set_num_threads(1)  # as the tests do
    runs = ",\n".join(f' "{name}": {json.dumps(losses(name))}' for name in RUNS)
    FILE.write_text(f'{{"platform": {json.dumps(platform())},\n"losses": {{\n{runs}\n}}}}\n', encoding="utf-8")
