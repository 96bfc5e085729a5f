"""The package as a whole: the wall between its three parts, its public names, what importing it costs.

core ← lab ← papers: a part imports itself and those to its left, in any way that Python has.
"""

import ast
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import recast
from recast.lab.folder.run import RunFolder

ROOT = Path(recast.__file__).parent
PARTS = ("core", "lab", "papers")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def part(name: str) -> str:
    first = name.split(".")[1] if "." in name else ""
    return first if first in PARTS else "core"


def imported(source: str) -> set[str]:
    """Return what a source imports of this package: anywhere in it, also for type checkers or by `import_module`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            names.add(str(node.args[0].value).removesuffix("recast"))  # `which("recast")` is the command
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return {name for name in modules if name in MODULES}


@cache
def imports(name: str) -> set[str]:
    return imported(MODULES[name].read_text(encoding="utf-8"))


def reached(*names: str, packages: bool) -> set[str]:
    """Return the modules that these import, directly or not, and these; also the `packages` that they lie in."""
    todo, modules = [*names], set[str]()
    while todo:
        name = todo.pop()
        if name in MODULES and name not in modules and name != "recast":  # it imports nothing before it is asked
            modules.add(name)
            todo += [*imports(name), name.rpartition(".")[0] * packages]
    return modules


def lines_of(names: Iterable[str]) -> int:
    return sum(len(MODULES[name].read_text(encoding="utf-8").splitlines()) for name in names)


def lines_read(*names: str) -> int:
    """Count the lines of the modules that importing these reads, with the packages that they lie in."""
    return lines_of(reached(*names, packages=True))


def lines_beyond(room: str) -> int:
    """Count the lines of lab outside of a room that its files import, also for type checkers and in functions."""
    files = {name for name in MODULES if f"{name}.".startswith(f"recast.lab.{room}.")}
    return lines_of(name for name in reached(*files, packages=False) - files if part(name) == "lab")


def test_imports_go_one_way() -> None:
    wrong = [
        f"{name} imports {target}"
        for name in MODULES
        for target in imports(name)
        if PARTS.index(part(target)) > PARTS.index(part(name)) and name != "recast.__main__"  # it joins the parts
    ]
    assert not wrong


def test_the_check_sees_every_kind_of_import() -> None:
    for source in (
        "from recast.lab import cli",
        "import recast.lab.cli",
        "def f():\n    import recast.lab.cli",
        "if TYPE_CHECKING:\n    from recast.lab.cli import main",
        'importlib.import_module("recast.lab.cli")',
    ):
        assert {part(name) for name in imported(source)} == {"lab"}, source


def test_the_core_names_arguments_not_options() -> None:
    """The command line shows `trust=True` as `--trust` (`recast.lab.cli.guard.one_line`)."""
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items() if part(name) == "core"}
    assert {name: words for name, text in sources.items() if (words := re.findall(r"--[a-z][\w-]*", text))} == {}


def test_a_reader_of_the_layer_needs_few_lines() -> None:
    assert lines_read("recast.layers.gpsa") <= 2753
    assert lines_read("recast.surgery.planning", "recast.surgery.apply", "recast.surgery.verify") <= 7455


def test_a_reader_of_a_room_of_lab_needs_few_lines() -> None:
    assert lines_beyond("config") == 0
    assert lines_beyond("data") <= 997


def test_imports_have_no_circles() -> None:
    pairs = {("recast.config", "recast.config_errors"), ("recast.lab.config.recipe", "recast.lab.config.tasks")}
    circles = {
        (name, target)
        for name in MODULES
        for target in imports(name) - {name}
        if name in reached(target, packages=False)
    }
    assert {(min(pair), max(pair)) for pair in circles} == pairs


def test_only_a_run_folder_spells_its_files() -> None:
    names = {path.name for path in vars(RunFolder("x")).values() if path.suffix}
    assert len(names) > 10
    for module, path in MODULES.items():
        words = {getattr(node, "value", None) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))}
        assert module == "recast.lab.folder.run" or not names & {word for word in words if isinstance(word, str)}, path


def test_light_modules_import_no_torch() -> None:
    code = (
        "import sys, recast, recast.lab.config.text, recast.lab.recipes, recast.lab.report, recast.__main__\n"
        "print(sorted({'torch', 'timm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_recipes_of_installed_packages_are_found_from_python() -> None:
    code = "from recast.lab.recipes import make_recipe; print(make_recipe('deit_tiny').model.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "deit_tiny_patch16_224", done.stderr


def test_a_recipe_of_lab_loads_no_paper() -> None:
    code = (
        "import sys; sys.argv = 'recast train digits --epochs 2 --device nowhere --out no'.split()\n"
        "from recast.__main__ import main; code = main()\n"
        "from recast.lab.config import Recipe; from recast.lab.config.fields import fields_of\n"
        "print(code, len(fields_of(Recipe)), *(name for name in sys.modules if name.startswith('recast.papers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "111"], done.stderr
    assert "nowhere" in done.stderr


def test_no_module_hides_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(recast.__path__)}
    assert not modules & set(recast.__all__)


def test_type_checkers_see_the_names_that_there_are() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block: Any = next(node for node in tree.body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in block.body for alias in node.names}
    assert homes == {name: f"recast.{home}" for name, home in recast._HOME.items()}
    assert set(recast.__all__) == {*homes, "__version__"} <= set(dir(recast))
    assert all(getattr(recast, name) is not None for name in recast.__all__)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        _ = recast.plans
