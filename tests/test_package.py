"""The package as a whole: its public names, what importing it costs, and which way imports go."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import recast

ROOT = Path(recast.__file__).parent
CORE = ["geometry", "functional", "gpsa", "rules", "planning", "surgery"]  # each may import those before it
OUTER = {"training", "recipes", "cli", "quickstart", "evaluation", "explain", "report"}


def imports(path: Path) -> set[str]:
    """First component below `recast` of everything a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("recast.")}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py")) or [ROOT / f"{package}.py"]


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


@pytest.mark.parametrize("module", ["recast", "recast.config", "recast.report"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'timm', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
    assert "timm" not in done.stdout


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_one_way(module: str) -> None:
    later = set(CORE[CORE.index(module) :])
    for path in files(module):
        assert not imports(path) & (later - {module} | OUTER), path


@pytest.mark.parametrize("package", ["evaluation", "explain"])
def test_measuring_does_not_know_training(package: str) -> None:
    for path in files(package):
        assert not imports(path) & {"training", "recipes", "cli", "report"}, path


def test_reports_read_files_only() -> None:
    for path in files("report"):
        assert imports(path) <= {"report", "errors", "config", "files", "json_files", "rows"}, path
