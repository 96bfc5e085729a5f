"""Every public name has an example in its docstring, and the examples run."""

import copy
import doctest
from pathlib import Path

import pytest
import torch
from torch import nn

import recast
import recast.lab.evaluation

NAMES = [name for name in recast.__all__ if name != "__version__"]
EVALUATION = ["evaluate", "PixelModel", "attacks.pgd"]
LAB = ["lab.data.load_data", *(f"lab.evaluation.{name}" for name in EVALUATION)]


@pytest.mark.parametrize("name", [*NAMES, *LAB])
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"copy": copy, "nn": nn, "recast": recast, "torch": torch}
    finder = doctest.DocTestFinder(recurse=False)
    tests = [test for test in finder.find(eval(f"recast.{name}"), name, globs=names) if test.examples]
    assert tests, f"recast.{name} has no example"
    output: list[str] = []
    for test in tests:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert not output, "".join(output)
