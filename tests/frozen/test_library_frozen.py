"""What the library gave before: recipes, plans, comparisons, layers, saved files, a training that goes on, names.

`python tests/frozen/write_library.py [ITEM …]` writes the files anew, where a change is meant to move them.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load() -> ModuleType:
    """The writer, beside this file."""
    spec = importlib.util.spec_from_file_location("write_library", Path(__file__).with_name("write_library.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


frozen = _load()
SAVED = sorted(frozen.read("saved")["outputs"])


def check(expected: Any, got: Any, tolerance: float = 0.0) -> None:
    """Fail with the first place that differs."""
    difference = frozen.first_difference(expected, frozen.plain(got), "", tolerance)
    assert difference is None, difference


def test_the_recipes_are_those_in_git() -> None:
    held = frozen.read("recipes")
    got = frozen.all_recipes()
    check(held["default"], frozen.default_recipe())
    assert list(held["recipes"]) == sorted(got)
    for name, changes in held["recipes"].items():
        check({name: frozen.merged(held["default"], changes)}, {name: got[name]})


def test_the_listing_of_recipes_is_the_one_in_git() -> None:
    check(frozen.read("recipe_listing"), frozen.recipe_listing())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", frozen.PLANS)
def test_a_plan_is_the_one_in_git(name: str) -> None:
    check(frozen.read("plans")[name], frozen.plan_of(name))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", frozen.VERIFIED)
def test_a_comparison_is_the_one_in_git(name: str) -> None:
    check(frozen.read("verify")[name], frozen.verification_of(name), tolerance=frozen.LARGE)


@pytest.mark.parametrize("name", frozen.layer_cases())
def test_a_layer_is_the_one_in_git(name: str) -> None:
    check(frozen.read("state_dicts")[name], frozen.layer_of(name), tolerance=1e-4)


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
    check(held["rest"], got, tolerance=0.0 if held["platform"] == frozen.platform() else 1e-4)


@pytest.mark.parametrize("name", frozen.FUNCTIONS)
def test_a_function_gives_what_it_gave(name: str) -> None:
    check(frozen.read("functions")[name], frozen.function_of(name), tolerance=1e-4)


def test_public_names_and_signatures_are_those_in_git() -> None:
    held, got = frozen.read("public"), frozen.public()
    check(held["all"], got["all"])
    for name, expected in held["callables"].items():
        check({name: expected["signature"]}, {name: got["callables"][name]["signature"]})


@pytest.mark.parametrize("name", [n for n, held in frozen.read("public")["callables"].items() if "methods" in held])
def test_the_methods_of_a_public_class_are_those_in_git(name: str) -> None:
    check(frozen.read("public")["callables"][name]["methods"], frozen.public()["callables"][name]["methods"])


def test_a_difference_is_found_and_named() -> None:
    assert frozen.first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a[1].b: expected 2, got 3"
    assert frozen.first_difference({"a": 1.0}, {"a": 1.0 + 1e-7}, tolerance=1e-6) is None
    assert frozen.first_difference({"a": [1]}, {"a": [1, 2]}) is not None
    assert frozen.first_difference({"a": False}, {"a": 0}) is not None
    assert math.isclose(float(frozen.unhex(frozen.hexes(frozen.unhex(["0x1.8p-3"])))), 0.1875)
