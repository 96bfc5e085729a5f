"""`train`: a whole run, from a recipe to a run folder with both arms."""

from __future__ import annotations

import copy
import json
import operator
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from recast.errors import RecastError, listed
from recast.files import write_text
from recast.lab.config import Recipe
from recast.lab.config.text import save_recipe
from recast.lab.data.device import surroundings
from recast.lab.data.duplicates import report_duplicates
from recast.lab.data.fingerprint import fingerprint_of
from recast.lab.data.seeding import mix_seed, seeded
from recast.lab.folder.files import number, read_json, write_json
from recast.lab.folder.run import RunFolder, follow_up
from recast.lab.open import check_classes, check_same
from recast.lab.task import task_of
from recast.lab.training import distributed
from recast.lab.training.checkpoint import newest_state
from recast.lab.training.loop import fit, write_weights
from recast.lab.training.prepare import Prepared, prepare, recipe_of_run, with_task
from recast.lab.training.switches import WAKING_IMAGES
from recast.layers.cmhsa import recast_layers
from recast.layers.config import BiasGate
from recast.models.trust import trusting
from recast.surgery.apply import recast_
from recast.surgery.folding.model import fold_
from recast.surgery.parameters import queries_keys_ratio
from recast.surgery.plan import Plan, applied_plan, nothing_to_see, plan_of
from recast.surgery.records import Left
from recast.surgery.scales import recalibrate_batch_norm_
from recast.surgery.verify import verify
from recast.surgery.wake import wake_, waking_summary

VERIFIED = 500
"""Number of validation images on which parent and child are compared before training."""
ASLEEP = 16.0
"""Above this relative bias too little of the gradient reaches C-MHSA's attention (results/cmhsa_training.csv)."""


def train(
    recipe: Recipe, out: str | Path, *, resume: bool = False, progress: bool = True, command: str = "",
    say: Callable[[str], object] = lambda text: None, trust: bool = False,
) -> Path:  # fmt: skip
    """Recast the parent of `recipe`, verify it, train it into the folder `out`, and train the parent the same way.

    With a `recipe.schedule` training starts with the parent, and its layers become attention at their dates; attention
    pooling (`recipe.pool`) is inserted before training. The control arm keeps the network's own pooling.

    out/                     recipe.yaml classes.json environment.json plan.json verify.json
                             metrics.jsonl weights.safetensors resume/; schedule.json with a schedule
    out/finetuned/           the control arm (`recipe.control`): metrics.jsonl weights.safetensors resume/
    out/parent.safetensors   the parent, if its weights are random or its classifier is new;
                             out/returned.safetensors, if a function of the user returned them
    out/FILE                 a copy of each file that the settings of a paper name (`PaperConfig.files`)

    A recipe that recasts nothing (`where: [none]`, `pool.kind: none`) trains the network itself into `out`, without
    plan and control arm.

    Args:
        recipe: settings of the run. recipe.yaml completes it (classes, normalisation) and replays the run.
        out: a new or empty run folder.
        resume: continue the run in `out`, with the recipe in its folder; a finished run is not changed.
        progress: show a line per epoch on standard error.
        command: text for environment.json.
        say: called with lines on images, plan and exactness.
        trust: import functions that the recipe names (`pkg.module:function`).

    Raises:
        RecastError: for a folder in use, and for mistakes in recipe, data or parent before the folder is made; and as
            `fit` does.
        Interrupted: after Ctrl-C or SIGTERM.
    """
    folder = RunFolder(out)
    with trusting(trust=trust), distributed.process_group(recipe.device) as device, distributed.held(folder.path):
        if resume:
            recipe = distributed.first_then_all(recipe_of_run, recipe, folder)
        else:
            recipe = with_task(recipe)
            distributed.on_first(folder.check_unused)
        prepared = distributed.first_then_all(prepare, recipe, folder, resume)
        if distributed.is_first():
            say(prepared.pixels)
            for note in _notes(prepared):
                warnings.warn(note, stacklevel=2)
        if resume:
            distributed.on_first(check_classes, folder, prepared.data)
            distributed.on_first(check_same, folder, prepared.data, goes_on=True)
        with (
            _ending(folder, resume, recipe.functions),
            _Run(prepared, folder, device, resume, progress, say, command) as run,
        ):
            if prepared.plan is None:
                run.arm(prepared.parent, "trained", folder)
                return folder.path
            child, plan = run.child(prepared.plan)
            run.arm(child, "recast", folder, plan)
            if recipe.control:
                run.arm(prepared.parent, "finetuned", RunFolder(folder.control))
    return folder.path


@contextmanager
def _ending(folder: RunFolder, resume: bool, functions: tuple[str | None, str | None]) -> Iterator[None]:
    """Withdraw a run that failed before its first state; say how to continue one that was interrupted."""
    try:
        yield
    except (RecastError, OSError):  # after the mistake is fixed, the same command starts again
        if distributed.is_first() and not resume and not folder.saved_states():
            folder.remove_first_files()
        raise
    except KeyboardInterrupt as stopped:
        command = follow_up("train", "--resume", str(folder), functions=functions)
        saved = isinstance(stopped, distributed.Interrupted) and stopped.saved
        reason = "interrupted: state saved" if saved else str(stopped) or f"interrupted: {newest_state(folder)}"
        raise distributed.Interrupted(f"{reason}; continue with: {command}", saved) from None


def _notes(prepared: Prepared) -> Iterator[str]:
    """Yield notes on unreadable images, notes of the task, and notes on settings with which attention hardly learns."""
    recipe, data, bad = prepared.recipe, prepared.data, prepared.data.bad_images
    if bad:
        yield f"skipped unreadable images ({len(bad)}): {listed(bad, 5)}"
    if data.in_chans is not None and (recipe.augmentation.auto_augment or recipe.augmentation.color_jitter):
        yield f"auto_augment and color_jitter require RGB: not applied for in_chans={data.in_chans}"
    yield from task_of(recipe.task).notes(recipe.task, data)
    if prepared.plan is not None and (reason := nothing_to_see(prepared.plan)):
        yield f"{reason} (--img-size, --where stage:-2)"
    if isinstance(recipe.recast, BiasGate) and recipe.recast.bias_init > ASLEEP:
        start = f"C-MHSA starts at a bias of {recipe.recast.bias_init:g}, where its attention hardly learns"
        yield f"{start}: use --bias-init 10 to 15 for training"


@dataclass
class _Run:
    """A run in its folder; a context in which its arms are trained."""

    prepared: Prepared
    folder: RunFolder
    device: torch.device
    resume: bool
    progress: bool
    say: Callable[[str], object]
    command: str
    environment: dict[str, Any] = field(default_factory=dict)
    """The content of environment.json, once `open` wrote it."""

    def __post_init__(self) -> None:
        self.recipe, self.data, self.parent = self.prepared.recipe, self.prepared.data, self.prepared.parent
        self.teacher = copy.deepcopy(self.parent) if self.recipe.teacher.kind == "parent" else None
        self.start_time = time.time()
        self.has_begun = distributed.on_first(self.folder.has_begun)

    def __enter__(self) -> Self:
        if not self.has_begun:
            distributed.on_first(self.open)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                distributed.on_first(self.open)  # all arms were finished, but paths may have changed
        finally:
            if self.environment:
                seconds = self.environment["seconds"] + time.time() - self.start_time
                with suppress(OSError):  # a full disk must not hide why the run ended
                    write_json(self.folder.environment, {**self.environment, "seconds": round(seconds, 1)})

    def open(self) -> None:
        """Write once what is known before training; recipe.yaml comes after the files that resuming requires."""
        if self.environment:
            return
        path = self.folder.environment
        before = read_json(path) if path.is_file() else {}
        if not self.resume:
            write_json(self.folder.classes_file, self.data.classes)
            write_text(self.folder.fingerprint, json.dumps(fingerprint_of(self.data)) + "\n")
            if line := report_duplicates(self.data, self.folder.duplicates):
                self.say(line)
        for name, text in self.prepared.files.items():
            write_text(self.folder.path / name, text)
        if self.prepared.keeps_parent:
            parent = task_of(self.recipe.task).undone(self.parent)
            write_weights(parent, Path(str(self.recipe.model.checkpoint)), self.recipe.model, self.data)
        save_recipe(self.recipe, self.folder.recipe_file)  # also on resume: paths may have changed
        self.environment = {
            **surroundings(self.device),
            "processes": distributed.process_count(),
            "date": before.get("date") or datetime.now(UTC).isoformat(timespec="seconds"),
            "command": before.get("command") or self.command,
            "seconds": number(before.get("seconds", 0.0)),
        }
        write_json(path, self.environment)

    def child(self, plan: Plan) -> tuple[nn.Module, Plan]:
        """Return the network that the recast arm starts with, and its plan; verify it if the run has not begun."""
        is_during = self.recipe.schedule.is_during
        if self.has_begun:
            plan, child = self.folder.plan(), copy.deepcopy(self.parent)
            if not is_during:
                recast_(child, plan)  # `fit` loads the weights
        else:
            child, plan = self._recast(plan)
            distributed.on_first(write_text, self.folder.plan_file, plan.to_json())
        if is_during and plan.pool is not None:
            with seeded(mix_seed("pool", self.recipe.seed)):
                recast_(child, plan.without_steps())
        return child, plan

    def arm(self, model: nn.Module, name: str, folder: RunFolder, plan: Plan | None = None) -> None:
        """Train an arm into a folder; with the schedule of the recipe if it is the recast one, which has a plan."""
        schedule = self.recipe.schedule if plan is not None else self.recipe.schedule.start
        recipe = self.recipe if name == "trained" else self.recipe.replace(schedule=schedule)
        scheduled = plan if schedule.is_during else None
        fit(
            model, self.data, recipe, folder.path, resume=self.resume, progress=self.progress, name=name,
            parent=self.teacher, plan=scheduled, on_start=self.open,
        )  # fmt: skip
        if scheduled is not None:
            distributed.on_first(write_text, folder.plan_file, plan_as_trained(scheduled, model).to_json())

    def _recast(self, plan: Plan) -> tuple[nn.Module, Plan]:
        """Recast the parent and verify it. Returns the network that training starts with, and its plan.

        With a schedule that network is the parent.
        """
        recipe, schedule = self.recipe, self.recipe.schedule
        self.parent.to(self.device)
        with seeded(mix_seed("recast", recipe.seed)):
            child = recast_(copy.deepcopy(self.parent), plan)
            if schedule.kind == "never":
                fold_(child)  # every head is closed
        new = [step.name for step in plan.steps if step.name in recast_layers(child)]  # the parent's own have learnt
        if recipe.recast.query_key == "images" and new:
            woken = wake_(child, self._training_images(WAKING_IMAGES), recipe.recast.logit_std, recipe.seed, new)
            distributed.on_first(self.say, waking_summary(woken))
        if (ratio := queries_keys_ratio(child)) < 1 and recipe.optim.qk_lr is None:
            share = f"queries and keys of wide layers learn at {ratio:.2g} of the learning rate"
            distributed.on_first(self.say, f"{share} (--qk-lr sets another)")
        distributed.on_first(self._verify, child, plan)
        if schedule.is_during:
            return copy.deepcopy(self.parent), plan
        if count := schedule.start.recalibrate_bn:
            recalibrate_batch_norm_(child, self._training_images(count))
        return child, applied_plan(child)

    def _training_images(self, count: int) -> Iterator[Tensor]:
        recipe = self.recipe
        return self.data.some(self.data.train.plain(), count, recipe.data, recipe.seed, self.device)

    def _verify(self, child: nn.Module, plan: Plan) -> None:
        """Compare parent and child on the first VERIFIED validation images; write and report the result."""
        recipe, schedule = self.recipe, self.recipe.schedule.dated(plan, self.recipe.epochs)
        batches = self.data.some(self.data.val, VERIFIED, recipe.data, recipe.seed, self.device, whole=True)
        verified = reduce(operator.add, (verify(self.parent, child, images) for images in batches))
        write_json(self.folder.verify, verified.to_dict())
        images = f"{verified.images} validation images"
        if schedule is None:
            self.say(f"{plan}\nagainst the parent on {images}: {verified}\n")
        else:
            self.say(f"{plan}\nif recast now, differences on {images}: {verified}\n{schedule}\n")


def plan_as_trained(plan: Plan, child: nn.Module) -> Plan:
    """Return the plan with the steps that were taken; layers that stayed convolutions are in `left`."""
    applied = plan_of(child)
    trained = applied if applied is not None and applied.steps else plan.without_steps()
    names = {step.name for step in trained.steps}
    stayed = tuple(Left(s.name, "stayed a convolution in this run") for s in plan.steps if s.name not in names)
    return replace(trained, left=plan.left + stayed)
