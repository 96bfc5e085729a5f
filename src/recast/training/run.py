"""`train`: everything that `recast train` does, from a recipe to a run folder with both arms."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from recast.data import Data, loader
from recast.data.seeding import mix_seed, seeded
from recast.errors import RecastError
from recast.io import save
from recast.models.build import constructor
from recast.run.config import Recipe, ScheduleConfig
from recast.run.files import write_json, write_text
from recast.run.recipe import save_recipe
from recast.run.schedule import Schedule
from recast.surgery.apply import applied_plan, put_pool_, recast_
from recast.surgery.calibrate import calibrate_
from recast.surgery.plan import Left, Plan
from recast.surgery.planning import plan
from recast.surgery.pooling.swap import attention_pools
from recast.surgery.scales import recalibrate_batch_norm_
from recast.surgery.verify import Exactness, verify
from recast.training.checkpoint import states
from recast.training.distributed import first_then_all, is_first, on_first, process_group
from recast.training.environment import recorded
from recast.training.fit import fit
from recast.training.metrics import normalise
from recast.training.prepare import Prepared, prepare, recipe_of_run, refuse_used
from recast.training.ranges import check_shares
from recast.training.signals import Interrupted

VERIFIED = 500
"""How many validation images parent and child are compared on before training."""

ASLEEP = 16.0
"""Above this relative bias too little of the gradient reaches C-MHSA's attention (results/cmhsa_training.csv)."""

WRITTEN = ("recipe.yaml", "classes.json", "environment.json", "plan.json", "verify.json", "schedule.json")
"""What a run folder holds before its first state."""

Say = Callable[[str], object]


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    command: str = "",
    say: Say | None = None,
) -> Path:
    """Recast the parent of `recipe`, verify it, train it into the folder `out`, and the parent itself the same way.

    With `recipe.schedule` the parent is trained as it is and its layers become attention on their dates; attention
    pooling (`recipe.pool`) goes in before training all the same. The control arm keeps the network's own pooling.

    out/                recipe.yaml classes.json environment.json plan.json verify.json
                        metrics.jsonl weights.safetensors resume/; schedule.json where `recipe.schedule` is one
    out/finetuned/      the control arm (`recipe.control`): metrics.jsonl weights.safetensors resume/
    out/parent.safetensors   only where nothing else holds the parent's weights: random ones, or a new head

    Where the recipe recasts nothing (`where: [none]`, `pool.kind: none`) the network itself is trained into `out`: no
    plan, no control.
    recipe.yaml is the recipe with what was left open filled in (classes, normalisation), so that it replays the run.
    With `resume` a run goes on where it stopped, with the recipe in its folder; what is finished is left alone.
    `command` is kept in environment.json; `say` is given the plan and how exact the recast is, as text.

    Raises RecastError for a folder in use, whatever is wrong with recipe, data or parent (before the folder is made),
    and what `fit` raises; Interrupted after Ctrl-C or SIGTERM.
    """
    out = Path(out)
    with process_group(recipe.device) as device:
        if resume:
            recipe = first_then_all(lambda: recipe_of_run(recipe, out))
        else:
            on_first(lambda: refuse_used(out))
        on_first(lambda: check_shares(recipe))
        prepared = first_then_all(lambda: prepare(recipe, resume))
        if is_first() and prepared.data.bad_images:
            named = ", ".join(prepared.data.bad_images[:5]) + (" ..." if len(prepared.data.bad_images) > 5 else "")
            warnings.warn(
                f"{len(prepared.data.bad_images)} images cannot be read and are left out: {named}", stacklevel=2
            )
        if recipe.optim.pool_lr is not None and recipe.is_plain and not attention_pools(prepared.parent):
            raise RecastError(
                f"optim.pool_lr is the rate of attention pooling, which {recipe.model.name} has not: leave it out, or "
                "take pool.kind=single"
            )
        planned = None if recipe.is_plain else _plan(prepared)
        if is_first() and recipe.recast.gate == "bias" and recipe.recast.bias_init > ASLEEP:
            warnings.warn(
                f"C-MHSA starts at a bias of {recipe.recast.bias_init:g}, where its attention hardly learns: "
                "--bias-init 10 to 15 is for training",
                stacklevel=2,
            )
        prepared = _open_folder(prepared, out, resume, house=prepared.homeless and planned is not None)
        try:
            with recorded(out, device, command):
                _train_arms(prepared, planned, out, device, resume, progress, say or (lambda text: None))
        except RecastError:
            if is_first() and not resume:
                _withdraw(out)
            raise
        except KeyboardInterrupt as stopped:
            folder = f'"{out}"' if " " in str(out) else str(out)
            saved = str(stopped).startswith("interrupted: state saved")
            what = "interrupted: state saved" if saved else str(stopped) or "interrupted before training"
            raise Interrupted(f"{what}; continue with: recast train --resume {folder}") from None
    return out


def _plan(prepared: Prepared) -> Plan:
    recipe = prepared.recipe
    where = recipe.where[0] if len(recipe.where) == 1 else recipe.where
    return plan(prepared.parent, prepared.example, recipe.recast, where=where, budget=recipe.budget, pool=recipe.pool)


def _open_folder(prepared: Prepared, out: Path, resume: bool, house: bool) -> Prepared:
    """Write what is known before training. `house` keeps the parent in the folder, and the recipe names that file."""
    recipe, data = prepared.recipe, prepared.data
    path = out / "parent.safetensors"
    if house and not resume:
        recipe = replace(
            recipe, model=replace(recipe.model, checkpoint=str(path.resolve()), pretrained=False, new_head=False)
        )

    def write() -> None:
        out.mkdir(parents=True, exist_ok=True)
        if house and not resume:
            save(prepared.parent, path, constructor=constructor(recipe.model, num_classes=len(data.classes)))
        save_recipe(recipe, out / "recipe.yaml")  # also when a run goes on: where things lie may have changed
        write_json(out / "classes.json", data.classes)

    on_first(write)
    return replace(prepared, recipe=recipe)


def _withdraw(out: Path) -> None:
    """Remove what a run wrote that never got to its first state: the mistake mended, the same command starts again."""
    if states(out):
        return
    for name in (*WRITTEN, "parent.safetensors", "metrics.jsonl"):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    with suppress(OSError):  # not empty: somebody else's files
        out.rmdir()


def _train_arms(
    prepared: Prepared, planned: Plan | None, out: Path, device: torch.device, resume: bool, progress: bool, say: Say
) -> None:
    recipe, data, parent = prepared.recipe, prepared.data, prepared.parent
    learns = recipe.distill.name == "parent" or recipe.distill.feature_epochs > 0
    teacher = copy.deepcopy(parent) if learns else None
    if planned is None:
        fit(parent, data, recipe, out, resume=resume, progress=progress, name="trained", parent=teacher)
        return
    if recipe.schedule.name == "before":
        child = _child(parent, planned, data, recipe, out, device, say)
        fit(child, data, recipe, out, resume=resume, progress=progress, name="recast", parent=teacher)
    else:
        begun = _announced(parent, planned, data, recipe, out, device, say)
        child = copy.deepcopy(parent)
        if begun.pool is not None:
            with seeded(mix_seed("pool", recipe.seed)):
                put_pool_(child, begun)
        fit(child, data, recipe, out, resume=resume, progress=progress, name="recast", parent=teacher, plan=begun)
        on_first(lambda: write_text(out / "plan.json", as_it_ended(begun, child).to_json()))
        recipe = replace(recipe, schedule=ScheduleConfig())  # the control arm stays the network that it is
    if recipe.control:
        control = out / "finetuned"
        fit(parent, data, recipe, control, resume=resume, progress=progress, name="finetuned", parent=teacher)


def _child(
    parent: nn.Module, planned: Plan, data: Data, recipe: Recipe, out: Path, device: torch.device, say: Say
) -> nn.Module:
    """The recast model as training starts with it; where the run goes on, its shape alone (`fit` loads the weights)."""
    if on_first(lambda: bool(states(out)) or (out / "weights.safetensors").exists()):
        return recast_(copy.deepcopy(parent), Plan.from_json((out / "plan.json").read_text(encoding="utf-8")))
    parent.to(device)
    with seeded(mix_seed("recast", recipe.seed)):
        child = recast_(copy.deepcopy(parent), planned)
    if is_first():
        exactness = _verify(parent, child, data, recipe, device)
        write_json(out / "verify.json", exactness.to_dict())
        say(f"{planned}\nagainst the parent on {exactness.images} validation images: {exactness}\n")
    if recipe.calibrate:
        calibrate_(child, parent, _plain_batches(data, recipe, device, recipe.calibrate))
    if recipe.recalibrate_bn:
        recalibrate_batch_norm_(child, _plain_batches(data, recipe, device, recipe.recalibrate_bn))
    on_first(lambda: write_text(out / "plan.json", applied_plan(child).to_json()))
    return child


def _announced(
    parent: nn.Module, planned: Plan, data: Data, recipe: Recipe, out: Path, device: torch.device, say: Say
) -> Plan:
    """The plan of a run that recasts during training, with its dates told; the run's own where it goes on."""
    if on_first(lambda: bool(states(out)) or (out / "weights.safetensors").exists()):
        return Plan.from_json((out / "plan.json").read_text(encoding="utf-8"))
    schedule = Schedule.of(recipe.schedule, planned, recipe.epochs)
    parent.to(device)
    if is_first():
        with seeded(mix_seed("recast", recipe.seed)):
            child = recast_(copy.deepcopy(parent), planned)
        exactness = _verify(parent, child, data, recipe, device)
        write_json(out / "verify.json", exactness.to_dict())
        how = f"recast as it is now, it would differ on {exactness.images} validation images by: {exactness}"
        say(f"{planned}\n{how}\n{schedule}\n")
    on_first(lambda: write_text(out / "plan.json", planned.to_json()))
    return planned


def as_it_ended(planned: Plan, child: nn.Module) -> Plan:
    """The plan with the steps that were taken; what never left the convolution is among the layers that were left."""
    done = getattr(child, "recast_plan", None)
    ended = done if isinstance(done, Plan) and done.steps else planned.without_steps()
    taken = {step.name for step in ended.steps}
    stayed = tuple(Left(s.name, "stayed a convolution in this run") for s in planned.steps if s.name not in taken)
    return replace(ended, left=planned.left + stayed)


def _verify(parent: nn.Module, child: nn.Module, data: Data, recipe: Recipe, device: torch.device) -> Exactness:
    """Parent and child on the first VERIFIED validation images, in the order of the recipe's seed."""
    total: Exactness | None = None
    batch_size, bad_image = min(recipe.data.batch_size, 128), recipe.data.bad_image
    for images, _ in loader(data.val, batch_size, shuffle_seed=recipe.seed, bad_image=bad_image):
        found = verify(parent, child, normalise(images.to(device), data))
        total = found if total is None else total + found
        if total.images >= VERIFIED:
            break
    assert total is not None  # `prepare` has seen images
    return total


def _plain_batches(data: Data, recipe: Recipe, device: torch.device, count: int) -> list[Tensor]:
    """`count` training images without augmentation, normalised, in batches."""
    batches, missing = [], count
    batch_size, bad_image = min(recipe.data.batch_size, 128), recipe.data.bad_image
    for images, _ in loader(data.train.plain(), batch_size, shuffle_seed=recipe.seed, bad_image=bad_image):
        batches.append(normalise(images[:missing].to(device), data))
        missing -= len(batches[-1])
        if missing <= 0:
            break
    return batches
