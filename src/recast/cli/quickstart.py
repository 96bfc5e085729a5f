"""`recast quickstart`: the whole story on embedded data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recast.cli.arms import arms_table
from recast.cli.options import new_parser, parse
from recast.errors import RecastError

SUITES = ("clean", "fgsm", "pgd", "basic", "cost")


def run(argv: Sequence[str]) -> int:
    """Train a small CNN on handwritten digits, recast it, verify, train on, evaluate, report."""
    parser = new_parser(
        "quickstart",
        "Train a small ResNet on scikit-learn's 1,797 handwritten digits; recast its last stage without changing\n"
        "one prediction; train on beside the parent; measure; write the report. A few minutes on a laptop's CPU,\n"
        "nothing is downloaded.",
    )
    parser.add_argument("--out", type=str, default="runs/quickstart", help="new run folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything")
    options = parse(parser, argv)
    out = Path(options.out)
    if (out / "recipe.yaml").exists() or (out / "parent").exists():
        raise RecastError(f"run folder {out} exists: delete it, or choose another one with --out")
    started = time.time()

    _say("1/5  a parent: a small ResNet learns the digits")
    from recast.evaluation.run_folder import evaluate_run
    from recast.recipes.digits import digits, digits_parent
    from recast.report import write_report
    from recast.training.run import train, train_parent

    weights = train_parent(replace(digits_parent(), seed=options.seed), out / "parent", command="recast quickstart")
    _say("2/5  plan, recast, verify; 3/5  train on: the recast network, then the parent the same way")
    recipe = digits()
    recipe = replace(recipe, seed=options.seed, model=replace(recipe.model, checkpoint=str(weights)))
    train(recipe, out, command="recast quickstart", say=print)
    _say("4/5  evaluate the three arms on the 500 held-out digits")
    print(arms_table(evaluate_run(out, SUITES)))
    _say("5/5  report")
    report = write_report([out])
    print(f"{time.time() - started:.0f} s in all. The report: {report.resolve()}")
    return 0


def _say(text: str) -> None:
    print(f"\n── {text}", flush=True)
