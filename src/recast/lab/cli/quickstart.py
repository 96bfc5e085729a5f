"""`recast quickstart`: the whole story on embedded data."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from recast.config import FilePath, Seed
from recast.errors import RecastError
from recast.files import locked
from recast.lab.cli.command import Command, Compute, print_json
from recast.lab.cli.evaluate import arms_table, compared_with
from recast.lab.config import OptimConfig
from recast.lab.recipe import load_recipe
from recast.models.trust import follow_up

SUITES = ("clean", "fgsm", "pgd", "basic", "cost")
EXTRAS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "jinja2": "jinja2"}
EXAMPLES = """  recast quickstart
  recast quickstart --seed 1 --out runs/seed1
  recast quickstart --resume                 (go on where it stopped)
"""

DEFAULT = "runs/quickstart"


def quickstart(
    *,
    out: FilePath = DEFAULT,
    seed: Seed = 0,
    resume: bool = False,
    output: Annotated[Compute, Parameter(name="*")],
) -> int:
    """Which of three digits is the odd one out? A small ResNet learns to read one of scikit-learn's handwritten
    digits; its last stage is recast without changing one prediction; the recast network and the ResNet itself are then
    trained on the question in the same way, measured, and compared in the report. A few minutes on a laptop's CPU,
    nothing is downloaded.

    Args:
        out: New run folder.
        seed: Seed of everything.
        resume: Go on with an interrupted quickstart in --out.
    """
    if missing := [package for module, package in EXTRAS.items() if find_spec(module) is None]:
        raise RecastError(f"quickstart needs {', '.join(missing)}: pip install {' '.join(missing)}")
    folder = Path(out)
    again = follow_up("quickstart", "--resume", *([] if out == DEFAULT else ["--out", out]))
    if not resume and _is_interrupted(folder, seed):
        print(f"note: goes on with the quickstart in {out}, which was interrupted", file=sys.stderr)
        resume = True
    _check_folder(folder, resume, again)
    try:
        with locked(folder):
            return _run(folder, seed, resume, output.as_json)
    except KeyboardInterrupt:
        is_saved = (folder / "parent" / "recipe.yaml").is_file()
        raise KeyboardInterrupt(f"interrupted: state saved; continue with: {again}" if is_saved else "") from None


COMMAND = Command(quickstart, "[options]", EXAMPLES)


def _is_interrupted(out: Path, seed: int) -> bool:
    """Whether a quickstart with this seed began in the folder and did not come to its report."""
    recipe = out / "parent" / "recipe.yaml"
    return recipe.is_file() and not (out / "report.html").exists() and load_recipe(recipe).seed == seed


def _check_folder(out: Path, resume: bool, again: str) -> None:
    started = (out / "parent" / "recipe.yaml").is_file()
    if resume and not started:
        raise RecastError(f"{out} holds no quickstart to go on with: drop --resume, or name the folder with --out")
    if not resume and out.is_dir() and any(out.iterdir()):
        hint = f"go on with {again}, " if started else ""
        raise RecastError(f"run folder {out} exists: {hint}delete it, or choose another one with --out")


def _run(out: Path, seed: int, resume: bool, as_json: bool) -> int:
    started = time.time()

    def say(text: Any) -> None:
        print(text, file=sys.stderr if as_json else None, flush=True)

    say("── 1/5  a parent: a small ResNet learns to read one digit")
    from recast.lab.evaluation.run_folder import evaluate_run
    from recast.lab.recipes import make_recipe
    from recast.lab.report import write_report
    from recast.lab.training.run import train

    seed = load_recipe(out / "parent" / "recipe.yaml").seed if resume else seed
    recipe = make_recipe("odd_digit").replace(seed=seed)
    one, optim = recipe.data.replace(name="one_digit"), OptimConfig(lr=2e-3, min_lr=1e-5)
    alone = recipe.replace(data=one, where=["none"], optim=optim, epochs=3, control=False)
    train(alone, out / "parent", resume=resume, command="recast quickstart")
    weights = out / "parent" / "weights.safetensors"
    say("\n── 2/5  plan, recast, verify; 3/5  train on three digits: the recast network, then the parent the same way")
    recipe = recipe.replace(model=recipe.model.replace(checkpoint=str(weights)))
    train(recipe, out, resume=(out / "recipe.yaml").is_file(), command="recast quickstart", say=say)
    say("\n── 4/5  evaluate the three arms on 1,000 canvases of held-out digits")
    results = evaluate_run(out, SUITES, command="recast quickstart", progress=sys.stderr.isatty())
    say(arms_table(results.rows, results.differences, compared_with(out, results.rows)))
    say("\n── 5/5  report")
    report = write_report([out]).resolve()
    seconds = time.time() - started
    say(f"{seconds:.0f} s in all. The report: {report}")
    if as_json:
        rows = [asdict(row) for row in results.rows]
        print_json({"run": str(out), "report": str(report), "seconds": round(seconds, 1), "rows": rows})
    return 0
