"""The package as a whole: its public names, what importing it costs, and which way imports go."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import recast

ROOT = Path(recast.__file__).parent
ROOMS = [
    {"errors"},
    {"run"},
    {"report", "recipes"},
    {"tracing"},
    {"layers"},
    {"surgery"},
    {"device", "threads"},
    {"data", "models"},
    {"io", "exporting"},
    {"checking", "hub"},
    {"analysis"},
    {"evaluation"},
    {"explain", "training", "zoo"},
    {"cli"},
]
"""A room imports those of the lines above it and itself."""
LIGHT = {"run", "report", "recipes", "threads"}
"""Rooms that start without torch."""
HEAVY = {"torch", "timm", "torchvision", "numpy", "matplotlib"}


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
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
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


def room(name: str) -> str:
    return name.split(".")[1] if name.startswith("recast.") else ""


def rank(name: str) -> int | None:
    return next((i for i, rooms in enumerate(ROOMS) if room(name) in rooms), None)


def test_every_room_has_its_place() -> None:
    placed = {one for rooms in ROOMS for one in rooms}
    assert {room(name) for name in MODULES} == placed | {"", "__main__"}


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) not in ("", "__main__")])
def test_imports_go_one_way(name: str) -> None:
    own = rank(name)
    for other in imports(name):
        theirs = rank(other)
        if theirs is not None and own is not None:
            assert theirs < own or room(other) == room(name), f"{name} imports {other}"


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "report"])
def test_a_report_reaches_no_torch(name: str) -> None:
    assert not {n for n in reached(name) if n.split(".")[0] in {"torch", "timm", "torchvision"}}


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) in LIGHT])
def test_light_rooms_start_light(name: str) -> None:
    heavy = {n.split(".")[0] for n in reached(name, inside_functions=False)} & HEAVY
    assert not heavy or room(name) == "report", f"{name} imports {heavy}"


def test_there_are_no_cycles() -> None:
    for name in MODULES:
        for other in imports(name, inside_functions=False):
            if other in MODULES:
                back = reached(other, inside_functions=False, packages=False)
                assert name not in back, f"{name} and {other} import each other"


def test_the_checks_see_something() -> None:
    assert "recast.layers.geometry" in imports("recast.layers.functional.backends")
    assert "recast.layers.geometry" in reached("recast.layers.functional")
    assert "torch" in reached("recast.surgery.apply")
    assert rank("recast.errors") == 0


def test_importing_the_package_and_the_report_imports_no_torch() -> None:
    code = (
        "import sys, recast, recast.lab.recipe, recast.lab.report; print(sorted({'torch', 'timm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", recast.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(recast, name) is not None
    assert name in dir(recast)


def test_no_module_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(recast.__path__)}
    assert not modules & set(recast.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = recast.plans


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {name: f"recast.{home}" for name, home in recast._HOME.items()}
    assert set(recast.__all__) == {*recast._HOME, "__version__"}
