"""Imports go one way, also through other modules: `test_package.py` looks at single files, this at the closure."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import recast

ROOT = Path(recast.__file__).parent
# Each line may import the lines above it and its own; what is on no line is checked for cycles only.
LAYERS = [
    {"errors", "config", "files", "json_files"},
    {"geometry"},
    {"functional"},
    {"convolution", "taps", "heads", "gpsa", "cmhsa"},
    {"rules"},
    {"cost", "shapes", "selection", "strides", "steps", "table", "budget", "layer_costs"},
    {"pooling"},
    {"pool_costs", "planning"},
    {"folding", "surgery", "parameters", "schedule", "moved", "switching"},
    {"verification", "calibration", "io", "data", "models"},
    {"evaluation", "explain", "zoo"},
    {"training"},
    {"recipes"},
    {"cli", "quickstart"},
]
HEAVY = {"torch", "timm", "torchvision"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def imports(name: str, inside_functions: bool = True) -> set[str]:
    """Full names of what a module imports when it runs: of this package as modules, of others as written."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if is_type_checking(node):
            return
        if not inside_functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} uses a relative import"
            source = node.module or ""
            for alias in node.names:
                full = f"{source}.{alias.name}"
                found.add(full if full in MODULES else source)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    return found


def reached(name: str, inside_functions: bool = True, packages: bool = True) -> set[str]:
    """Everything that importing (or running) a module pulls in, the `__init__` of its packages included or not."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in MODULES:
            todo += imports(current, inside_functions)
            parent = current.rpartition(".")[0]
            todo += [parent] if parent and packages else []
    return seen


def rank(name: str) -> int | None:
    head = name.split(".")[1] if name.startswith("recast.") else ""
    return next((i for i, layer in enumerate(LAYERS) if head in layer), None)


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_a_later_layer(name: str) -> None:
    own = rank(name)
    for other in imports(name):
        theirs = rank(other)
        assert own is None or theirs is None or theirs <= own, f"{name} imports {other}"


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[1:2] in (["evaluation"], ["explain"])])
def test_measuring_reaches_no_training(name: str) -> None:
    assert not {n for n in reached(name) if n.split(".")[:2] in (["recast", "training"], ["recast", "recipes"])}


@pytest.mark.parametrize("name", [n for n in MODULES if n.split(".")[1:2] == ["report"]])
def test_a_report_reaches_no_torch(name: str) -> None:
    assert not {n for n in reached(name) if n.split(".")[0] in HEAVY}


def test_there_are_no_cycles() -> None:
    for name in MODULES:
        for other in imports(name, inside_functions=False):
            if other in MODULES:
                back = reached(other, inside_functions=False, packages=False)
                assert name not in back, f"{name} and {other} import each other"


def test_the_checks_see_something() -> None:
    assert "recast.functional.fast" in imports("recast.functional")
    assert "recast.geometry" in imports("recast.functional.fast")
    assert "recast.geometry" in reached("recast.functional")
    assert "torch" in reached("recast.surgery")
    assert "recast.geometry" in reached("recast.surgery")
    assert rank("recast.geometry") == 1
    assert rank("recast.training.fit") == 11
