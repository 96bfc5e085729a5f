"""What the library gave before: plans, comparisons, layers, saved files, a training that goes on.

`python tests/frozen/write_library.py [ITEM …]` writes the files anew, where a change is meant to move them.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import write_library as frozen

from recast.surgery import during_training, parameters

pytestmark = pytest.mark.usefixtures("slow_gates")

SAVED = sorted(frozen.read("saved")["outputs"])
ELSEWHERE = frozen.read("saved")["platform"] != frozen.platform()
"""On another processor: what is solved or trained differs by more, and which forms have the very bits is its own."""


@pytest.fixture
def slow_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the base rate, as when the files were written."""
    for module in (during_training, parameters):
        monkeypatch.setattr(module, "LINEAR_GATE_LR_RATIO", 10.0)


def check(expected: Any, got: Any, tolerance: float = 0.0) -> None:
    values = {
        path: pytest.approx(value, tolerance, tolerance) if isinstance(value, float) else value
        for path, value in frozen.flat(expected)
    }
    assert dict(frozen.flat(frozen.plain(got))) == values


SELDOM = {"densenet", "hrnet", "regnet"}
"""Larger networks with RECAST_SLOW=1."""


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=pytest.mark.slow if name in SELDOM else ())
        for file in frozen.EACH
        for name in frozen.EACH[file][0]
    ],
)
def test_an_entry_is_the_one_in_git(file: str, name: str) -> None:
    _, make, tolerance = frozen.EACH[file]
    expected, got = frozen.read(file)[name], frozen.plain(make(name))
    if ELSEWHERE and file == "verify":
        for forms in (expected.get("forms", {}), got.get("forms", {})):
            for form in forms.values():
                form[0] = None
    check(expected, got, tolerance)


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_file_gives_what_it_gave(name: str) -> None:
    held = frozen.read("saved")
    got = frozen.output_of(frozen.FOLDER / "saved" / f"{name}.safetensors")
    if held["platform"] == frozen.platform():
        check(held["outputs"][name], got)
    else:
        expected = [float.fromhex(value) for value in held["outputs"][name]]
        scale = max(map(abs, expected))
        assert [float.fromhex(value) for value in got] == pytest.approx(expected, rel=1e-5, abs=1e-5 * scale)


def test_an_interrupted_training_goes_on_as_it_did(tmp_path: Path) -> None:
    held = frozen.read("resume")
    shutil.copytree(frozen.FOLDER / "resume", tmp_path / "run")
    got = frozen.trained(tmp_path / "run", resume=True)
    assert len(got["losses"]) == len(held["rest"]["losses"])
    if is_elsewhere := held["platform"] != frozen.platform():
        for name in ("0.bias", "1.running_mean"):  # BatchNorm follows: the gradient is rounding, which Adam scales up
            del held["rest"]["weights"][name], got["weights"][name]
    check(held["rest"], got, tolerance=5e-3 if is_elsewhere else 0.0)
