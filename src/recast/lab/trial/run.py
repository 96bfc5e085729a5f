"""`try_`: estimate in minutes if attention helps on some images, by training the tail of a network in several ways."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from torch import nn

from recast.config import coerce
from recast.errors import RecastError, listed
from recast.files import free_space, require, write_text
from recast.lab.data import Data, Loader
from recast.lab.data.class_order import name_other_classes, order_classes_
from recast.lab.data.datasets import ImageFiles, ImageTensors, LabelledImages
from recast.lab.data.device import choose_device
from recast.lab.data.duplicates import report_duplicates
from recast.lab.data.fingerprint import fingerprint_of
from recast.lab.data.seeding import choose_stratified, hold_out
from recast.lab.evaluation.model_key import model_key
from recast.lab.folder.files import locked, read_json, write_json
from recast.lab.folder.records import Wakefulness, is_at_chance
from recast.lab.folder.run import RunFolder
from recast.lab.pages.formats import plural
from recast.lab.task import task_named
from recast.lab.trial import arms
from recast.lab.trial.answer import RATES, Answer, ArmLine, Facts, epochs, judge, offers
from recast.lab.trial.arms import ARM_NAMES, COMPARED, TRAINED, Arm
from recast.lab.trial.features import Bank, check_space, store
from recast.lab.trial.pace import BLOCKS, FEWEST, RATE_PART, RATE_SHARE, Pace, measure_pace
from recast.lab.trial.runs import FILE, Runs
from recast.lab.trial.split import Tail, last_layers, split_network
from recast.surgery.apply import recast_
from recast.surgery.plan import Plan
from recast.tracing.cost import count_parameters
from recast.tracing.examples import run_example
from recast.tracing.outputs import logits_of

TRIAL, FEATURES, ANSWER = "trial.json", "features", "answer.json"
PIXELS = ("mean", "std", "img_size", "test_size", "crop_pct")
"""Settings of the images, besides the files, that decide the pixels that the network gets."""
AT_CHANCE = 512
"""Images on which a classifier of the right size must be better than chance."""


def try_(
    model: nn.Module,
    data: Data,
    plan: Plan,
    out: str | Path,
    *,
    minutes: float | Literal["auto"] = 10.0,
    seeds: int = 3,
    device: str | torch.device = "auto",
    progress: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> Answer:
    """Try whether attention helps on some images, before a full training: train the tail of the network alone.

    The layers before the first planned one are run once. Every arm trains on these features in the same way: the tail
    fine-tuned for as many updates, the tail fine-tuned for as many seconds, the tail with convolutions of similar cost
    added, and the tail recast. If the network has other classes, or its classifier is at chance, a linear classifier is
    trained first and used in all arms.

    Args:
        model: a trained network that gives logits; only read.
        data: training and validation images, from `recast.lab.data.load_data`; normalised as the network states.
        plan: what is recast, from `recast.plan(model, images)`.
        out: folder of the trial; an interrupted trial continues there.
        minutes: longest duration, by measured rates. More minutes give more updates, at most 20 epochs. auto: as long
            as an answer takes, at most an hour.
        seeds: most trainings per arm, with other orders of the images and starts of new parameters. It stops after two
            or more as soon as the answer is clear.
        device: auto, cpu, cuda, …
        progress: show a bar with the time left on standard error.
        say: called with a line on what was chosen.

    Returns:
        An `Answer`: worth a full run or not, the gains with intervals, the arms.

    Raises:
        RecastError: before anything is written, for data of another task or too few images, a plan without layers, a
            folder of another trial, a full disk; for auto, one seed, and an answer that takes longer than an hour.

    Example:
        >>> answer = try_(parent, data, recast.plan(parent, images), "runs/try")  # doctest: +SKIP
        >>> answer.worth, answer.gains["longer"].low  # doctest: +SKIP
        ('yes', 61.2)
    """
    if not isinstance(data.train, ImageFiles | ImageTensors):
        raise RecastError(f"a trial takes image files with one class each, not {data.name}: use recast train")
    if not plan.steps or plan.pool is not None:
        raise RecastError("a trial is of recast layers: the plan must have some, and no attention pooling")
    if seeds < 1 or (minutes != "auto" and not minutes > 0):
        raise RecastError(f"minutes must be auto or > 0, and seeds >= 1, got {minutes} and {seeds}")
    if minutes == "auto" and seeds == 1:
        raise RecastError("--minutes auto takes two seeds or more: one decides nothing")
    if len(data.classes) < 2:
        raise RecastError(f"a trial takes two classes or more, {data.name} has {listed(data.classes, 1)} alone")
    for part, images in (("training", data.train), ("validation", data.val)):
        if len(images) < FEWEST:
            raise RecastError(
                f"a trial takes {FEWEST} {part} images or more, {data.name} has {len(images)}: add images, or set "
                "--val-fraction if no folder holds the validation part"
            )
    hold_out(data.train.labels, RATE_SHARE)  # raises where no class can spare an image
    data, pixels = data.fitted_to(model)
    say(pixels)
    for note in task_named(data.val.task).notes(None, data):
        say(f"note: {note}")
    return _Trial(model, data, plan, Path(out), minutes, seeds, choose_device(device), say).run(progress)


class _Trial:
    """A trial in its folder: settings and pace in trial.json, finished trainings in `runs`."""

    bar: Progress
    task: TaskID

    def __init__(
        self, model: nn.Module, data: Data, plan: Plan, out: Path, minutes: float | Literal["auto"], seeds: int,
        device: torch.device, say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.data, self.plan, self.out, self.device, self.say = data, plan, out, device, say
        self.asked, self.seeds, self.notes = minutes, seeds, list[str]()
        self.runs = Runs(out)
        self.network, classes = copy.deepcopy(model).eval().to(device), len(data.classes)
        images = data.normalised(next(iter(Loader(data.val, 4)))[0], device)
        with torch.no_grad():
            logits = logits_of(run_example(self.network, images), self.network, "a trial")
        if not logits.isfinite().all():
            raise RecastError("the network gives NaN or infinite logits: check its weights, and --mean and --std")
        others = name_other_classes(self.network, data)
        if logits.shape[1] != classes:
            others = f"the network has {logits.shape[1]} classes, the data {classes}"
        self.is_new = bool(others)
        if self.is_new:
            self._note(f"{others}: a new classifier is trained first")
            arms.with_head(self.network, classes)
        else:
            order_classes_(self.network, data)
        pixels = {name: getattr(data.val if name == "crop_pct" else data, name) for name in PIXELS}
        settings = {"network": model_key(self.network), "plan": plan.to_json(), "data": fingerprint_of(data), **pixels}
        settings |= {"minutes": minutes, "seeds": seeds, "augment": str(data.train.augment)}
        self.settings = json.loads(json.dumps(settings))
        self.before = self._read_before()
        self.parts = split_network(self.network, last_layers(self.network, plan.steps), images)

    def _read_before(self) -> dict[str, Any] | None:
        """Return the content of trial.json and set `pace`; None in a new folder.

        Raises RecastError for any other folder.
        """
        if not (self.out / TRIAL).is_file():
            if self.out.is_dir() and any(self.out.iterdir()):
                raise RecastError(f"{self.out} is not empty: choose a new folder with --out")
            return None
        before = read_json(path := self.out / TRIAL, "settings", "pace")
        old, remedy = require(f"settings of {path}", before["settings"]), "choose a new folder with --out, or delete it"
        if differ := [name for name, value in self.settings.items() if old.get(name) != value]:
            shown = {name: f" ({old.get(name)}, now {self.settings[name]})" for name in ("minutes", "seeds", *PIXELS)}
            changed = [f"{name}{shown.get(name, '')}" for name in differ]
            raise RecastError(f"{self.out} was made with other settings, {', '.join(changed)}: {remedy}")
        try:
            self.pace = coerce(Pace, before["pace"], "pace")
        except RecastError as error:
            raise RecastError(f"{path} is damaged ({error}): {remedy}") from None
        fits = self.pace.train <= len(self.data.train) and self.pace.val <= len(self.data.val)
        if not fits or any(set(arms_of) != set(TRAINED) for arms_of in (self.pace.updates, self.pace.step)):
            raise RecastError(f"{path} is damaged (its pace lacks arms, or has more images): {remedy}")
        return before

    def run(self, progress: bool) -> Answer:
        """Run the trial, or the rest of it."""
        if self.parts.is_whole:
            self._note("the network cannot be split before its recast layers: it runs whole, with its trunk frozen")
        else:
            share = count_parameters(self.parts.tail) / count_parameters(self.network)
            self.say(f"split at {self.parts.tail.entry}: {share:.0%} of the parameters are trained")
        if self.before is None:
            self.pace = measure_pace(self.parts, self.data, self.plan, self.asked, self.seeds, self.device)
            check_space(self.out, self.pace.bytes)
        self._say_pace()
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress)
        self.task = self.bar.add_task("features", total=self.pace.seconds(self.seeds))
        duplicates = RunFolder(self.out).duplicates
        with locked(self.out), self.bar:
            try:
                if self.before is None:
                    self._write_trial()
                if line := report_duplicates(self.data, duplicates):
                    self._note(line)
                return self._answer()
            except RecastError:  # after the mistake is mended, the same command starts again
                if self.before is None and not self.runs.rows:
                    shutil.rmtree(self.out / FEATURES, ignore_errors=True)
                    for path in (self.out / TRIAL, self.out / FILE, duplicates):
                        path.unlink(missing_ok=True)
                raise
            except (OSError, SafetensorError) as error:  # a full disk, a folder that became read-only
                place = getattr(error, "filename", None) or self.out
                reason = getattr(error, "strerror", None) or error
                raise RecastError(
                    f"cannot use {place}: {reason}; its disk has {free_space(self.out)} left; mend that, then run "
                    "the same command again to continue"
                ) from None

    @property
    def minutes(self) -> float:
        """Return the minutes that the trial may take."""
        return next(iter(self.pace.ways.values())) if self.asked == "auto" else self.asked

    def _note(self, line: str) -> None:
        self.notes.append(line)
        self.say(line)

    def _say_pace(self) -> None:
        pace, data = self.pace, self.data
        if pace.train < len(data.train) or pace.val < len(data.val):
            self._note(
                f"of {len(data.train):,} training and {len(data.val):,} validation images {pace.train:,} and "
                f"{pace.val:,} are used in {self.minutes:g} minutes; a longer trial takes more"
            )
        self.say(offers(pace.ways))
        seconds = pace.seconds(self.seeds)
        time = f"{seconds / 60:.1f}"
        is_longer = pace.is_shortest and seconds > 60 * self.minutes and time != f"{self.minutes:g}"
        reason = f", not {self.minutes:g}: {pace.updates['recast']} updates an arm are the fewest" if is_longer else ""
        self.say(
            f"{pace.train:,} training images in {plural(pace.views, 'view')}, {pace.val:,} validation images: "
            f"{pace.bytes / 2**20:,.0f} MiB of features in {self.out / FEATURES}\n"
            f"{pace.updates['recast']:,} updates of {pace.batch} images an arm, {epochs(pace.epochs)}; "
            f"at most about {time} minutes{reason}\n"
            f"learning rates are chosen on a random {100 * RATE_SHARE:g} % of the training images, whatever their group"
        )

    def _bank(self, images: LabelledImages, count: int, views: int, name: str) -> Bank:
        if count < len(images):
            images = images.subset(choose_stratified(images.labels, count, name))
        if (folder := self.out / FEATURES).is_file():
            raise RecastError(f"{folder} is a file: remove it, or choose another folder with --out")
        folder.mkdir(exist_ok=True)
        return store(
            self.parts, self.data, images, views, self.pace.dtype, self.pace.image_bytes, folder, name, self.device,
            lambda done: self.bar.advance(self.task, done * self.pace.image), self.say,
        )  # fmt: skip

    def _write_trial(self) -> None:
        write_json(self.out / TRIAL, {"settings": self.settings, "pace": asdict(self.pace)})

    def _answer(self) -> Answer:
        """Compute the features, choose the rates, train every arm and judge them."""
        self.runs.open(self.say)
        val = self._bank(self.data.val, self.pace.val, 1, "val")
        train = self._bank(self.data.train, self.pace.train, self.pace.views, "train")
        part, held_out = (train.subset(places) for places in hold_out(train.labels, RATE_SHARE))
        tail = tail_of_part = self.parts.tail.to(self.device)
        if self.is_new or self._is_at_chance(tail, train):
            self.bar.update(self.task, description="classifier")
            tail, tail_of_part = arms.with_fitted_head(tail, [train, part], self.device)
        rates: dict[Arm, float] = {}

        def choose_rate(arm: Arm) -> None:
            rows = [self._train_arm("rate", arm, 0, rate, tail_of_part, part, held_out) for rate in RATES]
            best = min(rows, key=lambda row: row["loss"])
            if best["loss"] >= arms.DIVERGED:
                raise RecastError(
                    f"{ARM_NAMES[arm]}: the loss is NaN or infinite at every learning rate from {RATES[0]:.0e} to "
                    f"{RATES[-1]:.0e}; check the network's weights, and --mean and --std"
                )
            rates[arm] = best["rate"]

        runs: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in TRAINED}

        def train_arm(arm: Arm, seed: int) -> None:
            runs[arm].append(row := self._train_arm("final", arm, seed, rates[arm], tail, train, val))
            if row["loss"] >= arms.DIVERGED:
                self._note(f"{ARM_NAMES[arm]}, seed {seed}: the loss became NaN or infinite")

        choose_rate("finetuned")
        choose_rate("recast")
        rates["longer"] = rates["finetuned"]
        _, parent = arms.score(tail, val, self.device)
        for seed in range(self.seeds):  # all arms of a seed first: an interrupted trial has whole pairs
            for arm in COMPARED:
                train_arm(arm, seed)
            if seed > 0 and self._judge(parent, runs, rates, BLOCKS).worth != "unclear":
                break
        if len(self.pace.ratios) == BLOCKS:
            self._measure_steps_again(tail, train)
        answer = self._judge(parent, runs, rates)
        if answer.worth == "yes":  # is it the attention, or the computation?
            choose_rate("added")
            for seed in range(answer.seeds):
                train_arm("added", seed)
            answer = self._judge(parent, runs, rates)
        write_text(self.out / ANSWER, answer.to_json() + "\n")
        self._write_pages(answer, {arm: rows for arm, rows in runs.items() if rows}, tail)
        return answer

    def _train_arm(
        self, kind: str, arm: Arm, seed: int, rate: float, start: Tail, train: Bank, test: Bank
    ) -> dict[str, Any]:
        """Train an arm from the tail `start` and return its row of runs.jsonl, or the row that is there."""
        key, seconds = {"kind": kind, "arm": arm, "seed": seed, "rate": rate}, self.pace.step[arm]
        updates, detail = self.pace.updates[arm], f"seed {seed}"
        if kind == "rate":
            updates, detail = max(1, updates // RATE_PART), f"rate {rate:.0e}"
        row, is_damaged = self.runs.find(key, updates, len(test))
        if is_damaged:
            self.say(f"{self.out}: {ARM_NAMES[arm]}, {detail} is damaged or incomplete: it is trained again")
        if row is not None:
            self.bar.advance(self.task, updates * seconds)
            return row
        self.bar.update(self.task, description=f"{ARM_NAMES[arm]}, {detail}")
        tail = arms.make(arm, start, self.plan, train, seed, self.device)
        trained = arms.train_(
            tail, train, test, rate=rate, updates=updates, batch=self.pace.batch, seed=seed, device=self.device,
            advance=lambda: self.bar.advance(self.task, seconds),
        )  # fmt: skip
        row = key | {"updates": updates, **asdict(trained)}
        if kind == "final" and arm == "recast":
            awake = arms.attention(tail, test, self.device)
            row["attention"] = None if awake is None else asdict(awake)
            if seed == 0:
                row["weights"] = self.runs.save_weights(tail.network)
        self.runs.append(row)
        return row

    def _measure_steps_again(self, tail: Tail, train: Bank) -> None:
        """Add the ratio of a recast to a fine-tuned update after the trainings to the pace."""
        bank = train.spread(self.pace.batch)
        pair: tuple[Arm, ...] = ("finetuned", "recast")
        tails = {arm: arms.make(arm, tail, self.plan, bank, 0, self.device) for arm in pair}
        (block,) = arms.step_seconds(tails, bank, self.pace.batch, self.device)
        self.pace = replace(self.pace, ratios=(*self.pace.ratios, arms.ratio_of(block)))
        self._write_trial()

    def _write_pages(self, answer: Answer, runs: Mapping[Arm, Sequence[Mapping[str, Any]]], tail: Tail) -> None:
        if find_spec("matplotlib") is None:
            self.say("no page is written: pip install matplotlib")
            return
        from recast.lab.trial.page import write_heads, write_page

        parent = copy.deepcopy(self.network)
        parent.load_state_dict(tail.network.state_dict(), strict=False)  # its classifier
        child = recast_(copy.deepcopy(self.network), self.plan)
        child.load_state_dict(self.runs.weights(), strict=False)
        write_heads(self.out, parent, child.eval(), self.data)
        curves: dict[str, list[tuple[int, float]]] = {}
        for arm, rows in runs.items():
            points = zip(*(row["curve"] for row in rows), strict=True)
            curves[arm] = [(point[0][0], mean(loss for _, loss in point)) for point in points]
        page = write_page(self.out, answer, curves, f"{self.plan.model} on {self.data.name}")
        self.say(f"the page: {page}")

    def _is_at_chance(self, tail: Tail, train: Bank) -> bool:
        sample = train.spread(AT_CHANCE)
        _, right = arms.score(tail, sample, self.device)
        if not is_at_chance(mean(right), len(self.data.classes), len(sample)):
            return False
        self._note(
            f"the classifier is right on {mean(right):.1%} of the training images, which is chance: another one is "
            "trained first"
        )
        return True

    def _judge(
        self,
        parent: tuple[bool, ...],
        runs: dict[Arm, list[dict[str, Any]]],
        rates: dict[Arm, float],
        ratios: int | None = None,
    ) -> Answer:
        """Judge the trainings so far, by the first `ratios` measurements of the clock: those of that time."""
        pace = self.pace
        lines = [ArmLine("parent", ARM_NAMES["parent"], 100 * mean(parent))]
        for arm in (arm for arm in TRAINED if runs[arm]):
            top1 = 100 * mean(mean(row["right"]) for row in runs[arm])
            seconds = mean(row["seconds"] for row in runs[arm])
            lines.append(
                ArmLine(arm, ARM_NAMES[arm], top1, pace.updates[arm], seconds, 1000 * pace.step[arm], rates[arm])
            )
        awake = [Wakefulness(**row["attention"]) for row in runs["recast"] if row.get("attention")]
        attention = sorted(awake, key=lambda seed: seed.awake)[len(awake) // 2] if awake else None
        facts = Facts(
            pace.train, pace.epochs, pace.most_epochs, self.minutes, self.parts.tail.entry, pace.views,
            min(pace.updates.values()), self.seeds, pace.ways, tuple(self.notes), tuple(pace.ratios[:ratios]),
            pace.updates["longer"] / pace.updates["finetuned"], getattr(self.plan.config, "beside", ""),
        )  # fmt: skip
        right: dict[str, Any] = {arm: [row["right"] for row in rows] for arm, rows in runs.items() if rows}
        return judge(right, lines, attention, facts)
