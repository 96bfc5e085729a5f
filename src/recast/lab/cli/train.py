"""`recast train RECIPE`: recast a parent and train on, both arms."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from recast.errors import RecastError
from recast.lab.cli.guard import later_process
from recast.lab.cli.help import Command
from recast.lab.cli.options import ComputeOptions, TrustOption, Words, as_typed, parse, print_json
from recast.lab.cli.plan import read_edited
from recast.lab.config import Recipe
from recast.lab.recipe import functions_of, has_new_parent, load_recipe
from recast.lab.recipes import RECIPES, make_recipe, recipes_by_paper
from recast.lab.records import ARMS
from recast.lab.report.formats import duration
from recast.lab.suites import METRICS
from recast.lab.tasks import task_of_data
from recast.layers.config import PoolConfig
from recast.models.trust import check_trusted, follow_up, trusting
from recast.surgery.limits import Budget

EXAMPLES = """  recast train finetune --model resnet50 --pretrained --data folder --data-dir DIR --out runs/mine
  recast train finetune --model cifar_resnet20 --checkpoint FILE --data cifar100 --data-dir DIR --epochs 10
  recast train tcnn --data-dir IMAGENET --lr 5e-5 --out runs/tcnn
  recast train attention_pool_quick --model resnet50 --pretrained --data folder --data-dir DIR --out runs/pool
  recast train runs/mine/recipe.yaml --seed 1 --out runs/mine-1        (replay a run, change what you like)
  recast train --resume runs/mine                                      (go on where it stopped)
  recast train tcnn --data-dir IMAGENET --out runs/tcnn --resume auto  (start, or go on: for a queue)
  torchrun --nproc_per_node 8 -m recast train tcnn --data-dir IMAGENET --out runs/tcnn

Every option is a field of recipe.yaml and has its place there as a longer name: --lr is --optim.lr.
"""

NAMED = 4
"""Recipes of a paper that the help names."""
AUTO = "auto"
"""`--resume auto`: go on with the run in --out where there is one, else start it."""

RANDOM = "the parent has random weights: give --checkpoint or --pretrained for trained ones"


@dataclasses.dataclass
class TrainOptions(TrustOption, ComputeOptions):
    """What `recast train` is asked for: every field of the recipe too."""

    WORDS: ClassVar[Words] = {"recipe": "?"}
    recipe: str | None = None
    """a recipe's name or a recipe.yaml"""
    config: str | None = None
    """a recipe.yaml, as RECIPE"""
    out: str | None = None
    """new run folder; default runs/RECIPE-MODEL"""
    plan: str | None = None
    """a plan.json, edited or not: layers, settings"""
    resume: str | None = None
    """run folder to go on with, or auto: --out if it is one"""
    run: Recipe = dataclasses.field(default_factory=Recipe)


def run(argv: Sequence[str]) -> int:
    """Train the arms of a recipe into a run folder; prints where it lies."""
    try:
        return _train(argv)
    except RecastError as error:
        error.args = (as_typed(str(error), TrainOptions()),)
        raise


def _train(argv: Sequence[str]) -> int:
    # twice: which recipe is named decides whose values the other options have by default
    arguments = [word for word in argv if word not in ("-h", "--help")]
    named = parse(_command(None), TrainOptions(), arguments)
    base = _base(named)
    options = parse(_command(named.recipe), TrainOptions(run=base or Recipe()), argv)
    if base is None:
        raise RecastError("which recipe? recast train --help lists them; or a recipe.yaml, or --resume RUN")
    recipe = options.run
    if recipe.model.checkpoint and base.model.pretrained and not base.model.checkpoint:
        recipe.model.pretrained = False  # weights that were given stand for those the recipe would fetch
    _check_weights(options.recipe, recipe)
    if options.plan is not None:
        recipe = _as_planned(recipe, base, options.plan)
    name = Path(options.recipe or options.config or "").stem
    resume, folder = options.resume, options.out or f"runs/{name}-{recipe.model.name.replace(':', '-')}"
    if resume == AUTO:
        resume = folder if (Path(folder) / "recipe.yaml").is_file() else None
    out = Path(resume or folder)
    Budget.parse(recipe.budget)

    from recast.lab.training.run import train

    def say(text: str) -> None:
        if not (recipe.model.checkpoint or recipe.model.pretrained):
            print(f"note: {RANDOM}", file=sys.stderr)
        print(text, file=sys.stderr if options.json else None)

    functions = functions_of(recipe)
    with trusting(named.run.model.name, named.run.distill.name, trust=options.trust):
        check_trusted(*functions)
        train(recipe, out, resume=resume is not None, command=shlex.join(["recast", "train", *argv]), say=say)
    if later_process():
        return 0
    if options.json:
        print_json(_summary(out))
    else:
        evaluate = follow_up("evaluate", str(out), functions=functions)
        report = "" if recipe.is_plain else f" && {follow_up('report', str(out))}"
        print(f"{_arms_table(out)}\nrun: {out}\nnext: {evaluate}{report}")
    return 0


def _check_weights(name: str | None, recipe: Recipe) -> None:
    """A fine-tuning from random weights is a mistake that costs days: it is refused."""
    entry = RECIPES.get(name or "")
    if entry is None or not entry.needs_weights or recipe.model.checkpoint or recipe.model.pretrained:
        return
    whose = f", those of {entry.after}: --checkpoint runs/{entry.after}/weights.safetensors" if entry.after else ""
    raise RecastError(f"recipe {name} starts from trained weights{whose or ': give --checkpoint FILE or --pretrained'}")


def _as_planned(recipe: Recipe, base: Recipe, path: str) -> Recipe:
    """The recipe with the layers and settings of a plan file: recipe.yaml replays the run without it."""
    edited = read_edited(path, recipe, base)
    return dataclasses.replace(
        recipe, where=list(edited.steps) or ["none"], budget="tokens=none", recast=edited.config,
        pool=edited.pool or PoolConfig(),
    )  # fmt: skip


def _base(named: TrainOptions) -> Recipe | None:
    """The recipe that the command names in one of three ways, or None."""
    resumed = None if named.resume == AUTO else named.resume
    given = {"RECIPE": named.recipe, "--config": named.config, "--resume": resumed}
    used = [how for how, value in given.items() if value is not None]
    if len(used) > 1:
        raise RecastError(f"{used[0]} and {used[1]} both name the recipe: leave one away")
    if resumed is not None:
        if named.out is not None:
            raise RecastError("--resume goes on in its own folder: leave --out away")
        path = Path(resumed) / "recipe.yaml"
        if not path.is_file():
            never = "one that never came to its first state starts again with its own command"
            raise RecastError(f"{resumed} holds no run to resume: it has no recipe.yaml ({never})")
        return load_recipe(path, complete=True)
    if named.config is not None:
        return load_recipe(named.config)
    if named.recipe is None:
        return None
    is_file = named.recipe.endswith((".yaml", ".yml"))
    return load_recipe(named.recipe) if is_file else make_recipe(named.recipe)


def _description(named: str | None) -> str:
    """What a recipe's own help begins with: its text; without one, our own recipes, and how the papers' are called."""
    if named in RECIPES:
        title, empty, paper, command, *rest = f"{named}: {RECIPES[named].text}".splitlines()
        wrapped = [textwrap.fill(line, 100, subsequent_indent="    ") for line in (paper, *rest)]
        return "\n".join((title, empty, wrapped[0], command, *wrapped[1:]))  # a command can be copied
    own, *papers = recipes_by_paper().items()
    width = max(map(len, own[1])) + 2
    lines = [f"  {name:<{width}}{RECIPES[name].title}" for name in own[1]]
    for paper, names in papers:
        few = ", ".join(names[:NAMED]) + (f", … ({len(names)})" if len(names) > NAMED else "")
        lines.append(f"{paper}:\n  {few}")
    return (
        "Recast a trained network and train on, beside the parent trained the same way.\n\nrecipes:\n"
        + "\n".join(lines)
        + f"\n  or the recipe.yaml of a run; all {len(RECIPES)} names: docs/recipes.md, or TAB\n\n"
        "recast train RECIPE --help tells its paper, command, numbers and values"
    )


def _command(named: str | None) -> Command:
    return Command("train", "RECIPE [options]   or   recast train --resume RUN", _description(named), EXAMPLES)


def _arms_table(out: Path) -> str:
    """What every arm reached on the validation images; the parent as it was is epoch 0 of its own training."""
    from rich.table import Table

    from recast.lab.training.metrics import read_metrics
    from recast.surgery.table import render

    recipe = load_recipe(out / "recipe.yaml", complete=True)
    trained, control = (read_metrics(folder / "metrics.jsonl") for folder in (out, out / "finetuned"))
    before = "Parent (untrained)" if has_new_parent(recipe, out) else "Parent"
    arms = [(before, (control or trained)[:1]), (ARMS["finetuned"], control), (ARMS["recast"], trained)]
    if recipe.is_plain:
        arms = [("Before training", trained[:1]), ("Trained", trained)]
    table, metric = Table(), task_of_data(recipe.data).main[1]
    table.add_column("network")
    for title in (METRICS[metric].label, "val loss", "epochs", "time"):
        table.add_column(title, justify="right")
    for name, rows in arms:
        if rows:
            last, seconds = rows[-1], sum(row["seconds"] or 0.0 for row in rows)
            cells = f"{last[f'val_{metric}']:.2f} %", f"{last['val_loss']:.3f}", str(last["epoch"]), duration(seconds)
            table.add_row(name, *cells)
    return render(table)


def _summary(out: Path) -> dict[str, Any]:
    def last(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) if path.is_file() else None

    arms = {"recast": out / "metrics.jsonl", "finetuned": out / "finetuned" / "metrics.jsonl"}
    return {"run": str(out), "last_epoch": {arm: last(path) for arm, path in arms.items()}}
