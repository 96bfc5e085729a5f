"""`recast train RECIPE`: recast a parent and train on, both arms."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from recast.cli.options import TRAIN_ALIASES, new_parser, parse, print_json, rewrite
from recast.config import Recipe
from recast.errors import RecastError
from recast.recipe import load_recipe, recipe_to_dict
from recast.recipes import RECIPES, make_recipe

EXAMPLES = """  recast train finetune --model resnet50 --pretrained --data folder --data-dir DIR --out runs/mine
  recast train finetune --model cifar_resnet20 --checkpoint FILE --data cifar100 --data-dir DIR --epochs 10
  recast train tcnn --data-dir IMAGENET --lr 5e-5 --out runs/tcnn
  recast train runs/mine/recipe.yaml --seed 1 --out runs/mine-1        (replay a run, change what you like)
  recast train --resume runs/mine                                      (go on where it stopped)
"""


def run(argv: Sequence[str]) -> int:
    """Train the arms of a recipe into a run folder; prints where it lies."""
    arguments = list(argv)
    name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    resumed = _resumed_folder(arguments)
    base = _base(name, resumed)
    parser = _parser(base)
    options = parser.instantiate(parse(parser, arguments, TRAIN_ALIASES))
    if name is None and resumed is None:
        raise RecastError(f"which recipe? Expected {', '.join(RECIPES)} or a recipe.yaml; or --resume RUN")
    if resumed is not None and options.out is not None:
        raise RecastError("--resume goes on in its own folder: leave --out away")
    recipe = Recipe(**{field.name: options[field.name] for field in dataclasses.fields(Recipe)})
    out = Path(resumed or options.out or f"runs/{Path(name or '').stem}-{recipe.model.name.replace(':', '-')}")

    from recast.training.run import train

    say = None if options.json else print
    command = shlex.join(["recast", "train", *argv])
    train(recipe, out, resume=resumed is not None, progress=not options.json, command=command, say=say)
    if options.json:
        print_json(_summary(out))
    else:
        print(f"run: {out}\nnext: recast evaluate {out} && recast report {out}")
    return 0


def _resumed_folder(arguments: list[str]) -> str | None:
    """The value of --resume, looked up before parsing: it decides whose defaults the options have."""
    for token, following in zip(rewrite(arguments, {}), [*arguments[1:], None], strict=False):
        if token.startswith("--resume="):
            return token.removeprefix("--resume=")
        if token == "--resume":
            if following is None or following.startswith("-"):
                raise RecastError("--resume needs the run folder: recast train --resume RUN")
            return following
    return None


def _base(name: str | None, resumed: str | None) -> Recipe:
    if resumed is not None:
        path = Path(resumed) / "recipe.yaml"
        if not path.is_file():
            raise RecastError(f"{resumed} holds no run to resume: it has no recipe.yaml")
        return load_recipe(path)
    if name is None:
        return Recipe()
    is_file = name.endswith((".yaml", ".yml"))
    return load_recipe(name) if is_file else make_recipe(name)


def _parser(base: Recipe) -> ArgumentParser:
    """Every field of the recipe as an option, with the recipe's own values as defaults."""
    known = "\n".join(f"  {name:<10}{_first_line(make)}" for name, make in RECIPES.items())
    parser = new_parser(
        "train RECIPE",
        "Recast a trained network and train on, beside the parent trained the same way.\n\n"
        f"recipes:\n{known}\n  or the recipe.yaml of a run",
        EXAMPLES,
        TRAIN_ALIASES,
    )
    parser.add_argument("--out", type=str | None, default=None, help="new run folder (default: runs/RECIPE-MODEL)")
    parser.add_argument("--resume", type=str | None, default=None, help="run folder to go on with")
    parser.add_argument("--json", type=bool, default=False, help="machine-readable output, no progress")
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
