"""`recast quickstart`: the whole story on embedded data."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from recast.config import FilePath, Seed
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, print_json
from recast.lab.cli.evaluate import compared_with, format_arms
from recast.lab.config import OptimConfig
from recast.lab.folder.files import locked
from recast.lab.folder.run import RunFolder, follow_up

SUITES = ("clean", "fgsm", "pgd", "basic", "cost")
EXTRAS = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
EXAMPLES = """  recast quickstart
  recast quickstart --seed 1 --out runs/seed1
"""


def quickstart(*, out: FilePath = "runs/quickstart", seed: Seed = 0, output: Compute) -> int:
    """Which of three digits is the odd one out? A small ResNet learns to read single handwritten digits of
    scikit-learn. Its last stage is recast without changing one prediction. Then the recast network and the ResNet
    itself, both with the same new classifier, are trained on the question in the same way, measured, and compared in a
    report. This takes a few minutes on a laptop's CPU; nothing is downloaded. Run the same command again to continue an
    interrupted quickstart.

    Args:
        out: New run folder.
        seed: Random seed.
    """
    if missing := [package for module, package in EXTRAS.items() if find_spec(module) is None]:
        raise RecastError(f"quickstart requires {', '.join(missing)}: pip install {' '.join(missing)}")
    run = RunFolder(out)
    folder, parent = run.path, RunFolder(run.parent)
    resume = parent.is_run and not run.report.exists() and parent.recipe().seed == seed
    if resume:
        print(f"note: continuing the interrupted quickstart in {out}", file=sys.stderr)
    elif folder.is_dir() and any(folder.iterdir()):
        raise RecastError(f"run folder {out} exists: delete it, or choose another one with --out")
    try:
        with locked(folder):
            return _run(run, seed, resume, output.as_json)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run the same command again to continue") from None


COMMAND = Command(quickstart, "[options]", EXAMPLES)


def _run(run: RunFolder, seed: int, resume: bool, as_json: bool) -> int:
    started, out = time.time(), run.path

    def say(text: Any) -> None:
        print(text, file=sys.stderr if as_json else None, flush=True)

    say("── 1/5  a parent: a small ResNet learns to read one digit")
    from recast.lab.evaluation.run_folder import evaluate_run
    from recast.lab.recipes import make_recipe
    from recast.lab.report import write_report
    from recast.lab.training.run import train

    recipe = make_recipe("odd_digit").replace(seed=seed)
    data, optim = recipe.data.replace(name="one_digit"), OptimConfig(lr=2e-3, min_lr=1e-5)
    parent = recipe.replace(data=data, where=["none"], optim=optim, epochs=3, control=False)
    train(parent, run.parent, resume=resume, command="recast quickstart")
    say("\n── 2/5  plan, recast, verify; 3/5  train on three digits: the recast network, then the parent the same way")
    recipe = recipe.replace(model=recipe.model.replace(checkpoint=str(RunFolder(run.parent).weights), new_head=True))
    train(recipe, out, resume=run.is_run, command="recast quickstart", say=say)
    say("\n── 4/5  evaluate the three arms on 1,000 canvases of held-out digits")
    results = evaluate_run(out, SUITES, command="recast quickstart", progress=sys.stderr.isatty())
    say(format_arms(results.rows, results.differences, compared_with(out, results.rows)))
    say("\n── 5/5  report")
    report = write_report([out]).resolve()
    seconds = time.time() - started
    say(f"{seconds:.0f} s in all. The report: {report}\nnext: {follow_up('explain', str(out))}")
    if as_json:
        rows = [asdict(row) for row in results.rows]
        print_json({"run": str(out), "report": str(report), "seconds": round(seconds, 1), "rows": rows})
    return 0
