"""`recast train RECIPE`: recast a parent and train on, both arms."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from recast.cli.options import new_parser, parse, print_json
from recast.cli.plan import read_edited
from recast.config import Recipe
from recast.errors import RecastError
from recast.recipe import load_recipe, recipe_to_dict
from recast.recipes import RECIPES, make_recipe

EXAMPLES = """  recast train finetune --model resnet50 --pretrained --data folder --data-dir DIR --out runs/mine
  recast train finetune --model cifar_resnet20 --checkpoint FILE --data cifar100 --data-dir DIR --epochs 10
  recast train tcnn --data-dir IMAGENET --lr 5e-5 --out runs/tcnn
  recast train runs/mine/recipe.yaml --seed 1 --out runs/mine-1        (replay a run, change what you like)
  recast train --resume runs/mine                                      (go on where it stopped)

Every option is a field of recipe.yaml and has its place there as a longer name: --lr is --optim.lr.
"""

RANDOM = "the parent has random weights: give --checkpoint or --pretrained for trained ones"


def run(argv: Sequence[str]) -> int:
    """Train the arms of a recipe into a run folder; prints where it lies."""
    # twice: which recipe is named decides whose values the other options have by default
    arguments = [word for word in argv if word not in ("-h", "--help")]
    named = parse(_parser(Recipe()), arguments)
    base = _base(named)
    parser = _parser(base or Recipe())
    options = parser.instantiate(parse(parser, argv))
    if base is None:
        raise RecastError(f"which recipe? Expected {', '.join(RECIPES)} or a recipe.yaml; or --resume RUN")
    recipe = Recipe(**{field.name: options[field.name] for field in dataclasses.fields(Recipe)})
    if options.plan is not None:
        recipe = _as_planned(recipe, base, options.plan)
    name = Path(options.recipe or options.config or "").stem
    out = Path(options.resume or options.out or f"runs/{name}-{recipe.model.name.replace(':', '-')}")

    from recast.training.run import train

    def say(text: str) -> None:
        if not (recipe.model.checkpoint or recipe.model.pretrained):
            print(f"note: {RANDOM}", file=sys.stderr)
        print(text, file=sys.stderr if options.json else None)

    train(recipe, out, resume=options.resume is not None, command=shlex.join(["recast", "train", *argv]), say=say)
    if options.json:
        print_json(_summary(out))
    else:
        folder = shlex.quote(str(out))
        print(f"run: {out}\nnext: recast evaluate {folder} && recast report {folder}")
    return 0


def _as_planned(recipe: Recipe, base: Recipe, path: str) -> Recipe:
    """The recipe with the layers and settings of a plan file: recipe.yaml replays the run without it."""
    if (recipe.where, recipe.budget, recipe.recast) != (base.where, base.budget, base.recast):
        raise RecastError("--plan names the layers and holds their settings: leave --where, --budget and --recast away")
    edited = read_edited(path)
    return dataclasses.replace(recipe, where=list(edited.steps), budget="tokens=none", recast=edited.config)


def _base(named: Namespace) -> Recipe | None:
    """The recipe that the command names in one of three ways, or None."""
    given = {"RECIPE": named.recipe, "--config": named.config, "--resume": named.resume}
    used = [how for how, value in given.items() if value is not None]
    if len(used) > 1:
        raise RecastError(f"{used[0]} and {used[1]} both name the recipe: leave one away")
    if named.resume is not None:
        if named.out is not None:
            raise RecastError("--resume goes on in its own folder: leave --out away")
        path = Path(named.resume) / "recipe.yaml"
        if not path.is_file():
            raise RecastError(f"{named.resume} holds no run to resume: it has no recipe.yaml")
        return load_recipe(path)
    if named.config is not None:
        return load_recipe(named.config)
    if named.recipe is None:
        return None
    is_file = named.recipe.endswith((".yaml", ".yml"))
    return load_recipe(named.recipe) if is_file else make_recipe(named.recipe)


def _parser(base: Recipe) -> ArgumentParser:
    """Every field of the recipe as an option, with the recipe's own values as defaults."""
    known = "\n".join(f"  {name:<10}{_first_line(make)}" for name, make in RECIPES.items())
    parser = new_parser(
        "train",
        "RECIPE [options]   or   recast train --resume RUN",
        "Recast a trained network and train on, beside the parent trained the same way.\n\n"
        f"recipes:\n{known}\n  or the recipe.yaml of a run; recast train RECIPE --help shows its values",
        EXAMPLES,
    )
    parser.add_argument("recipe", type=str | None, nargs="?", default=None, help="a recipe's name or a recipe.yaml")
    parser.add_argument("--config", type=str | None, default=None, help="a recipe.yaml, as RECIPE")
    parser.add_argument("--out", type=str | None, default=None, help="new run folder; default runs/RECIPE-MODEL")
    parser.add_argument("--plan", type=str | None, default=None, help="a plan.json, edited or not: layers, settings")
    parser.add_argument("--resume", type=str | None, default=None, help="run folder to go on with")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output; progress stays on stderr")
    parser.add_class_arguments(Recipe, None, sub_configs=False)
    parser.set_defaults(recipe_to_dict(base))
    return parser


def _first_line(make: Any) -> str:
    return (make.__doc__ or "").strip().splitlines()[0]


def _summary(out: Path) -> dict[str, Any]:
    def last(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) if path.is_file() else None

    arms = {"recast": out / "metrics.jsonl", "finetuned": out / "finetuned" / "metrics.jsonl"}
    return {"run": str(out), "last_epoch": {arm: last(path) for arm, path in arms.items()}}
