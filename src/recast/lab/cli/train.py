"""`recast train RECIPE`: recast a parent and train on, both arms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recast.config import FilePath
from recast.errors import RecastError
from recast.lab.cli.command import Command, Compute, Line, Typed, print_json
from recast.lab.cli.guard import later_process
from recast.lab.config import Recipe
from recast.lab.config.text import load_recipe, override
from recast.lab.folder.records import ARMS
from recast.lab.folder.run import RunFolder, follow_up
from recast.lab.recipes import find_recipe, make_recipe, recipes, recipes_by_paper
from recast.models.config import ModelConfig
from recast.models.trust import check_trusted, trusting

EXAMPLES = """  recast train finetune --model resnet50 --pretrained --data folder --data-dir DIR --out runs/mine
  recast train tcnn --data-dir IMAGENET --lr 5e-5 --out runs/tcnn
  recast train runs/mine/recipe.yaml --seed 1 --out runs/mine-1        (repeat a run with changes)
  recast train --resume runs/mine                                      (continue a run)
  recast train tcnn --data-dir IMAGENET --out runs/tcnn --resume auto  (start or continue, for job queues)
  torchrun --nproc_per_node 8 -m recast train tcnn --data-dir IMAGENET --out runs/tcnn

Every option is a field of recipe.yaml. Its long name gives the section: --lr is --optim.lr.
"""

AUTO = "auto"
"""`--resume auto`: resume the run in --out if there is one, else start it."""

FUNCTIONS = (("model", "name"), ("task", "teacher", "teacher_model"))
"""Options that may name a function of the user's."""
RANDOM = "the parent has random weights: give --checkpoint or --pretrained for trained ones"
RETURNED = "the parent has the weights that {} returns: give --checkpoint for others"


def train(
    recipe: str | None = None,
    /,
    *,
    out: FilePath | None = None,
    resume: str | None = None,
    trust: bool = False,
    config: Typed[Recipe],
    output: Compute,
    line: Line,
) -> int:
    """Recast a trained network (the parent) and fine-tune it. As a control, the parent is fine-tuned the same way.

    Args:
        recipe: Name of a recipe, or a recipe.yaml.
        out: New run folder. None: runs/RECIPE-MODEL.
        resume: Run folder to continue; auto: continue the run in --out if there is one.
        trust: Allow code that the files name (pkg.module:function) to run.
    """
    base = _base(recipe, resume, out)
    settings = override(base, config.changes, config.name)
    if settings.model.checkpoint and base.model.pretrained and not base.model.checkpoint:
        # weights that were given stand for those the recipe would fetch
        settings = settings.replace(model=settings.model.replace(pretrained=False))
    if settings.model.has_returned_weights and ("model", "new_head") not in config.words:
        # the recipe's new head is for weights that it loads
        settings = settings.replace(model=settings.model.replace(new_head=False))
    _check_weights(recipe, settings.model)
    folder = Path(out or f"runs/{Path(recipe or '').stem}-{settings.model.name.replace(':', '-')}")
    if resume == AUTO:
        resume = str(folder) if RunFolder(folder).is_run else None
    elif resume:
        folder = Path(resume)

    if resume is None and not later_process():
        RunFolder(folder).check_unused()
    from recast.lab.training.run import train as run  # needs torch, which the help does without

    name, notes = settings.model.name, list[str]()
    if not (settings.model.checkpoint or settings.model.pretrained):
        notes.append(RETURNED.format(name) if settings.model.has_returned_weights else RANDOM)

    def say(text: str) -> None:
        while notes:
            print(f"note: {notes.pop()}", file=sys.stderr)
        print(text, file=sys.stderr if output.as_json else None)

    with trusting(*(config.words.get(path) for path in FUNCTIONS), trust=trust), config.named():
        check_trusted(*settings.functions)
        run(settings, folder, resume=resume is not None, command=line, say=say)
    if later_process():
        return 0
    if output.as_json:
        print_json(_summary(folder))
    else:
        evaluate = follow_up("evaluate", str(folder), functions=settings.functions)
        report = "" if settings.is_plain else f" && {follow_up('report', str(folder))}"
        print(f"{_arms(folder)}\nrun: {folder}\nnext: {evaluate}{report}")
    return 0


def _check_weights(name: str | None, parent: ModelConfig) -> None:
    """Raise RecastError for a fine-tuning from random weights, a mistake that costs days."""
    entry = recipes().get(name or "")
    if entry is None or not entry.needs_weights or parent.checkpoint or parent.pretrained:
        return
    whose = f", those of {entry.after}: --checkpoint runs/{entry.after}/weights.safetensors" if entry.after else ""
    raise RecastError(f"recipe {name} starts from trained weights{whose or ': give --checkpoint FILE or --pretrained'}")


def _base(name: str | None, resume: str | None, out: str | None) -> Recipe:
    """Return the recipe of a name or file, or of the run to resume."""
    if resume in (None, AUTO):
        if name is None:
            raise RecastError("no recipe: give a name of docs/recipes.md, a recipe.yaml, or --resume RUN")
        if RunFolder(name).is_run and find_recipe(name) is None:
            repeat = RunFolder(name).recipe_file
            raise RecastError(f"{name} is a run: continue it with --resume {name}, or repeat it from {repeat}")
        return load_recipe(name) if name.endswith((".yaml", ".yml")) else make_recipe(name)
    for other, value in (("RECIPE", name), ("--out", out)):
        if value is not None:
            raise RecastError(f"--resume uses the run's own folder and recipe: drop {other}")
    run = RunFolder(str(resume))
    run.check()
    return run.recipe()


def _describe(words: Sequence[str]) -> tuple[str, Recipe | None]:
    """Return the text and values of the recipe whose help is asked for; without one, the names of recipes."""
    if not words[0].startswith("-"):
        base = _base(words[0], None, None)
        return f"{words[0]}: {entry.text}" if (entry := find_recipe(words[0])) else COMMAND.about, base
    names = next(iter(recipes_by_paper().values()))
    papers = f"docs/recipes.md lists {len(recipes()) - len(names)} more, from papers"
    more = f"Recipes ({papers}; recast train RECIPE --help shows their values):\n  {', '.join(names)}"
    return f"{COMMAND.about}\n\n{more}", None


COMMAND = Command(train, "[RECIPE] [options]", EXAMPLES, _describe)


def _arms(out: Path) -> str:
    """Return the validation results of every arm as text. The parent is epoch 0 of the control arm."""
    from recast.lab.evaluation.suites import METRICS
    from recast.lab.task import task_of
    from recast.lab.training.metrics import read_metrics

    run = RunFolder(out)
    recipe = run.recipe()
    metric = task_of(recipe.task).main[1]
    trained, control = (read_metrics(file) for file in (run.metrics, RunFolder(run.control).metrics))
    before = "Parent before training" if run.has_new_parent(recipe.model) else "Parent"
    arms = [(before, (control or trained)[:1]), (ARMS["finetuned"], control), (ARMS["recast"], trained)]
    if recipe.is_plain:
        arms = [("Before training", trained[:1]), ("Trained", trained)]
    width = max(len(name) for name, _ in arms) + 2
    return "\n".join(
        f"{name + ':':<{width}}{METRICS[metric].label} {rows[-1][f'val_{metric}']:.2f} %, "
        f"loss {rows[-1]['val_loss']:.3f}, after epoch {rows[-1]['epoch']}"
        for name, rows in arms
        if rows
    )


def _summary(out: Path) -> dict[str, Any]:
    """Return the last row of metrics.jsonl of each arm; None for an arm that was not trained."""
    from recast.lab.training.metrics import read_metrics

    folders = {"recast": out, "finetuned": RunFolder(out).control}
    rows = {arm: read_metrics(RunFolder(folder).metrics) for arm, folder in folders.items()}
    return {"run": str(out), "last_epoch": {arm: rows[arm][-1] if rows[arm] else None for arm in folders}}
