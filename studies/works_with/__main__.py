"""What tools do with a recast network: docs/works-with.md.

    python studies/works_with run                   # what results/works_with.csv lacks; needs `uv` and package indexes
    python studies/works_with run thop captum       # these, again
    python studies/works_with table                 # the page's tables, from the rows

Every tool runs in a process of its own, with pinned packages in a temporary folder. It uses the packages of this
environment, torch among them: only what is lacking is installed. What tools print goes to --log.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

from tools import EXACT, LAYERS, TOOLS, Case, Cell, Tool, case_of
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROWS, PAGE = ROOT / "results/works_with.csv", ROOT / "docs/works-with.md"
KINDS = {
    "counters": "Counting", "trainers": "Training", "optimisers": "Optimisers", "averages": "Weight averages",
    "distributed": "Several processes", "adapters": "Adapters", "pruning": "Pruning", "quantisers": "Quantising",
    "exporters": "Exporting and running", "explanation": "Explaining", "attacks": "Attacks",
    "privacy": "Gradients of single images", "storage": "Saving and tracking", "zoos": "Networks of other packages",
    "formats": "Annotations",
}  # fmt: skip
"""Script → heading of the page, in its order."""
FIELDS = ("kind", "tool", "version", "does", "layer", "cell", "error", "message", "date", "torch")
LIMIT = 300
"""Seconds for a tool."""
AS_PARENT = "as the parent"
"""Note on an error that is the parent's too; the page leaves out its text."""


def read() -> list[dict[str, str]]:
    """Return the rows of results/works_with.csv."""
    if not ROWS.exists():
        return []
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(rows: list[dict[str, str]]) -> None:
    """Write the rows, in the order of the scripts."""
    order = list(TOOLS)
    with ROWS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: order.index(row["tool"])))


def line_of(error: BaseException) -> str:
    """Return the kind and the first line of an error, up to the settings of a recast layer."""
    text = re.sub(r"\b(GPSA|AttentionBeside)\(.*", r"\1(…)", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:200].rstrip(" :")


def verdict(tool: Tool, case: Case) -> Cell:
    """Return what a tool does with a network."""
    result = tool.run(case)
    if isinstance(result, Tensor):
        return case.judged(result)
    return result if isinstance(result, Cell) else Cell("exact" if result <= EXACT else "wrong", float(result))


def measure(tool: Tool) -> list[dict[str, str]]:
    """Return the rows of a tool, one for each layer."""
    cells = {}
    for layer in ("parent", *LAYERS):
        try:
            cells[layer] = Cell("exact") if layer == "parent" and tool.is_own else verdict(tool, case_of(layer))
        except Exception as error:  # whatever a package raises on a layer that it does not know
            traceback.print_exc()
            cells[layer] = Cell("refused", message=line_of(error.__cause__ or error))
    before, rows = cells.pop("parent"), []
    for layer, cell in cells.items():
        if cell.cell == "wrong" and before.cell == "works" and (cell.error or 0) <= 1.5 * (before.error or 0):
            cell = replace(cell, cell="works")  # the method's error, on the other side of a threshold
        notes = [cell.message, tool.remedy.get(cell.cell, "")]
        if cell.error is not None and cell.cell in ("works", "wrong") and before.error is not None:
            notes.append(f"parent: {before.cell} {shown(before.error)}")
        elif cell.cell in ("refused", "wrong") and before.cell == cell.cell:
            notes = [cell.message, AS_PARENT]
        message = "; ".join(note for note in notes if note)
        rows.append({"layer": layer, "cell": cell.cell, "error": shown(cell.error), "message": message})
    return rows


def shown(error: float | None) -> str:
    """Return an error with two digits; empty for none."""
    return "" if error is None else f"{error:.1e}" if error else "0"


def run(name: str, log: Path) -> list[dict[str, str]]:
    """Install what a tool lacks in a temporary folder and run it in a child process; returns its rows."""
    tool = TOOLS[name]
    row = {"kind": tool.kind, "tool": name, "does": tool.does, "version": tool.packages[0].partition("==")[2]}
    row |= {"date": date.today().isoformat(), "torch": version("torch")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if reason := install(tool.packages, folder):
            return [row | {"cell": "not run", "message": f"does not install: {reason}"}]
        if (child := os.fork()) == 0:
            code = 1
            try:
                with log.open("a") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                signal.alarm(LIMIT)  # ends the child
                warnings.simplefilter("ignore")
                os.chdir(folder)
                sys.path.insert(0, str(folder / "packages"))
                os.environ["PYTHONPATH"] = f"{folder / 'packages'}:{ROOT / 'src'}"
                row["version"] = row["version"] or version(tool.packages[0])
                Path("rows.json").write_text(json.dumps([row | new for new in measure(tool)]))
                code = 0
            finally:
                sys.stdout.flush()
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not (rows := folder / "rows.json").exists():
            reason = f"over {LIMIT} seconds" if status == -signal.SIGALRM else f"ended with {status}"
            return [row | {"cell": "not run", "message": reason}]
        return json.loads(rows.read_text())


def install(packages: tuple[str, ...], folder: Path) -> str:
    """Install packages in `folder`, without those of this environment; returns the reason if that fails."""
    if not (lacking := [pin for pin in packages if not is_here(pin)]):
        return ""
    names = sorted({found.metadata["Name"] for found in distributions()})
    (folder / "overrides.txt").write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in names))
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    assert uv is not None, "uv is missing: pip install uv"
    command = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(folder / "packages")]
    command += ["--overrides", str(folder / "overrides.txt"), *lacking]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    return " ".join(done.stderr.split())[:160] if done.returncode else ""


def is_here(pin: str) -> bool:
    """Return True if this environment has a package in that version."""
    name, _, wanted = pin.partition("==")
    try:
        return wanted in ("", version(name))
    except PackageNotFoundError:
        return False


def cell_text(rows: list[dict[str, str]]) -> str:
    """Return a cell of the page for the rows of one tool: one text if both layers agree."""
    texts = {r["layer"]: f"{r['cell']} ({r['error']})" if r["error"] not in ("", "0") else r["cell"] for r in rows}
    cells = {row["layer"]: row["cell"] for row in rows}
    if len(set(cells.values())) > 1:
        return f"{texts['beside']}; papers' layers: {texts['linear']}"
    return next(iter(texts.values()))


def tables(rows: list[dict[str, str]]) -> str:
    """Return the tables of the page, then a sentence with what was not run."""
    parts, missing = list[str](), [row["tool"] for row in rows if row["cell"] == "not run"]
    for kind, heading in KINDS.items():
        names = dict.fromkeys(row["tool"] for row in rows if row["kind"] == kind and row["cell"] != "not run")
        if not names:
            continue
        parts.append(f"## {heading}\n\n| tool | what you do | result | notes |\n|---|---|---|---|")
        for name in names:
            mine = [row for row in rows if row["tool"] == name]
            notes = dict.fromkeys(note for row in mine for note in row["message"].split("; ") if note)
            texts = (AS_PARENT if AS_PARENT in notes else "; ".join(notes)).replace("|", "\\|")
            first = mine[0]
            parts[-1] += f"\n| {name} {first['version']} | {first['does']} | {cell_text(mine)} | {texts} |"
    if missing:
        parts.append(f"## Not run\n\nThe experiment is written and has no result yet: {'; '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def load_tools() -> None:
    """Import every script of the folder."""
    for kind in KINDS:
        if (HERE / f"{kind}.py").exists():
            importlib.import_module(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("tools", nargs="*")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no tool later than this")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "works_with.log")
    options = parser.parse_args()
    load_tools()
    if options.what == "table":
        start, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## ")
        PAGE.write_text(f"{start.rstrip()}\n\n{tables(read())}", encoding="utf-8")
        return
    start, measured = time.monotonic(), {row["tool"] for row in read()}
    for name in options.tools or [name for name in TOOLS if name not in measured]:
        if time.monotonic() - start > 60 * options.minutes:
            break
        new = run(name, options.log.resolve())
        write([row for row in read() if row["tool"] != name] + new)
        for row in new:
            print(name, *(row.get(key, "") for key in ("layer", "cell", "error", "message")), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
